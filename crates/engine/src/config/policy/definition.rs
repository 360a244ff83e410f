//! What the definition of a guest of libvirt may name on this host.

use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::pattern::{NamePattern, PathPattern};

/// Where libvirt keeps images, firmware variables, states of TPMs, kernels and logs of guests, and
/// the sockets of their channels.
const DIRECTORIES: [&str; 8] = [
    "/var/lib/libvirt/images",
    "/var/lib/libvirt/boot",
    "/var/lib/libvirt/qemu/nvram",
    "/var/lib/libvirt/qemu/channel",
    "/var/lib/libvirt/swtpm",
    "/var/log/libvirt/qemu",
    "/run/libvirt/qemu/channel",
    "/run/libvirt/qemu/swtpm",
];

/// libvirt's usual network, behind address translation.
const NETWORK: &str = "default";

/// Replaced by the guest's name in a directory.
const GUEST_NAME: &str = "{name}";

/// The table `[allow.definition]` of a rule: what the definition of a guest of libvirt may name on
/// this host. Its lists are added to what every rule permits: libvirt's directories, its pools of
/// files and of volumes, its emulators, and its network `default`. With `only_listed`, only the
/// emulators are.
///
/// ```toml
/// [[allow]]
/// source = "spiffe://vmferry/host/host-a"
/// guests = ["web-*"]
/// [allow.definition]
/// only_listed = true
/// directories = ["/srv/guests/{name}"]
/// devices = ["/dev/vg0/web-*"]
/// network_disks = ["rbd://mon1:6789/vms/*"]
/// bridges = ["br0"]
/// max_memory_mib = 65536
/// max_vcpus = 16
/// permit = ["/domain/devices/filesystem"]
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DefinitionRules {
    only_listed: bool,
    directories: Vec<DirectoryText>,
    pools: Vec<NamePattern>,
    devices: Vec<DevicePattern>,
    network_disks: Vec<PathPattern>,
    networks: Vec<NamePattern>,
    bridges: Vec<NamePattern>,
    listen: Vec<std::net::IpAddr>,
    emulators: Vec<DirectoryText>,
    max_memory_mib: Option<u64>,
    max_vcpus: Option<u32>,
    permit: Vec<PermittedPath>,
}

/// A path of the policy: absolute, without `.` and `..`. It may contain [`GUEST_NAME`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct DirectoryText(String);

impl TryFrom<String> for DirectoryText {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if is_plain_path(Path::new(&text)) && text != "/" {
            return Ok(Self(text));
        }
        Err(format!("`{text}` is no absolute path below `/`"))
    }
}

/// A pattern for block devices.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct DevicePattern(PathPattern);

impl TryFrom<String> for DevicePattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        // Only root makes links in /dev, so these need not be followed.
        if is_plain_path(Path::new(&text)) && text.starts_with("/dev/") {
            return Ok(Self(PathPattern(text)));
        }
        Err(format!("`{text}` is no device below `/dev`"))
    }
}

/// The path of an element or attribute in the definition.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct PermittedPath(String);

impl TryFrom<String> for PermittedPath {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.starts_with("/domain/") && !text.ends_with('/') {
            return Ok(Self(text));
        }
        Err(format!("`{text}` is no path below `/domain`, such as `/domain/devices/hostdev`"))
    }
}

/// Whether a path is absolute and has no `.`, no `..` and no empty part.
#[must_use]
pub fn is_plain_path(path: &Path) -> bool {
    let text = path.as_os_str().as_encoded_bytes();
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    // `components` would skip empty parts and `.`.
    path.is_absolute()
        && path.components().all(plain)
        && !text.windows(2).any(|pair| pair == b"//")
        && !text.windows(3).any(|three| three == b"/./")
        && !text.ends_with(b"/.")
        && (text.len() == 1 || !text.ends_with(b"/"))
}

impl DefinitionRules {
    /// The directories that may contain a guest's files: images, firmware, kernels, logs, sockets
    /// of channels, and states of TPMs.
    #[must_use]
    pub fn directories(&self, guest: &str) -> Vec<PathBuf> {
        let usual = DIRECTORIES.iter().filter(|_| !self.only_listed).map(PathBuf::from);
        let listed = self.directories.iter().map(|one| one.0.replace(GUEST_NAME, guest).into());
        usual.chain(listed).collect()
    }

    /// Whether the storage pools in directories and in volume groups may be used.
    #[must_use]
    pub fn permits_usual_pools(&self) -> bool {
        !self.only_listed
    }

    /// Whether the rule's list names a storage pool.
    #[must_use]
    pub fn permits_pool(&self, name: &str) -> bool {
        self.pools.iter().any(|pattern| pattern.matches(name))
    }

    /// Whether a block device may be a disk.
    #[must_use]
    pub fn permits_device(&self, path: &str) -> bool {
        is_plain_path(Path::new(path))
            && self.devices.iter().any(|DevicePattern(pattern)| pattern.matches(path))
    }

    /// Whether a disk of a network may be used: `PROTOCOL://HOST:PORT/NAME` with one of its hosts,
    /// or `PROTOCOL:///NAME` without hosts.
    #[must_use]
    pub fn permits_network_disk(&self, url: &str) -> bool {
        self.network_disks.iter().any(|pattern| pattern.matches(url))
    }

    /// Whether a guest may have an interface in a network of libvirt.
    #[must_use]
    pub fn permits_network(&self, name: &str) -> bool {
        (!self.only_listed && name == NETWORK)
            || self.networks.iter().any(|pattern| pattern.matches(name))
    }

