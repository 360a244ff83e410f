//! Everything about a QEMU's machine that its load checks late or never: the inventory.
//!
//! QEMU loads a state into a machine with another topology or another disk without a word, and
//! refuses one with other video memory after all memory was sent. So both sides describe
//! themselves, and the destination [compares](comparison) before anything is sent. The source reads
//! its inventory again before it gives the state away: while vmferry is attached, QEMU itself runs
//! no migration, and lets any client add a device or put a snapshot on top of a disk. Once QEMU's
//! own `migrate` has begun, it refuses device changes by itself.

mod apply;
mod comparison;
mod disk;
mod storage;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::json;
use vmferry::VmError;
use vmferry::vmm::told::Told;

pub use self::apply::apply;
pub use self::comparison::{Allowed, ROWS, Row, Rule, same_device};
pub use self::disk::{Disk, Medium};
pub use self::storage::{OpenImage, Storage, is_named};
use crate::error::QemuError;
use crate::located;
use crate::machine;
use crate::qmp::{Qmp, QmpError};
use crate::view::View;
use crate::writers::children;

/// The optional member of a guest's description that holds its inventory.
pub const MEMBER: &str = "inventory";

/// A QEMU's inventory. A release reads the members that it knows of another one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inventory {
    /// The arrangement of the vCPUs, by the names of `-smp`.
    pub topology: BTreeMap<String, u64>,
    /// The sizes to which the RAM blocks may grow, in bytes.
    pub blocks: BTreeMap<String, u64>,
    /// How many devices of each type there are that are on no PCI bus.
    pub devices: BTreeMap<String, u64>,
    /// The types of those devices that the machine type does not have by itself.
    pub added: BTreeSet<String>,
    /// The disks of the guest's devices.
    pub disks: Vec<Disk>,
    /// The dirty bitmaps that end with this QEMU, as `NAME of DEVICE`: vmferry moves none.
    pub ending_bitmaps: Vec<String>,
}

/// The parts that any client of QEMU can change at any time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Name and type of each device that the machine type does not have by itself.
    devices: Vec<(String, String)>,
    disks: Vec<Disk>,
}

impl Inventory {
    /// Reads the inventory of a QEMU. What is not known of a process that is not visible is left
    /// out.
    ///
    /// # Errors
    /// QMP errors.
    pub fn read(qmp: &mut Qmp, view: &mut dyn View) -> Result<Self, QemuError> {
        let topology = topology(qmp)?;
        let blocks = located::list(qmp)?;
        let blocks = blocks.into_iter().map(|block| (block.name, block.total)).collect();
        let mut devices = BTreeMap::new();
        for (kind, address) in machine::devices(&qmp.human("info qtree")?) {
            if address.is_none() {
                *devices.entry(kind).or_default() += 1;
            }
        }
        let added = added(qmp)?.into_iter().map(|(_, kind)| kind);
        let added = added.filter(|kind| devices.contains_key(kind)).collect();
        let mut disks = disk::read(qmp)?;
        disk::locate(&mut disks, qmp, view);
        let ending_bitmaps = disk::bitmaps_that_end(qmp)?;
        Ok(Self { topology, blocks, devices, added, disks, ending_bitmaps })
    }

    /// Checks that no disk of the guest would lose its data with this QEMU.
    ///
    /// # Errors
    /// [`QemuError::Unsupported`], with the disk.
    pub fn must_outlive_qemu(&self) -> Result<(), QemuError> {
        let lost = self.disks.iter().find(|disk| disk.is_temporary());
        lost.map_or(Ok(()), |disk| {
            Err(QemuError::Unsupported(format!(
                "the guest's writes to its disk `{}` are in a temporary file of this QEMU \
                 (`snapshot=on`), and would be lost: put them into the image with `commit {}` on \
                 QEMU's monitor and start the guest without `snapshot=on`, or use a named overlay \
                 that the other host can open",
                disk.device,
                if disk.name.is_empty() { "all" } else { &disk.name }
            )))
        })
    }
}

