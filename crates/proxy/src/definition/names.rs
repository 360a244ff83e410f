//! What a definition names on this host.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use roxmltree::Node;
use vmferry::config::policy::{DefinitionRules, is_plain_path};

use super::facts::{DefinitionFacts, FileKind, LibvirtResources, Pool, Remembered, Resolved};
use super::schema::Kind;

/// Where distributions keep images of firmware. They are only read.
const FIRMWARE: [&str; 8] = [
    "/usr/share/AAVMF",
    "/usr/share/OVMF",
    "/usr/share/edk2",
    "/usr/share/edk2-ovmf",
    "/usr/share/ovmf",
    "/usr/share/qemu",
    "/usr/share/qemu-efi-aarch64",
    "/usr/share/seabios",
];

/// What the names of interfaces that libvirt and its users make begin with.
const TAPS: [&str; 4] = ["vnet", "tap", "macvtap", "vif"];

/// The longest name of a network interface (`IFNAMSIZ`).
const MOST_TAP_BYTES: usize = 15;

/// Why a name is refused.
pub(super) struct Refused {
    /// For people.
    pub reason: String,
    /// The key of the rule that would permit it, with its value.
    pub permit: Option<(&'static str, String)>,
}

impl Refused {
    fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), permit: None }
    }

    fn but(reason: impl Into<String>, key: &'static str, value: impl Into<String>) -> Self {
        Self { reason: reason.into(), permit: Some((key, value.into())) }
    }
}

/// Decides on the names in one guest's definition.
pub(super) struct Names<'a> {
    guest: &'a str,
    rules: &'a DefinitionRules,
    facts: &'a Remembered,
}

impl<'a> Names<'a> {
    pub fn new(guest: &'a str, rules: &'a DefinitionRules, facts: &'a Remembered) -> Self {
        Self { guest, rules, facts }
    }

    /// Decides on the text or an attribute of an element.
    pub fn judge(&self, kind: Kind, node: Node<'_, '_>, value: &str) -> Result<(), Refused> {
        match kind {
            Kind::File => self.judge_path(value, &[FileKind::File, FileKind::Nothing]),
            // QEMU takes a comma in them for the end of a module's name (`multiboot.c`).
            Kind::BootFile if value.contains(',') => Err(Refused::new("it has a comma in it")),
            Kind::BootFile => self.judge_path(value, &[FileKind::File, FileKind::Nothing]),
            Kind::Directory => self.judge_path(value, &[FileKind::Directory, FileKind::Nothing]),
            // libvirt would remove a socket that is there, which may be another guest's.
            Kind::Socket => self.judge_path(value, &[FileKind::Nothing]),
            Kind::Image => self.judge_image(value),
            Kind::Firmware => self.judge_firmware(value),
            Kind::Emulator => self.judge_emulator(value),
            Kind::Pool => self.judge_pool(value),
            Kind::NetworkDisk => self.judge_network_disk(node, value),
            Kind::Network if self.rules.permits_network(value) => Ok(()),
            Kind::Network => {
                Err(Refused::but("the policy does not name this network", "networks", value))
            }
            Kind::Bridge if self.rules.permits_bridge(value) => Ok(()),
            Kind::Bridge => {
                Err(Refused::but("the policy does not name this bridge", "bridges", value))
            }
            Kind::Listen => self.judge_listen(value),
            Kind::Tap => {
                let is_tap = TAPS.iter().any(|prefix| value.starts_with(prefix));
                let is_plain = value.len() <= MOST_TAP_BYTES
                    && value.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
                if is_tap && is_plain {
                    return Ok(());
                }
                let reason = format!("the name of an interface begins with {}", TAPS.join(", "));
                Err(Refused::new(reason))
            }
            Kind::Label => {
                let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
                if value.bytes().all(is_plain) && !value.starts_with('.') {
                    return Ok(());
                }
                Err(Refused::new("it has other characters than letters, digits, `.`, `_` and `-`"))
            }
        }
    }

    fn libvirt(&self) -> Result<LibvirtResources, Refused> {
        self.facts.libvirt().map_err(|problem| {
            Refused::new(format!("libvirt of this host does not say what it has: {problem}"))
        })
    }

