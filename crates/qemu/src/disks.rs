//! How a QEMU's disks write guest memory, and how to wait for pending requests.
//!
//! A read through the host's page cache is copied into guest memory by a CPU, through QEMU's own
//! page table, where the dirty log sees it. A read that bypasses the cache (`cache.direct=on`, SCSI
//! pass-through) goes into pages that the kernel pinned when the request was made. Each node of
//! QEMU's block graph has a flag of its own; the node at the top says nothing about the nodes
//! below. Some file systems bypass the cache without being asked to ([`Cache`]).
//!
//! # Why a harvest needs no pause
//!
//! Pinning a page for writing counts as a write in the dirty log: the page is in the next harvest.
//! So a request that is pending at a harvest has its pages either in this harvest or in an earlier
//! one. If all requests that were pending at a harvest have ended before its pages are copied, and
//! before the next harvest, every copy has the data of these requests. [`Harvest`] waits for that
//! while the guest runs: nothing is flushed, and no `STOP` and `RESUME` events are sent.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmferry::{HarvestGuard, VmError};

use crate::error::QemuError;
use crate::process::{self, OpenFile};
use crate::qmp::{Qmp, Version};

/// Drivers that open a file or a device of the host. The node's own flag decides.
const OF_THE_HOST: [&str; 3] = ["file", "host_cdrom", "host_device"];

/// Drivers whose data is copied into guest memory by a CPU, whatever its origin: formats, filters,
/// and network clients that read from sockets.
const COPYING: &[&str] = &[
    "blkdebug",
    "blklogwrites",
    "blkreplay",
    "blkverify",
    "bochs",
    "cloop",
    "commit_top",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "dmg",
    "ftp",
    "ftps",
    "gluster",
    "http",
    "https",
    "iscsi",
    "luks",
    "mirror_top",
    "nbd",
    "nfs",
    "null-aio",
    "null-co",
    "parallels",
    "preallocate",
    "qcow",
    "qcow2",
    "qed",
    "quorum",
    "raw",
    "rbd",
    "replication",
    "snapshot-access",
    "ssh",
    "throttle",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
    "vvfat",
    // From Proxmox: filters that pass requests on, and a client of its backup server.
    "alloc-track",
    "zeroinit",
    "pbs",
    // From older QEMUs.
    "backup-top",
];

/// Devices that pass the guest's commands to the kernel (`SG_IO`), which pins the pages of each.
const PASS_THROUGH: [&str; 2] = ["scsi-block", "scsi-generic"];

/// From this version on it is untested whether an empty `transaction` waits for pending requests.
/// Source: QEMU `blockdev.c`, `qmp_transaction`, which begins with `bdrv_drain_all`; tested with
/// 7.2 and 10.0.
const UNKNOWN_DRAIN: Version = Version { major: 11, minor: 0, micro: 0 };

/// How QEMU's disks reach guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disks {
    /// Whether some disk's requests go into pinned pages.
    pub pin_pages: bool,
}

/// Whether a file that is not opened for direct I/O is read through the host's page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cache {
    /// It is.
    Used,
    /// Some file that QEMU has open is on a file system that may read past it, or that can't be
    /// known. To wait for requests costs little, so it is not asked how that one is mounted.
    Unsure,
}

/// File systems that may bypass the page cache: FUSE by `FOPEN_DIRECT_IO`, which a server need not
/// report, the others depending on their mount options and on their servers. The names are those of
/// `/proc/PID/mountinfo`.
const PAST_THE_CACHE: [&str; 5] = ["9p", "cifs", "fuseblk", "smb3", "virtiofs"];

/// The same by `statfs`, for mounts that are no longer in QEMU's mount namespace
/// (`include/uapi/linux/magic.h`).
const MAGICS_PAST_THE_CACHE: [u64; 4] = [0x6573_5546, 0x0102_1997, 0xff53_4d42, 0xfe53_4d42];

impl Cache {
    fn of(qmp: &Qmp) -> Self {
        let files = qmp.pid().map(process::open_files);
        match files {
            Some(Ok(files)) if !files.iter().any(is_past_the_cache) => Self::Used,
            _ => Self::Unsure,
        }
    }
}

fn is_past_the_cache(file: &OpenFile) -> bool {
    match file {
        OpenFile::Mounted(kind) => {
            kind == "fuse" || kind.starts_with("fuse.") || PAST_THE_CACHE.contains(&kind.as_str())
        }
        OpenFile::Elsewhere(magic) => magic.is_none_or(|it| MAGICS_PAST_THE_CACHE.contains(&it)),
    }
}