impl Parts {
    /// Reads the parts of a QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn read(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let mut devices = added(qmp)?;
        devices.sort();
        Ok(Self { devices, disks: disk::read(qmp)? })
    }

    /// Checks that a QEMU still has these parts.
    ///
    /// # Errors
    /// [`Told`] with the change, and QMP errors.
    pub fn must_be_as_before(&self, qmp: &mut Qmp) -> Result<(), VmError> {
        match self.change(&Self::read(qmp)?) {
            Some(change) => Err(Told::incompatible(change).into()),
            None => Ok(()),
        }
    }

    /// Describes what has changed since, in words.
    fn change(&self, now: &Self) -> Option<String> {
        let lacks = |these: &[(String, String)], one: &(String, String)| !these.contains(one);
        let meanwhile = "while the guest was being migrated: migrate it again";
        if let Some((name, kind)) = now.devices.iter().find(|one| lacks(&self.devices, one)) {
            return Some(format!("the device `{kind}` (`{name}`) was added {meanwhile}"));
        }
        if let Some((name, kind)) = self.devices.iter().find(|one| lacks(&now.devices, one)) {
            return Some(format!("the device `{kind}` (`{name}`) was removed {meanwhile}"));
        }
        let differs = |disk: &&Disk| !now.disks.contains(disk);
        let changed = self.disks.iter().find(differs);
        let changed = changed.or_else(|| now.disks.iter().find(|disk| !self.disks.contains(disk)));
        changed.map(|disk| {
            let words = |these: &Self| {
                let found = these.disks.iter().find(|other| other.device == disk.device);
                found.map_or_else(|| "absent".to_owned(), |disk| format!("`{disk}`"))
            };
            let (before, now) = (words(self), words(now));
            format!("the disk `{}` was changed from {before} to {now} {meanwhile}", disk.device)
        })
    }
}

/// Name and type of each device that the machine type does not have by itself.
fn added(qmp: &mut Qmp) -> Result<Vec<(String, String)>, QmpError> {
    let mut added = children(qmp, "/machine/peripheral")?;
    added.extend(children(qmp, "/machine/peripheral-anon")?);
    Ok(added)
}

/// The arrangement of the vCPUs; empty if QEMU does not report it.
fn topology(qmp: &mut Qmp) -> Result<BTreeMap<String, u64>, QmpError> {
    let smp = qmp.execute("qom-get", json!({ "path": "/machine", "property": "smp" }));
    match smp {
        Ok(smp) => {
            let members = smp.as_object().into_iter().flatten();
            Ok(members.filter_map(|(name, value)| Some((name.clone(), value.as_u64()?))).collect())
        }
        Err(QmpError::Refused { .. }) => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn of(devices: &[&str], disks: &[(&str, Value)]) -> Parts {
        let devices = devices.iter().map(|&name| (name.into(), "virtio-rng-pci".into()));
        let disks = disks.iter().map(|(name, inserted)| {
            Disk::of(&json!({ "device": "", "qdev": name, "inserted": inserted })).unwrap()
        });
        Parts { devices: devices.collect(), disks: disks.collect() }
    }

    #[test]
    fn changed_parts_are_named() {
        let size = 64 << 20;
        let base = json!({ "image": { "filename": "a", "virtual-size": size } });
        let overlay = json!({ "image": {
            "filename": "b", "virtual-size": size,
            "backing-image": { "filename": "a", "virtual-size": size },
        } });
        let before = of(&["rng0"], &[("disk", base.clone())]);
        assert_eq!(before.change(&before), None);
        let says = |now: Parts| before.change(&now).unwrap();
        let disk = ("disk", base);
        assert!(
            says(of(&["rng0", "rng1"], std::slice::from_ref(&disk))).contains("(`rng1`) was added")
        );
        assert!(says(of(&[], std::slice::from_ref(&disk))).contains("(`rng0`) was removed"));
        let snapshot = says(of(&["rng0"], &[("disk", overlay)]));
        assert!(
            snapshot.contains("from `a of 64 MiB` to `b of 64 MiB on a of 64 MiB`"),
            "{snapshot}"
        );
        assert!(says(of(&["rng0"], &[])).contains("to absent"));
        let ejected = says(of(&["rng0"], &[("disk", Value::Null)]));
        assert!(ejected.contains("to `empty`"), "{ejected}");
        assert!(says(of(&["rng0"], &[disk, ("new", Value::Null)])).contains("from absent"));
    }
}
