//! The parts of a QEMU that QMP can change during a migration: devices and disks.
//!
//! While vmferry is attached, QEMU itself runs no migration. It therefore lets any client add a
//! device, which the destination lacks, or put a snapshot on top of a disk whose old image the
//! destination has open. So both are read when the guest is described, and again before the state
//! is given away. Once QEMU's own `migrate` has begun, QEMU refuses device changes by itself.

use serde_json::{Value, json};
use vmferry::VmError;
use vmferry::vmm::told::Told;

use crate::qmp::{Qmp, QmpError};
use crate::writers::children;

/// Devices that were added to those of the machine type, and the images in its disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Name and type of each device.
    devices: Vec<(String, String)>,
    /// Name of each disk, and its chain of images.
    disks: Vec<(String, String)>,
}

impl Parts {
    /// Reads the parts of a QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn read(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let mut devices = children(qmp, "/machine/peripheral")?;
        devices.extend(children(qmp, "/machine/peripheral-anon")?);
        devices.sort();
        let blocks = qmp.execute("query-block", json!({}))?;
        let mut disks: Vec<_> = blocks.as_array().into_iter().flatten().map(disk).collect();
        disks.sort();
        Ok(Self { devices, disks })
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
        let changed = self.disks.iter().find(|one| lacks(&now.disks, one));
        let changed = changed.or_else(|| now.disks.iter().find(|one| lacks(&self.disks, one)));
        changed.map(|(name, _)| {
            let images = |these: &[(String, String)]| {
                let found = these.iter().find(|(other, _)| other == name);
                found.map_or("absent".to_owned(), |(_, images)| format!("`{images}`"))
            };
            format!(
                "the disk `{name}` was changed from {} to {} {meanwhile}",
                images(&self.disks),
                images(&now.disks)
            )
        })
    }
}

/// The name of a disk, and its images with their sizes, from the top layer down.
fn disk(block: &Value) -> (String, String) {
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let name = text(&block["device"]).or_else(|| text(&block["qdev"])).unwrap_or_default();
    let mut image = &block["inserted"]["image"];
    let mut images = Vec::new();
    while let Some(file) = text(&image["filename"]) {
        let mib = image["virtual-size"].as_u64().unwrap_or(0) >> 20;
        images.push(format!("{file} of {mib} MiB"));
        image = &image["backing-image"];
    }
    let images = if images.is_empty() { "empty".to_owned() } else { images.join(" on ") };
    (name, images)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(devices: &[&str], disks: &[(&str, Value)]) -> Parts {
        let devices = devices.iter().map(|&name| (name.into(), "virtio-rng-pci".into()));
        let disks = disks.iter().map(|(name, inserted)| {
            disk(&json!({ "device": "", "qdev": name, "inserted": inserted }))
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
