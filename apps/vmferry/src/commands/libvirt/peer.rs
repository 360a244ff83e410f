//! The sockets of this host's `vmferry daemon` that a migration uses.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use uuid::Uuid;
use vmferry_proxy::{LIBVIRT_SOCKET, is_plain_name};

use super::failure::NamedPeer;
use crate::commands::daemon::config::Configuration;
use crate::exit::{Code, Failure};

/// The longest path of a Unix socket: `sun_path` in unix(7), without the zero byte.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// A peer of this host's daemon, with the directory of its sockets.
#[derive(Clone, Debug)]
pub struct PeerDirectory {
    directory: PathBuf,
    name: String,
    configuration: Configuration,
}

/// The URIs of one migration, which no other migration has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uris {
    /// The destination's libvirt.
    pub libvirt: String,
    /// The stream of memory.
    pub memory: String,
    /// The disks.
    pub disks: String,
}

impl PeerDirectory {
    /// The directory of a peer of the daemon with this configuration.
    pub fn find(configuration: &Path, peer: &str) -> Result<Self, Failure> {
        if !is_plain_name(peer) {
            let text = format!(
                "{peer:?} is not the name of a peer: with --libvirt, --to is a name in the \
                 daemon's configuration {}, not an address",
                configuration.display()
            );
            return Err(Failure::new(Code::Usage, text));
        }
        let configuration = Configuration::read(configuration).map_err(|failure| {
            let said = "with --libvirt, `vmferry daemon` must run on this host and on the \
                        destination (docs/libvirt.md); name its configuration with --daemon-config";
            Failure { code: failure.code, error: failure.error.context(said) }
        })?;
        let directory = directory_of(configuration.directory(), peer)?;
        Ok(Self { directory, name: peer.to_owned(), configuration })
    }

    /// The peer's name and address.
    pub fn named(&self) -> NamedPeer {
        let address = self.configuration.address_of(&self.name);
        // A daemon that has not read the changed file yet has the socket of a removed peer.
        let address = address.unwrap_or("an address that the configuration does not name");
        NamedPeer { name: self.name.clone(), address: address.to_owned() }
    }

    /// The directory of all directories of sockets.
    pub fn base(&self) -> &Path {
        self.configuration.directory()
    }

    /// The kind of link and the address, as other migrations report it.
    pub fn transport(&self) -> String {
        let scheme = if self.configuration.is_plain() { "tcp" } else { "tls" };
        format!("{scheme} {}", self.named().address)
    }

    /// How the daemon packs streams.
    pub fn compression(&self) -> &str {
        self.configuration.compression()
    }

    /// The URIs for a guest.
    pub fn uris(&self, guest: Uuid) -> Result<Uris, Failure> {
        let random = Uuid::new_v4().simple().to_string();
        let name = format!("{}-{}", &guest.simple().to_string()[..8], &random[..8]);
        let path = |file: &str| {
            let path = self.directory.join(file).display().to_string();
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.".contains(&byte);
            if path.len() > MAX_SOCKET_PATH_BYTES || !path.bytes().all(plain) {
                let text = format!(
                    "the path {path} can't be that of a socket in libvirt's URIs: use at most \
                     {MAX_SOCKET_PATH_BYTES} letters, digits, `/`, `-`, `_` and `.`; choose \
                     another `directory` in the daemon's configuration"
                );
                return Err(Failure::new(Code::Usage, text));
            }
            Ok(path)
        };
        Ok(Uris {
            libvirt: format!("qemu+unix:///system?socket={}", path(LIBVIRT_SOCKET)?),
            memory: format!("unix://{}", path(&format!("{name}.mig"))?),
            disks: format!("unix://{}", path(&format!("{name}.disks"))?),
        })
    }
}