    /// Whether a guest may have an interface in a bridge.
    #[must_use]
    pub fn permits_bridge(&self, name: &str) -> bool {
        self.bridges.iter().any(|pattern| pattern.matches(name))
    }

    /// Whether a guest's display may listen on an address. On a loopback address it always may.
    #[must_use]
    pub fn permits_listen(&self, address: std::net::IpAddr) -> bool {
        address.is_loopback() || self.listen.contains(&address)
    }

    /// Whether the rule names an emulator, in addition to those that libvirt knows.
    #[must_use]
    pub fn permits_emulator(&self, path: &str) -> bool {
        self.emulators.iter().any(|one| one.0 == path)
    }

    /// The most memory of a guest, in MiB.
    #[must_use]
    pub fn max_memory_mib(&self) -> Option<u64> {
        self.max_memory_mib
    }

    /// The most vCPUs of a guest.
    #[must_use]
    pub fn max_vcpus(&self) -> Option<u32> {
        self.max_vcpus
    }

    /// Whether any element or attribute is permitted by its path.
    #[must_use]
    pub fn permits_some_path(&self) -> bool {
        !self.permit.is_empty()
    }

    /// Whether an element with all that it contains, or an attribute, is permitted without being
    /// judged.
    #[must_use]
    pub fn permits_path(&self, path: &str) -> bool {
        self.permit.iter().any(|permitted| permitted.0 == path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> DefinitionRules {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn nothing_of_the_host_is_permitted_by_default() {
        let rules = rules("");
        assert_eq!(rules, DefinitionRules::default());
        assert!(rules.directories("web").contains(&"/var/lib/libvirt/images".into()));
        assert!(rules.permits_usual_pools() && !rules.permits_pool("default"));
        assert!(!rules.permits_device("/dev/sda"));
        assert!(!rules.permits_network_disk("rbd://mon1:6789/vms/web"));
        assert!(rules.permits_network("default") && !rules.permits_network("management"));
        assert!(!rules.permits_bridge("br0"));
        assert!(rules.permits_listen("127.0.0.1".parse().unwrap()));
        assert!(!rules.permits_listen("0.0.0.0".parse().unwrap()));
        assert!(!rules.permits_emulator("/usr/bin/qemu-system-x86_64"));
        assert_eq!((rules.max_memory_mib(), rules.max_vcpus()), (None, None));
        assert!(!rules.permits_path("/domain/devices/hostdev"));
    }

    #[test]
    fn lists_permit_what_they_name() {
        let rules = rules(
            r#"
            only_listed = true
            directories = ["/srv/guests/{name}", "/srv/firmware"]
            pools = ["fast-*"]
            devices = ["/dev/vg0/web-*"]
            network_disks = ["rbd://mon1:6789/vms/*", "iscsi:///iqn.2026-11.example:web/*"]
            bridges = ["br*"]
            listen = ["192.0.2.1"]
            emulators = ["/opt/qemu/bin/qemu-system-x86_64"]
            max_memory_mib = 1024
            max_vcpus = 4
            permit = ["/domain/devices/hostdev"]
            "#,
        );
        let directories = ["/srv/guests/web", "/srv/firmware"].map(PathBuf::from);
        assert_eq!(rules.directories("web"), directories);
        let more = self::rules("directories = [\"/srv/x\"]").directories("web");
        assert_eq!(more.len(), DIRECTORIES.len() + 1);
        assert!(!rules.permits_usual_pools());
        assert!(rules.permits_pool("fast-1") && !rules.permits_pool("default"));
        assert!(rules.permits_device("/dev/vg0/web-1"));
        for other in ["/dev/vg0/db", "/dev/vg0/web-1/x", "/dev/vg0/web-/../db", "vg0/web-1"] {
            assert!(!rules.permits_device(other), "{other}");
        }
        assert!(rules.permits_network_disk("rbd://mon1:6789/vms/web"));
        assert!(!rules.permits_network_disk("rbd://mon1:6789/secrets/web"));
        assert!(!rules.permits_network_disk("rbd://mon1:6789/vms/web/x"));
        assert!(rules.permits_network_disk("iscsi:///iqn.2026-11.example:web/1"));
        assert!(!rules.permits_network("default"));
        assert!(rules.permits_bridge("br0") && !rules.permits_bridge("virbr0"));
        assert!(rules.permits_listen("192.0.2.1".parse().unwrap()));
        assert!(rules.permits_emulator("/opt/qemu/bin/qemu-system-x86_64"));
        assert_eq!((rules.max_memory_mib(), rules.max_vcpus()), (Some(1024), Some(4)));
        assert!(rules.permits_path("/domain/devices/hostdev"));
        assert!(!rules.permits_path("/domain/devices/hostdev/source"));
    }

    #[test]
    fn mistakes_are_refused() {
        for (text, problem) in [
            ("directories = ['images']", "no absolute path"),
            ("directories = ['/']", "no absolute path"),
            ("directories = ['/srv/../etc']", "no absolute path"),
            ("directories = ['/srv/./a']", "no absolute path"),
            ("directories = ['/srv//a']", "no absolute path"),
            ("directories = ['/srv/']", "no absolute path"),
            ("devices = ['/srv/a']", "no device below"),
            ("devices = ['/dev/../etc/shadow']", "no device below"),
            ("permit = ['hostdev']", "no path below `/domain`"),
            ("permit = ['/domain/']", "no path below `/domain`"),
            ("bridge = ['br0']", "unknown field `bridge`"),
            ("listen = ['localhost']", "IP address"),
        ] {
            let error = toml::from_str::<DefinitionRules>(text).unwrap_err();
            assert!(error.message().contains(problem), "{text}: {error}");
        }
    }
}
