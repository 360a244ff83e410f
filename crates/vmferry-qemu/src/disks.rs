//! What a QEMU's disks do to guest memory, and how requests under way are waited for.
//!
//! A read that goes through the host's page cache is copied into guest memory by a processor,
//! through QEMU's own page table, where the dirty log sees it. A read past the cache
//! (`cache.direct=on`, SCSI pass-through) goes into pages that the kernel has pinned when the
//! request was made. Each node of QEMU's block graph has a flag of its own; the node at the top
//! says nothing about the nodes below.
//!
//! # Why a harvest needs no pause
//!
//! To pin a page for writing is a write to the dirty log: the page is in the next harvest. So a
//! request that is under way at a harvest has its pages either in this harvest or in an earlier
//! one. If all requests that were under way at a harvest have ended before its pages are copied,
//! and before the next harvest, every copy has what they have brought. [`Disks::settle`] waits for
//! that while the guest runs on: nothing is flushed, and nobody is sent `STOP` and `RESUME`.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::QemuError;
use crate::qmp::{Qmp, Version};

/// Drivers that open a file or a device of the host: the node's own flag says how.
const OF_THE_HOST: [&str; 3] = ["file", "host_cdrom", "host_device"];

/// Drivers whose data a processor copies into guest memory, whoever has brought it: formats,
/// filters, and clients of networks that read from sockets.
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
    // Of Proxmox: filters that pass requests on, and a client of its backup server.
    "alloc-track",
    "zeroinit",
    "pbs",
    // Of older QEMUs.
    "backup-top",
];

/// Devices that hand the guest's commands to the kernel (`SG_IO`), which pins the pages of each.
const PASS_THROUGH: [&str; 2] = ["scsi-block", "scsi-generic"];

/// From this version on nobody has looked whether an empty `transaction` waits for requests under
/// way. Source: QEMU `blockdev.c`, `qmp_transaction`, which begins with `bdrv_drain_all`; tried
/// with 7.2 and 10.0.
const UNKNOWN_DRAIN: Version = Version { major: 11, minor: 0, micro: 0 };

/// How QEMU's disks reach guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disks {
    /// Whether some disk's requests go into pinned pages.
    pub pin_pages: bool,
}

/// How a driver's data comes into guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By a processor, through QEMU's page table.
    Copied,
    /// Into pages that are pinned for a request.
    Pinned,
    /// Nobody knows, or by DMA into pages that are pinned for good.
    Unseen,
}

impl Disks {
    /// Looks at all nodes of the block graph, whether a device uses them or not, and at the
    /// devices, whose type names these are.
    ///
    /// # Errors
    /// [`QemuError::Unattachable`] where some disk may write guest memory unseen; QMP's.
    pub fn look(qmp: &mut Qmp, devices: &[String]) -> Result<Self, QemuError> {
        let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
        Self::of(&nodes, devices)
    }

    fn of(nodes: &Value, devices: &[String]) -> Result<Self, QemuError> {
        let mut pin_pages = devices.iter().any(|device| PASS_THROUGH.contains(&device.as_str()));
        for node in nodes.as_array().into_iter().flatten() {
            match way(node) {
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

    /// Runs `harvest`, and returns when all requests that were under way at its end are over: for
    /// how long QEMU's disks, and it may be the guest, have waited for that.
    ///
    /// # Errors
    /// QMP's, also if a request takes longer than any command may. The guest runs, or goes on by
    /// itself.
    pub fn settle(self, qmp: &mut Qmp, harvest: &mut dyn FnMut()) -> Result<Duration, QemuError> {
        if !self.pin_pages {
            harvest();
            return Ok(Duration::ZERO);
        }
        if qmp.version() >= UNKNOWN_DRAIN {
            return stop_for(qmp, harvest);
        }
        harvest();
        let begun = Instant::now();
        qmp.execute("transaction", json!({ "actions": [] }))?;
        Ok(begun.elapsed())
    }
}

/// The same with the guest stopped, if it runs: `stop` waits for requests under way, and flushes
/// all disks.
fn stop_for(qmp: &mut Qmp, harvest: &mut dyn FnMut()) -> Result<Duration, QemuError> {
    let begun = Instant::now();
    qmp.pause_guest()?;
    harvest();
    qmp.end_pause()?;
    Ok(begun.elapsed())
}

fn way(node: &Value) -> Way {
    let driver = node["drv"].as_str().unwrap_or_default();
    if OF_THE_HOST.contains(&driver) {
        // One that does not say how it reads is taken to pin.
        return if node["cache"]["direct"] == false { Way::Copied } else { Way::Pinned };
    }
    if COPYING.contains(&driver) { Way::Copied } else { Way::Unseen }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(driver: &str, direct: bool) -> Value {
        json!({ "node-name": "n", "drv": driver, "cache": { "direct": direct } })
    }

    #[test]
    fn disks_of_any_node_of_the_graph_are_looked_at() {
        let pins = |nodes: Value, devices: &[&str]| {
            let devices: Vec<String> = devices.iter().map(|&name| name.into()).collect();
            Disks::of(&nodes, &devices).unwrap().pin_pages
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
    fn disks_of_unknown_drivers_are_refused_by_name() {
        for driver in ["nvme", "io_uring", "virtio-blk-vfio-pci", "iser", ""] {
            let error = Disks::of(&json!([node(driver, false)]), &[]).unwrap_err();
            assert!(error.is_of_attaching());
            assert!(
                error.to_string().contains(&format!("`n` has the driver `{driver}`")),
                "{error}"
            );
        }
    }
}