    fn resolve(&self, value: &str) -> Result<Resolved, Refused> {
        if !is_plain_path(Path::new(value)) || value.contains(char::is_control) {
            return Err(Refused::new("it is no absolute path, or has `.` or `..` in it"));
        }
        let resolved = self.facts.resolve(Path::new(value));
        resolved.map_err(|problem| Refused::new(format!("it can't be looked up: {problem}")))
    }

    /// A file or directory of the guest: below a directory of the rule.
    fn judge_path(&self, value: &str, kinds: &[FileKind]) -> Result<(), Refused> {
        let resolved = self.resolve(value)?;
        if self.is_below(&resolved.path, self.rules.directories(self.guest)) {
            return must_be(&resolved, kinds);
        }
        Err(self.outside(value, &resolved))
    }

    /// Says nothing of what is there: the sender may know only what the policy permits.
    fn outside(&self, value: &str, resolved: &Resolved) -> Refused {
        let reason = if resolved.path == Path::new(value) {
            "the policy names no directory that contains it"
        } else {
            "it has a link in it, and what that leads to is in no directory that the policy names"
        };
        let parent = Path::new(value).parent().filter(|parent| parent.parent().is_some());
        match parent.and_then(Path::to_str) {
            Some(parent) if resolved.path == Path::new(value) => {
                Refused::but(reason, "directories", parent)
            }
            _ => Refused::new(reason),
        }
    }

