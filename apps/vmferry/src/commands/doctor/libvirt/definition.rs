//! A guest's definition: its processor, its disks, and the devices that can't move.

use roxmltree::{Document, Node};

use super::disks::{Disk, Source};
use crate::commands::doctor::Level;

/// What a definition says.
#[derive(Debug, Default)]
pub struct Definition {
    /// What runs the guest's code.
    pub accelerator: Accelerator,
    /// `mode` of `<cpu>`, such as `host-passthrough`.
    pub cpu_mode: Option<String>,
    /// The name of its CPU model.
    pub cpu_model: Option<String>,
    /// Whether its memory is on huge pages.
    pub has_huge_pages: bool,
    /// Its disks and other drives.
    pub disks: Vec<Disk>,
    /// The devices that do not move, or only under conditions.
    pub obstacles: Vec<Obstacle>,
}

/// What runs the guest's code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accelerator {
    /// KVM.
    Kvm,
    /// QEMU emulates the processor.
    #[default]
    Emulation,
}

/// A device that does not move, or only under conditions.
#[derive(Debug)]
pub struct Obstacle {
    /// Whether it prevents the migration.
    pub level: Level,
    /// The device, and what libvirt or QEMU does about it.
    pub why: String,
    /// What helps.
    pub remedy: &'static str,
}

const DETACH: &str = "detach it before the migration (`virsh detach-device`), and attach one there";

impl Definition {
    /// Reads what `virsh dumpxml` prints.
    ///
    /// # Errors
    /// The text is not XML.
    pub fn read(text: &str) -> Result<Self, roxmltree::Error> {
        let document = Document::parse(text)?;
        let domain = document.root_element();
        let child = |name: &str| child(domain, name);
        let cpu = child("cpu");
        let model = cpu.and_then(|cpu| self::child(cpu, "model"));
        let backing = child("memoryBacking");
        let devices = child("devices");
        let mut definition = Self {
            accelerator: match domain.attribute("type") {
                Some("kvm") => Accelerator::Kvm,
                _ => Accelerator::Emulation,
            },
            cpu_mode: cpu.and_then(|cpu| cpu.attribute("mode")).map(str::to_owned),
            cpu_model: model.and_then(|model| model.text()).map(|name| name.trim().to_owned()),
            has_huge_pages: backing.is_some_and(|it| self::child(it, "hugepages").is_some()),
            ..Self::default()
        };
        if child("launchSecurity").is_some() {
            definition.add(
                Level::Error,
                "the processor encrypts its memory (<launchSecurity>), which QEMU can't move",
                "shut it down, and start it there",
            );
        }
        for device in devices.into_iter().flat_map(|devices| devices.children()) {
            definition.read_device(device);
        }
        Ok(definition)
    }

    /// The model of the processor that it sees, unless that is the host's own.
    pub fn cpu_model(&self) -> Option<String> {
        if self.accelerator == Accelerator::Emulation {
            return Some("that QEMU emulates".into());
        }
        match self.cpu_mode.as_deref() {
            Some("host-passthrough" | "maximum") => None,
            _ => self.cpu_model.clone(),
        }
    }

    fn add(&mut self, level: Level, why: impl Into<String>, remedy: &'static str) {
        self.obstacles.push(Obstacle { level, why: why.into(), remedy });
    }

    fn read_device(&mut self, device: Node) {
        let kind = device.attribute("type").unwrap_or_default();
        match device.tag_name().name() {
            "disk" => self.disks.extend(read_disk(device)),
            "hostdev" => self.read_host_device(kind),
            "interface" if kind == "hostdev" => self.read_host_device("pci"),
            "filesystem" => {
                let driver = child(device, "driver").and_then(|driver| driver.attribute("type"));
                match driver {
                    Some("virtiofs") => self.add(
                        Level::Warning,
                        "it has a virtiofs file system, which only new releases of libvirt move",
                        "share the directory on both hosts, or detach it before the migration",
                    ),
                    _ => self.add(
                        Level::Error,
                        "it has a directory of this host (9p file system), which QEMU can't move",
                        "shut it down to remove the device, or use NFS in the guest",
                    ),
                }
            }
            "shmem" => self.add(
                Level::Error,
                "it shares memory with other processes of this host (<shmem>)",
                DETACH,
            ),
            "tpm" => {
                let backend = child(device, "backend").and_then(|it| it.attribute("type"));
                if backend == Some("passthrough") {
                    let why = "it uses the TPM of this host, whose content does not move";
                    self.add(Level::Error, why, "use an emulated TPM (swtpm)");
                }
            }
            _ => {}
        }
    }