/// How a driver's data gets into guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By a CPU, through QEMU's page table.
    Copied,
    /// Into pages that are pinned for a request.
    Pinned,
    /// Unknown, or by DMA into pages that are pinned permanently.
    Unseen,
}

impl Disks {
    /// Examines all nodes of the block graph, whether a device uses them or not, and the device
    /// types in `devices`.
    ///
    /// # Errors
    /// [`QemuError::Unattachable`] if some disk may write guest memory unseen; QMP errors.
    pub fn look(qmp: &mut Qmp, devices: &[String]) -> Result<Self, QemuError> {
        let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
        Self::of(&nodes, devices, Cache::of(qmp))
    }

    fn of(nodes: &Value, devices: &[String], cache: Cache) -> Result<Self, QemuError> {
        let mut pin_pages = devices.iter().any(|device| PASS_THROUGH.contains(&device.as_str()));
        for node in nodes.as_array().into_iter().flatten() {
            match way(node, cache) {
                Way::Copied => {}
                Way::Pinned => pin_pages = true,
                Way::Unseen => {
                    let text = |member: &str| node[member].as_str().unwrap_or("?").to_owned();
                    return Err(QemuError::Unattachable(format!(
                        "its block node `{}` has the driver `{}`, which is not known to write \
                         guest memory only where the dirty log sees it: use `file`, `host_device` \
                         or a network driver",
                        text("node-name"),
                        text("drv")
                    )));
                }
            }
        }
        Ok(Self { pin_pages })
    }

    /// Whether a QEMU of this version needs its guest stopped for each harvest.
    #[must_use]
    pub fn stop_the_guest(self, version: Version) -> bool {
        self.pin_pages && version >= UNKNOWN_DRAIN
    }

    /// Called before the dirty log is harvested.
    ///
    /// # Errors
    /// The guest has powered off; QMP errors.
    pub fn begin_harvest(self, qmp: &mut Qmp) -> Result<Harvest<'_>, QemuError> {
        qmp.must_be_alive()?;
        let pending = if !self.pin_pages {
            Pending::Seen
        } else if self.stop_the_guest(qmp.version()) {
            let since = Instant::now();
            qmp.pause_guest().or_else(|error| qmp.must_be_alive().and(Err(error)))?;
            Pending::Ended { since }
        } else {
            Pending::Unseen
        };
        Ok(Harvest { qmp, pending })
    }
}

/// A harvest of the dirty log. On drop, the guest that was paused for it is continued.
pub struct Harvest<'a> {
    qmp: &'a mut Qmp,
    pending: Pending,
}

/// The requests of the disks that are pending at a harvest.
enum Pending {
    /// The log sees what they write.
    Seen,
    /// They go into pinned pages, and must end before the pages are copied.
    Unseen,
    /// They ended when the guest was paused: `stop` waits for them, and flushes all disks.
    Ended { since: Instant },
}

impl Harvest<'_> {
    /// Returns for how long QEMU's disks, and possibly the guest, have waited for the requests.
    fn end(&mut self) -> Result<Duration, QemuError> {
        match std::mem::replace(&mut self.pending, Pending::Seen) {
            Pending::Seen => Ok(Duration::ZERO),
            Pending::Unseen => {
                let begun = Instant::now();
                self.qmp.execute("transaction", json!({ "actions": [] }))?;
                Ok(begun.elapsed())
            }
            Pending::Ended { since } => {
                self.qmp.end_pause()?;
                Ok(since.elapsed())
            }
        }
    }
}

impl HarvestGuard for Harvest<'_> {
    /// Also fails if a request takes longer than any command may. The guest runs, or continues by
    /// itself.
    fn finish(mut self: Box<Self>) -> Result<Duration, VmError> {
        let ended = self.end();
        self.qmp.must_be_alive()?;
        Ok(ended?)
    }
}

impl Drop for Harvest<'_> {
    fn drop(&mut self) {
        if matches!(self.pending, Pending::Ended { .. }) {
            let _ = self.end();
        }
    }
}

