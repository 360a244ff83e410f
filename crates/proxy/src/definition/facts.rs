//! What is known about this host when a definition is judged.

use std::collections::HashMap;
use std::fmt::Debug;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::qcow2::ImageNames;

/// Below these, a pool's directory may be used if no rule names the pool.
const OWN: [&str; 5] = ["/var/lib", "/srv", "/mnt", "/media", "/data"];

/// But not below these: they have what is not for guests.
const IN_OWN: [&str; 4] =
    ["/var/lib/libvirt/dnsmasq", "/var/lib/libvirt/qemu", "/var/lib/vmferry", "/var/lib/private"];

/// The most paths that are looked up for one guest.
const MOST_PATHS: usize = 1024;

/// What a definition can name on this host. A restricted daemon leaves the answers to another
/// process.
pub trait DefinitionFacts: Debug + Send + Sync {
    /// The emulators and the storage pools of this host's libvirt.
    ///
    /// # Errors
    /// Why libvirt does not say.
    fn libvirt(&self) -> Result<LibvirtResources, String>;

    /// Where a path leads ([`resolve`]).
    ///
    /// # Errors
    /// Why that can't be said.
    fn resolve(&self, path: &Path) -> Result<Resolved, String>;

    /// The files that an image names ([`image_names`](super::image_names)).
    ///
    /// # Errors
    /// Why that can't be said.
    fn image_names(&self, path: &Path) -> Result<ImageNames, String>;
}

/// What was learned for the Prepare of a guest, and is used for its Finish too: with post-copy a
/// Finish can't be refused without harm, so it must not depend on a busy host. Each question is
/// asked once.
#[derive(Debug)]
pub(crate) struct Remembered {
    facts: Arc<dyn DefinitionFacts>,
    libvirt: Mutex<Option<LibvirtResources>>,
    resolved: Mutex<HashMap<PathBuf, Resolved>>,
}

impl Remembered {
    pub fn new(facts: Arc<dyn DefinitionFacts>) -> Self {
        Self { facts, libvirt: Mutex::default(), resolved: Mutex::default() }
    }
}

impl DefinitionFacts for Remembered {
    fn libvirt(&self) -> Result<LibvirtResources, String> {
        let mut known = self.libvirt.lock();
        match &*known {
            Some(known) => Ok(known.clone()),
            None => Ok(known.insert(self.facts.libvirt()?).clone()),
        }
    }

    fn image_names(&self, path: &Path) -> Result<ImageNames, String> {
        self.facts.image_names(path)
    }

    fn resolve(&self, path: &Path) -> Result<Resolved, String> {
        let mut known = self.resolved.lock();
        if let Some(known) = known.get(path) {
            return Ok(known.clone());
        }
        if known.len() == MOST_PATHS {
            return Err(format!("the definition has more than {MOST_PATHS} paths"));
        }
        let resolved = self.facts.resolve(path)?;
        known.insert(path.to_owned(), resolved.clone());
        Ok(resolved)
    }
}

/// What this host's libvirt offers to guests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LibvirtResources {
    /// The paths of the emulators in its capabilities.
    pub emulators: Vec<PathBuf>,
    /// Its storage pools.
    pub pools: Vec<Pool>,
}

/// A storage pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its type, such as `dir`.
    pub kind: String,
    /// Where its volumes are in the file system.
    pub target: Option<PathBuf>,
}

impl Pool {
    /// Whether its volumes are files in a directory of its own.
    pub(super) fn is_directory(&self) -> bool {
        matches!(self.kind.as_str(), "dir" | "fs" | "netfs")
    }

    /// Whether guests may use its volumes although no rule names it: it has files in a directory
    /// that is for images. `virt-manager` makes pools of the directories from which somebody has
    /// opened a file, such as a home, and a volume group may have the host's own disks.
    pub(super) fn is_usual(&self) -> bool {
        let is_for_images = |target: &PathBuf| {
            let is_own = |of: &str| target.starts_with(of) && target != Path::new(of);
            OWN.iter().any(|of| is_own(of)) && !IN_OWN.iter().any(|of| target.starts_with(of))
        };
        self.is_directory() && self.target.as_ref().is_some_and(is_for_images)
    }
}

/// Where a path leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resolved {
    /// The path without symbolic links.
    pub path: PathBuf,
    /// What is there.
    pub kind: FileKind,
}

/// What is at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileKind {
    /// Nothing.
    Nothing,
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A block device.
    BlockDevice,
    /// A socket.
    Socket,
    /// Anything else: a character device, a pipe, or a symbolic link to nothing.
    Other,
}

/// Follows the symbolic links of a path. If nothing is at the path, those of the part that exists
/// are followed.
///
/// # Errors
/// The system's, such as a directory that may not be searched, or links in a circle.
pub fn resolve(path: &Path) -> io::Result<Resolved> {
    let mut missing = Vec::new();
    let mut exists = path;
    loop {
        match fs::canonicalize(exists) {
            Ok(found) if missing.is_empty() => {
                let kind = kind_of(fs::metadata(&found)?.file_type());
                return Ok(Resolved { path: found, kind });
            }
            Ok(mut found) => {
                found.extend(missing.iter().rev());
                return Ok(Resolved { path: found, kind: FileKind::Nothing });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if fs::symlink_metadata(exists).is_ok() {
                    return Ok(Resolved { path: path.to_owned(), kind: FileKind::Other });
                }
                let (Some(parent), Some(name)) = (exists.parent(), exists.file_name()) else {
                    return Err(error);
                };
                missing.push(name.to_owned());
                exists = parent;
            }
            Err(error) => return Err(error),
        }
    }
}

fn kind_of(file: fs::FileType) -> FileKind {
    if file.is_file() {
        FileKind::File
    } else if file.is_dir() {
        FileKind::Directory
    } else if file.is_block_device() {
        FileKind::BlockDevice
    } else if file.is_socket() {
        FileKind::Socket
    } else {
        FileKind::Other
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn resolve_follows_links_also_of_what_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/file"), "").unwrap();
        symlink("a", root.join("link")).unwrap();
        symlink("nothing", root.join("dangling")).unwrap();
        symlink("circle", root.join("circle")).unwrap();
        let _socket = UnixListener::bind(root.join("socket")).unwrap();
        for (path, resolved, kind) in [
            ("a/b/file", "a/b/file", FileKind::File),
            ("link/b/file", "a/b/file", FileKind::File),
            ("link/b", "a/b", FileKind::Directory),
            ("link/new/disk", "a/new/disk", FileKind::Nothing),
            ("dangling", "dangling", FileKind::Other),
            ("dangling/x", "dangling/x", FileKind::Other),
            ("socket", "socket", FileKind::Socket),
        ] {
            let expected = Resolved { path: root.join(resolved), kind };
            assert_eq!(resolve(&root.join(path)).unwrap(), expected);
        }
        assert!(resolve(&root.join("circle")).is_err());
        assert!(resolve(&root.join("a/b/file/x")).is_err());
        assert_eq!(resolve(Path::new("/dev/null")).unwrap().kind, FileKind::Other);
    }
}
