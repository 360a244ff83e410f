//! Checks of a guest's disks: whether the other host sees them, and whether their cache mode is
//! safe.

use std::path::{Path, PathBuf};

use crate::commands::doctor::{Findings, Level};

/// A disk or another drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its name in the guest, such as `vda`.
    pub target: String,
    /// Whether it is a CD or floppy drive.
    pub is_removable: bool,
    /// Where its content is; `None` for an empty drive.
    pub source: Option<Source>,
    /// The cache mode, if the definition has one.
    pub cache: Option<String>,
    /// Whether the guest can't write to it.
    pub is_readonly: bool,
}

/// Where a disk's content is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file or a directory.
    File(PathBuf),
    /// A block device.
    Device(PathBuf),
    /// Storage that QEMU reaches over a network, by this protocol.
    Network(String),
    /// A volume of a pool, or of a kind that is not known.
    Other,
}

/// File systems that several hosts can see, by their magic numbers in `statfs(2)`. libvirt's list
/// is in `virFileIsSharedFSType`.
const SHARED: [(u64, &str); 11] = [
    (0x6969, "NFS"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x517b, "SMB"),
    (0x7461_636f, "OCFS2"),
    (0x0116_1970, "GFS2"),
    (0x00c3_6400, "CephFS"),
    (0x4750_4653, "GPFS"),
    (0x0bd0_0bd0, "Lustre"),
    (0x5346_414f, "AFS"),
    (0x6573_5546, "FUSE"),
];

/// Cache modes that keep nothing of the disk in this host's memory.
const SAFE_CACHES: [&str; 2] = ["none", "directsync"];

/// Checks all disks.
pub fn look(disks: &[Disk], findings: &mut Findings) {
    for disk in disks {
        if let Some(source) = &disk.source {
            look_at(disk, source, shared_file_system, findings);
        }
    }
}

/// The name of the shared file system that has this path, or `None` if only this host sees it.
fn shared_file_system(path: &Path) -> std::io::Result<Option<&'static str>> {
    let magic = rustix::fs::statfs(path)?.f_type as u64 & 0xffff_ffff;
    Ok(SHARED.iter().find(|(known, _)| *known == magic).map(|(_, name)| *name))
}

fn look_at(
    disk: &Disk,
    source: &Source,
    shared: impl FnOnce(&Path) -> std::io::Result<Option<&'static str>>,
    findings: &mut Findings,
) {
    let object = format!("disk {}", disk.target);
    match source {
        Source::File(path) => match shared(path) {
            Ok(Some(name)) => {
                let path = path.display();
                findings.ok("disks", &object, format!("{path} is on {name}, a shared file system"));
                look_at_cache(disk, &object, findings);
            }
            Ok(None) if disk.is_removable => findings.bad(
                "disks",
                Level::Warning,
                &object,
                format!("{} is a file of this host only, in a drive", path.display()),
                format!(
                    "copy the file to the same path there, or eject it (`virsh change-media GUEST \
                     {} --eject`)",
                    disk.target
                ),
            ),
            Ok(None) => findings.bad(
                "disks",
                Level::Warning,
                &object,
                format!("{} is on a file system of this host only", path.display()),
                "send it with --copy-storage-all, which needs an image of the same size at the \
                 same path there, or keep it on storage that both hosts see",
            ),
            Err(error) => {
                let why = format!("{} can't be looked at: {error}", path.display());
                findings.bad("disks", Level::Warning, &object, why, "run this as root");
            }
        },
        Source::Device(path) => {
            let why = format!("{} is a block device, which both hosts must see", path.display());
            findings.note("disks", &object, why);
            look_at_cache(disk, &object, findings);
        }
        Source::Network(protocol) => {
            findings.ok("disks", &object, format!("QEMU reaches it over the network ({protocol})"));
            // QEMU keeps nothing of these in the host's page cache that RBD does not write back.
            if protocol != "rbd" {
                look_at_cache(disk, &object, findings);
            }
        }
        Source::Other => {
            findings.note("disks", &object, "its storage must be one that both hosts see");
        }
    }
}

fn look_at_cache(disk: &Disk, object: &str, findings: &mut Findings) {
    let cache = disk.cache.as_deref().unwrap_or("default");
    if disk.is_readonly || disk.is_removable || SAFE_CACHES.contains(&cache) {
        return;
    }
    findings.bad(
        "disk-cache",
        Level::Warning,
        object,
        format!(
            "its cache mode is {cache}: this host may keep parts of the disk in memory, and \
             libvirt may refuse the migration as unsafe"
        ),
        "use cache='none', or --unsafe if the storage keeps the caches of both hosts coherent",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(cache: Option<&str>) -> Disk {
        Disk {
            target: "vda".into(),
            is_removable: false,
            source: None,
            cache: cache.map(str::to_owned),
            is_readonly: false,
        }
    }

    fn found(disk: &Disk, source: &Source, shared: Option<&'static str>) -> Vec<(String, Level)> {
        let mut findings = Findings::default();
        look_at(disk, source, |_| Ok(shared), &mut findings);
        findings.0.into_iter().map(|one| (one.check.to_owned(), one.level)).collect()
    }

    #[test]
    fn local_files_must_be_copied_and_shared_ones_need_a_safe_cache() {
        let file = Source::File("/var/a".into());
        assert_eq!(found(&disk(None), &file, None), [("disks".into(), Level::Warning)]);
        let unsafe_cache = [("disks".into(), Level::Ok), ("disk-cache".into(), Level::Warning)];
        assert_eq!(found(&disk(None), &file, Some("NFS")), unsafe_cache);
        assert_eq!(found(&disk(Some("none")), &file, Some("NFS")), unsafe_cache[..1]);
        let readonly = Disk { is_readonly: true, ..disk(Some("writeback")) };
        assert_eq!(found(&readonly, &file, Some("NFS")), unsafe_cache[..1]);
    }

    #[test]
    fn storage_on_the_network_is_shared() {
        let rbd = Source::Network("rbd".into());
        assert_eq!(found(&disk(None), &rbd, None), [("disks".into(), Level::Ok)]);
        let device = Source::Device("/dev/mapper/x".into());
        assert_eq!(found(&disk(Some("none")), &device, None), [("disks".into(), Level::Note)]);
    }

    #[test]
    fn file_system_of_this_host_is_not_shared() {
        assert_eq!(shared_file_system(Path::new("/proc")).unwrap(), None);
        assert!(shared_file_system(Path::new("/nonexistent")).is_err());
    }
}