    fn read_host_device(&mut self, kind: &str) {
        match kind {
            "pci" | "mdev" => self.add(
                Level::Warning,
                format!(
                    "it has a {kind} device of this host, which moves only if its driver supports \
                     VFIO migration"
                ),
                DETACH,
            ),
            _ => self.add(
                Level::Error,
                format!("it has a {kind} device of this host, which libvirt does not move"),
                DETACH,
            ),
        }
    }
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn read_disk(disk: Node) -> Option<Disk> {
    let target = child(disk, "target")?.attribute("dev")?.to_owned();
    let source = child(disk, "source");
    let of = |name: &str| source.and_then(|source| source.attribute(name)).map(str::to_owned);
    let source = match disk.attribute("type") {
        Some("file") => of("file").map(|path| Source::File(path.into())),
        Some("block") => of("dev").map(|path| Source::Device(path.into())),
        Some("dir") => of("dir").map(|path| Source::File(path.into())),
        Some("network") => Some(Source::Network(of("protocol").unwrap_or_default())),
        _ => Some(Source::Other),
    };
    let driver = child(disk, "driver");
    Some(Disk {
        target,
        is_removable: matches!(disk.attribute("device"), Some("cdrom" | "floppy")),
        source,
        cache: driver.and_then(|driver| driver.attribute("cache")).map(str::to_owned),
        is_readonly: child(disk, "readonly").is_some(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(kind: &str, cpu: &str, devices: &str) -> Definition {
        let xml = format!(
            "<domain type='{kind}'><name>web</name>{cpu}<devices>{devices}</devices></domain>"
        );
        Definition::read(&xml).unwrap()
    }

    #[test]
    fn processor_of_the_host_has_no_model_of_its_own() {
        let passed = read("kvm", "<cpu mode='host-passthrough' check='none'/>", "");
        assert_eq!(passed.cpu_model(), None);
        let custom = "<cpu mode='custom' match='exact'><model fallback='forbid'>EPYC</model></cpu>";
        assert_eq!(read("kvm", custom, "").cpu_model().as_deref(), Some("EPYC"));
        assert!(read("qemu", "<cpu mode='maximum'/>", "").cpu_model().is_some());
    }

    #[test]
    fn devices_of_the_host_are_obstacles() {
        let level = |device: &str| {
            let definition = read("kvm", "", device);
            definition.obstacles.iter().map(|obstacle| obstacle.level).max()
        };
        for (device, expected) in [
            ("<hostdev mode='subsystem' type='usb'/>", Some(Level::Error)),
            ("<hostdev mode='subsystem' type='pci'/>", Some(Level::Warning)),
            ("<interface type='hostdev'/>", Some(Level::Warning)),
            ("<interface type='network'/><console type='pty'/>", None),
            (
                "<filesystem type='mount'><driver type='virtiofs'/></filesystem>",
                Some(Level::Warning),
            ),
            ("<filesystem type='mount'/>", Some(Level::Error)),
            ("<tpm><backend type='passthrough'/></tpm>", Some(Level::Error)),
            ("<tpm><backend type='emulator'/></tpm>", None),
            ("<shmem name='x'/>", Some(Level::Error)),
        ] {
            assert_eq!(level(device), expected, "{device}");
        }
    }

    #[test]
    fn disks_are_read_with_their_sources() {
        let definition = read(
            "kvm",
            "<memoryBacking><hugepages/></memoryBacking>",
            "<disk type='file' device='disk'><driver name='qemu' type='qcow2' cache='none'/>\
             <source file='/var/a.qcow2'/><target dev='vda' bus='virtio'/></disk>\
             <disk type='network' device='disk'><source protocol='rbd' name='p/i'/>\
             <target dev='vdb'/></disk>\
             <disk type='file' device='cdrom'><target dev='sda'/><readonly/></disk>",
        );
        assert!(definition.has_huge_pages);
        let [a, b, c] = &definition.disks[..] else { panic!("{definition:?}") };
        assert_eq!((a.target.as_str(), a.cache.as_deref()), ("vda", Some("none")));
        assert_eq!(a.source, Some(Source::File("/var/a.qcow2".into())));
        assert_eq!(b.source, Some(Source::Network("rbd".into())));
        assert!(c.source.is_none() && c.is_removable && c.is_readonly);
    }
}