fn way(node: &Value, cache: Cache) -> Way {
    let driver = node["drv"].as_str().unwrap_or_default();
    if OF_THE_HOST.contains(&driver) {
        // A node without the flag is assumed to pin. A device is read through the page cache,
        // whatever file system its name is on.
        let is_cached = driver != "file" || cache == Cache::Used;
        let is_copied = is_cached && node["cache"]["direct"] == false;
        return if is_copied { Way::Copied } else { Way::Pinned };
    }
    if COPYING.contains(&driver) { Way::Copied } else { Way::Unseen }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::path::Path;

    use super::*;

    fn node(driver: &str, direct: bool) -> Value {
        json!({ "node-name": "n", "drv": driver, "cache": { "direct": direct } })
    }

    #[test]
    fn disks_are_checked_at_every_block_node() {
        let pins = |nodes: Value, devices: &[&str]| {
            let devices: Vec<String> = devices.iter().map(|&name| name.into()).collect();
            Disks::of(&nodes, &devices, Cache::Used).unwrap().pin_pages
        };
        assert!(!pins(json!([]), &["virtio-blk-pci"]));
        assert!(pins(json!([node("qcow2", false), node("file", true)]), &[]));
        assert!(
            !pins(json!([node("raw", true), node("rbd", true)]), &[]),
            "sockets are copied from"
        );
        assert!(pins(json!([{ "node-name": "n", "drv": "file" }]), &[]), "it does not say");
        assert!(pins(json!([node("host_device", false)]), &["scsi-generic"]));
    }

    #[test]
    fn disks_on_file_systems_that_may_read_past_the_page_cache_pin_pages() {
        let pins = |driver: &str| {
            Disks::of(&json!([node(driver, false)]), &[], Cache::Unsure).unwrap().pin_pages
        };
        assert!(pins("file") && !pins("host_device") && !pins("nbd"));
        for kind in ["fuse", "fuse.sshfs", "fuseblk", "virtiofs", "9p", "cifs"] {
            assert!(is_past_the_cache(&OpenFile::Mounted(kind.into())), "{kind}");
        }
        for kind in ["ext4", "fusectl", "nfs4", "overlay", "tmpfs"] {
            assert!(!is_past_the_cache(&OpenFile::Mounted(kind.into())), "{kind}");
        }
        assert!(is_past_the_cache(&OpenFile::Elsewhere(Some(0x6573_5546))));
        assert!(is_past_the_cache(&OpenFile::Elsewhere(None)));
        assert!(!is_past_the_cache(&OpenFile::Elsewhere(Some(0x0102_1994))));
    }

    #[test]
    fn disks_that_pin_pages_stop_guests_of_unknown_qemus() {
        let stop = |pin_pages, major| {
            Disks { pin_pages }.stop_the_guest(Version { major, minor: 0, micro: 0 })
        };
        assert!(stop(true, 11) && !stop(true, 10) && !stop(false, 11));
    }

    /// Begins a harvest with a fake QEMU 11 in this state, and drops it. Returns `stop` and `cont`.
    fn dropped_harvest(mut status: &'static str) -> Vec<String> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let qemu = std::thread::spawn(move || {
            let version = json!({ "qemu": { "major": 11, "minor": 0, "micro": 0 } });
            writeln!(theirs, "{}", json!({ "QMP": { "version": version } })).unwrap();
            let lines = BufReader::new(theirs.try_clone().unwrap()).lines();
            let asked = lines.map_while(Result::ok).map(|line| {
                let asked: Value = serde_json::from_str(&line).unwrap();
                let command = asked["execute"].as_str().unwrap().to_owned();
                if command == "stop" {
                    status = "paused";
                }
                let said = json!({ "return": { "status": status }, "id": asked["id"] });
                writeln!(theirs, "{said}").unwrap();
                command
            });
            asked.filter(|command| command == "stop" || command == "cont").collect()
        });
        let mut qmp = Qmp::over(ours, Path::new("fake")).unwrap();
        drop(Disks { pin_pages: true }.begin_harvest(&mut qmp).unwrap());
        drop(qmp);
        qemu.join().unwrap()
    }

    #[test]
    fn dropped_harvest_continues_only_a_guest_that_it_has_paused() {
        assert_eq!(dropped_harvest("running"), ["stop", "cont"]);
        assert!(dropped_harvest("paused").is_empty());
    }

    #[test]
    fn disks_of_unknown_drivers_are_refused_by_name() {
        for driver in ["nvme", "io_uring", "virtio-blk-vfio-pci", "iser", ""] {
            let nodes = json!([node(driver, false)]);
            let error = Disks::of(&nodes, &[], Cache::Used).unwrap_err();
            assert!(error.is_of_attaching());
            assert!(
                error.to_string().contains(&format!("`n` has the driver `{driver}`")),
                "{error}"
            );
        }
    }
}