/// The directory of a peer, in which the daemon has made its socket for libvirt.
fn directory_of(base: &Path, peer: &str) -> Result<PathBuf, Failure> {
    let directory = base.join(peer);
    if has_socket(&directory) {
        return Ok(directory);
    }
    let socket = directory.join(LIBVIRT_SOCKET);
    let known = peers_in(base);
    let text = if known.is_empty() {
        format!(
            "there is no socket {}, and none of any other peer: `vmferry daemon` does not run \
             on this host, or its configuration has no peers",
            socket.display()
        )
    } else {
        format!(
            "`vmferry daemon` has no peer {peer} ({} does not exist); it knows {}",
            socket.display(),
            known.join(", ")
        )
    };
    Err(Failure::new(Code::Connect, text))
}

fn has_socket(directory: &Path) -> bool {
    let file = std::fs::symlink_metadata(directory.join(LIBVIRT_SOCKET));
    file.is_ok_and(|file| file.file_type().is_socket())
}

/// The names of peers whose sockets exist.
fn peers_in(base: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(base) else { return Vec::new() };
    let found = entries.flatten().filter(|entry| has_socket(&entry.path()));
    let mut names: Vec<String> =
        found.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const GUEST: Uuid = Uuid::from_u128(0x6c34_30f0_7f73_4552_ad67_c861_46be_37ca);

    fn peer_in(directory: PathBuf) -> PeerDirectory {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "listen = \"127.0.0.1:0\"").unwrap();
        let configuration = Configuration::read(file.path()).unwrap();
        PeerDirectory { directory, name: "host-b".into(), configuration }
    }

    #[test]
    fn uris_are_in_the_directory_of_the_peer_and_differ() {
        let base = tempfile::tempdir().unwrap();
        let directory = base.path().join("host-b");
        std::fs::create_dir(&directory).unwrap();
        let _socket = UnixListener::bind(directory.join("libvirt")).unwrap();
        let found = peer_in(directory.clone());
        assert_eq!(directory_of(base.path(), "host-b").unwrap(), directory);
        let uris = found.uris(GUEST).unwrap();
        let sockets = directory.display();
        assert_eq!(uris.libvirt, format!("qemu+unix:///system?socket={sockets}/libvirt"));
        assert!(uris.memory.starts_with(&format!("unix://{sockets}/6c3430f0-")), "{uris:?}");
        let file = uris.disks.rsplit('/').next().unwrap();
        assert!(is_plain_name(file) && file.ends_with(".disks"), "{uris:?}");
        assert_ne!(uris, found.uris(GUEST).unwrap());
    }

    #[test]
    fn missing_peer_is_reported_with_those_that_are_known() {
        let base = tempfile::tempdir().unwrap();
        let failure = directory_of(base.path(), "host-b").unwrap_err();
        assert_eq!(failure.code, Code::Connect);
        assert!(failure.to_string().contains("does not run on this host"), "{failure}");
        std::fs::create_dir(base.path().join("host-c")).unwrap();
        let _socket = UnixListener::bind(base.path().join("host-c/libvirt")).unwrap();
        let failure = directory_of(base.path(), "host-b").unwrap_err();
        assert!(failure.to_string().ends_with("it knows host-c"), "{failure}");
    }

    #[test]
    fn paths_that_do_not_fit_a_socket_or_a_uri_are_refused() {
        for directory in [format!("/{}", "x".repeat(100)), "/run/a b".into(), "/run/a?b".into()] {
            let failure = peer_in(directory.into()).uris(GUEST).unwrap_err();
            assert_eq!(failure.code, Code::Usage);
        }
    }

    #[test]
    fn address_is_not_a_peer() {
        let failure = PeerDirectory::find(Path::new("/none"), "host-b:7001").unwrap_err();
        assert_eq!(failure.code, Code::Usage);
        assert!(failure.to_string().contains("not an address"), "{failure}");
        let failure = PeerDirectory::find(Path::new("/none"), "host-b").unwrap_err();
        assert!(failure.to_string().contains("vmferry daemon"), "{failure}");
    }
}