    /// Whether a path without links is a file in a storage pool that may be used. A pool's volumes
    /// are in its directory and not below, and hidden files are no volumes.
    fn is_in_pool(&self, path: &Path) -> bool {
        let Ok(libvirt) = self.libvirt() else { return false };
        let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes()[0] == b'.');
        let mut pools = libvirt.pools.iter().filter(|pool| pool.is_directory());
        !is_hidden
            && pools.any(|pool| {
                let target = pool.target.as_deref().and_then(|it| self.facts.resolve(it).ok());
                self.may_use(pool) && target.is_some_and(|it| path.parent() == Some(&it.path))
            })
    }

    /// Whether a pool may be used.
    fn may_use(&self, pool: &Pool) -> bool {
        self.rules.permits_pool(&pool.name) || self.rules.permits_usual_pools() && pool.is_usual()
    }

    /// Whether a path without links is below one of these directories, which may be links.
    fn is_below(&self, path: &Path, directories: Vec<PathBuf>) -> bool {
        directories.iter().any(|directory| {
            let resolved = self.facts.resolve(directory);
            resolved.is_ok_and(|it| {
                it.path.parent().is_some() && path.starts_with(&it.path) && path != it.path
            })
        })
    }

    /// An image: a file or a block device.
    pub fn judge_image(&self, value: &str) -> Result<(), Refused> {
        let resolved = self.resolve(value)?;
        if self.rules.permits_device(value) || self.is_in_volume_group(value) {
            return must_be(&resolved, &[FileKind::BlockDevice]);
        }
        if self.is_in_pool(&resolved.path) {
            return must_be(&resolved, &[FileKind::File, FileKind::Nothing]);
        }
        if value.starts_with("/dev/") {
            let reason = "the policy does not name this block device";
            return Err(Refused::but(reason, "devices", value));
        }
        self.judge_path(value, &[FileKind::File, FileKind::Nothing])
    }

    /// Whether a device is a volume of a pool of volumes (LVM) that may be used.
    fn is_in_volume_group(&self, value: &str) -> bool {
        let Ok(libvirt) = self.libvirt() else { return false };
        let mut groups = libvirt.pools.iter().filter(|pool| pool.kind == "logical");
        groups.any(|pool| {
            let target = pool.target.as_deref().filter(|target| is_volume_group(target));
            self.may_use(pool)
                && target.is_some_and(|target| Path::new(value).parent() == Some(target))
        })
    }

    fn judge_firmware(&self, value: &str) -> Result<(), Refused> {
        let resolved = self.resolve(value)?;
        if resolved.kind == FileKind::File
            && self.is_below(&resolved.path, FIRMWARE.map(PathBuf::from).to_vec())
        {
            return Ok(());
        }
        self.judge_path(value, &[FileKind::File])
    }

    fn judge_emulator(&self, value: &str) -> Result<(), Refused> {
        if self.rules.permits_emulator(value) {
            return Ok(());
        }
        let resolved = self.resolve(value)?;
        let known = self.libvirt()?.emulators;
        if known.iter().any(|path| path == Path::new(value)) {
            return Ok(());
        }
        let is_same =
            |path: &PathBuf| self.facts.resolve(path).is_ok_and(|it| it.path == resolved.path);
        if resolved.kind == FileKind::File && known.iter().any(is_same) {
            return Ok(());
        }
        let reason = "libvirt of this host names no such emulator in its capabilities";
        Err(Refused::but(reason, "emulators", value))
    }

    fn judge_pool(&self, value: &str) -> Result<(), Refused> {
        if self.rules.permits_pool(value) {
            return Ok(());
        }
        let pools = self.libvirt()?.pools;
        if pools.iter().any(|pool| pool.name == value && self.may_use(pool)) {
            return Ok(());
        }
        Err(Refused::but("the policy does not name this storage pool", "pools", value))
    }

    /// The path of a volume of a pool in a directory.
    pub fn volume(&self, pool: &str, volume: &str) -> Option<String> {
        let pools = self.libvirt().ok()?.pools;
        let pool = pools.into_iter().find(|known| known.name == pool)?;
        Some(pool.target?.join(volume).to_str()?.to_owned())
    }

    /// Decides on each server of a disk in the network.
    fn judge_network_disk(&self, source: Node<'_, '_>, protocol: &str) -> Result<(), Refused> {
        let name = source.attribute("name").unwrap_or_default();
        let is_plain = |text: &str| text.bytes().all(|byte| matches!(byte, b'!'..=b'~'));
        let is_word = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let is_host = |text: &str| {
            text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".:-_[]".contains(&byte))
        };
        if !is_word(protocol) || !is_plain(name) || name.split('/').any(|part| part == "..") {
            return Err(Refused::new("its protocol or name has unusual characters, or `..` in it"));
        }
        let hosts = source.children().filter(|child| child.has_tag_name("host"));
        let mut urls = Vec::new();
        for host in hosts {
            let (server, port) =
                (host.attribute("name").unwrap_or_default(), host.attribute("port"));
            if !is_host(server) || !port.is_none_or(is_word) {
                return Err(Refused::new("the name or port of its server is none"));
            }
            let port = port.map(|port| format!(":{port}")).unwrap_or_default();
            urls.push(format!("{protocol}://{server}{port}/{name}"));
        }
        if urls.is_empty() {
            urls.push(format!("{protocol}:///{name}"));
        }
        match urls.into_iter().find(|url| !self.rules.permits_network_disk(url)) {
            None => Ok(()),
            Some(url) => {
                let reason = format!("the policy does not name the disk {url}");
                Err(Refused::but(reason, "network_disks", url))
            }
        }
    }

    fn judge_listen(&self, value: &str) -> Result<(), Refused> {
        let Ok(address) = value.parse::<IpAddr>() else {
            return Err(Refused::new("a display may listen on an IP address only"));
        };
        if self.rules.permits_listen(address) {
            return Ok(());
        }
        let reason = "a display may listen on a loopback address only";
        Err(Refused::but(reason, "listen", value))
    }
}

/// Whether a pool's directory is one of a volume group, `/dev/NAME`, and not one of all devices.
fn is_volume_group(target: &Path) -> bool {
    target.parent() == Some(Path::new("/dev")) && target != Path::new("/dev/mapper")
}

fn must_be(resolved: &Resolved, kinds: &[FileKind]) -> Result<(), Refused> {
    if kinds.contains(&resolved.kind) {
        return Ok(());
    }
    let words = match resolved.kind {
        FileKind::Nothing => "nothing",
        FileKind::File => "a file",
        FileKind::Directory => "a directory",
        FileKind::BlockDevice => "a block device",
        FileKind::Socket => "a socket",
        FileKind::Other => "a device, a pipe or a dangling link",
    };
    Err(Refused::new(format!("there is {words}")))
}
