//! The kind of a QEMU's machine, which the other side must match, and the devices' properties that
//! forbid a migration or need care.
//!
//! QEMU compares little before it loads a state: an extra device at the destination goes unnoticed,
//! or ends the process when the guest is already paused. So both sides describe themselves, and the
//! destination compares before anything is sent.

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::QemuError;
use crate::qmp::Qmp;

/// What must be equal on both sides.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Such as `pc-q35-10.0`.
    pub kind: String,
    /// Number of vCPUs.
    pub vcpus: usize,
    /// The model of the first vCPU, such as `qemu64`; `None` from a release that did not send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// PCI devices as `NAME at ADDRESS`, sorted.
    pub devices: Vec<String>,
}

/// What the engine must know about the devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Habits {
    /// Some device pins guest pages for its I/O and writes them without going through a page table.
    pub pins_pages: bool,
    /// The guest can return pages to the host while it runs.
    pub gives_pages_back: bool,
}

/// Reads the machine of a QEMU.
///
/// # Errors
/// QMP errors.
pub fn look(qmp: &mut Qmp) -> Result<Machine, QemuError> {
    let devices = devices(&qmp.human("info qtree")?);
    let kind = qmp.execute("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    let kind = kind.as_str().unwrap_or_default();
    let vcpus = qmp.execute("query-cpus-fast", json!({}))?;
    let cpu = match vcpus[0]["qom-path"].as_str() {
        Some(path) => qmp.execute("qom-get", json!({ "path": path, "property": "type" }))?,
        None => serde_json::Value::Null,
    };
    // Such as `qemu64-x86_64-cpu`.
    let cpu = cpu.as_str().map(|name| name.strip_suffix("-x86_64-cpu").unwrap_or(name).to_owned());
    let mut pci: Vec<String> = devices
        .iter()
        .filter_map(|(name, address)| Some(format!("{name} at {}", address.as_deref()?)))
        .collect();
    pci.sort();
    Ok(Machine {
        kind: kind.strip_suffix("-machine").unwrap_or(kind).to_owned(),
        vcpus: vcpus.as_array().map_or(0, Vec::len),
        cpu,
        devices: pci,
    })
}

/// The threads of the vCPUs.
///
/// # Errors
/// QMP errors.
pub fn vcpu_threads(qmp: &mut Qmp) -> Result<Vec<u32>, QemuError> {
    let vcpus = qmp.execute("query-cpus-fast", json!({}))?;
    let threads = vcpus.as_array().into_iter().flatten();
    Ok(threads.filter_map(|vcpu| u32::try_from(vcpu["thread-id"].as_u64()?).ok()).collect())
}

/// Describes what differs, in words; `None` if nothing does.
#[must_use]
pub fn difference(theirs: &Machine, ours: &Machine) -> Option<String> {
    if theirs.kind != ours.kind {
        return Some(format!(
            "the source is a `{}` and the destination a `{}`: start it with `-machine {}`",
            theirs.kind, ours.kind, theirs.kind
        ));
    }
    if theirs.vcpus != ours.vcpus {
        return Some(format!(
            "the source has {} vCPUs and the destination {}: use the same `-smp`",
            theirs.vcpus, ours.vcpus
        ));
    }
    if let (Some(one), Some(other)) = (&theirs.cpu, &ours.cpu)
        && one != other
    {
        return Some(format!(
            "the source's vCPUs are `{one}` and the destination's `{other}`: start it with `-cpu \
             {one}` and the same features"
        ));
    }
    let only = |here: &Machine, there: &Machine| {
        let mut left: Vec<_> = there.devices.iter().map(|device| without_bus(device)).collect();
        let missing = here.devices.iter().find(|device| {
            let found = left.iter().position(|one| *one == without_bus(device));
            found.map(|at| left.swap_remove(at)).is_none()
        });
        missing.cloned()
    };
    if let Some(device) = only(theirs, ours) {
        return Some(format!(
            "the destination lacks the source's `{device}`: use the same devices"
        ));
    }
    only(ours, theirs).map(|device| {
        format!("the source lacks the destination's `{device}`: use the same devices")
    })
}

/// A device without its bus number. The guest's firmware numbers buses when it boots: a bus behind
/// a bridge is 01 at the source, and 00 at a destination that has not booted.
fn without_bus(device: &str) -> (&str, &str) {
    let (name, address) = device.split_once(" at ").unwrap_or((device, ""));
    (name, address.rsplit_once(':').map_or(address, |(_, place)| place))
}

/// The devices of `info qtree`, with their addresses if they are on a PCI bus. A device is a line
/// such as `  dev: virtio-blk-pci, id "disk"`, and the deeper lines up to the next device belong to
/// it.
pub fn devices(tree: &str) -> Vec<(String, Option<String>)> {
    let mut found: Vec<(String, Option<String>)> = Vec::new();
    for line in tree.lines().map(str::trim) {
        if let Some(rest) = line.strip_prefix("dev: ") {
            let name = rest.split_once(',').map_or(rest, |(name, _)| name);
            found.push((name.to_owned(), None));
        } else if let Some(rest) = line.strip_prefix("class ")
            && let Some((_, rest)) = rest.split_once(", addr ")
            && let Some((address, _)) = rest.split_once(',')
            && let Some((_, place)) = found.last_mut()
        {
            *place = Some(address.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "\
        bus: main-system-bus\r\n\
        \x20 type System\r\n\
        \x20 dev: hpet, id \"\"\r\n\
        \x20   timers = 3\r\n\
        \x20 dev: q35-pcihost, id \"\"\r\n\
        \x20   bus: pcie.0\r\n\
        \x20     type PCIE\r\n\
        \x20     dev: virtio-blk-pci, id \"disk\"\r\n\
        \x20       class = 0 (0x0)\r\n\
        \x20       addr = 03.0\r\n\
        \x20       class SCSI controller, addr 00:03.0, pci id 1af4:1001 (sub 1af4:0002)\r\n\
        \x20       bus: virtio-bus\r\n\
        \x20         dev: virtio-blk-device, id \"\"\r\n";

    #[test]
    fn devices_and_their_addresses_are_parsed() {
        let found = devices(TREE);
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["hpet", "q35-pcihost", "virtio-blk-pci", "virtio-blk-device"]);
        assert_eq!(found[2].1.as_deref(), Some("00:03.0"));
        assert_eq!(found[3].1, None);
    }

    #[test]
    fn difference_says_what_to_change() {
        let machine = |kind: &str, vcpus, devices: &[&str]| Machine {
            kind: kind.into(),
            vcpus,
            cpu: None,
            devices: devices.iter().map(|&name| name.into()).collect(),
        };
        let ours = machine("q35", 2, &["a at 1", "b at 2"]);
        assert_eq!(difference(&ours, &ours), None);
        let says = |theirs: Machine| difference(&theirs, &ours).unwrap();
        assert!(says(machine("pc", 2, &[])).contains("-machine pc"));
        assert!(says(machine("q35", 1, &[])).contains("-smp"));
        let of = |cpu: &str| Machine { cpu: Some(cpu.into()), ..ours.clone() };
        assert!(difference(&of("host"), &of("qemu64")).unwrap().contains("-cpu host"));
        assert_eq!(difference(&of("host"), &ours), None, "an older release does not tell");
        assert!(
            says(machine("q35", 2, &["a at 1", "b at 2", "c at 3"]))
                .contains("lacks the source's `c at 3`")
        );
        assert!(
            says(machine("q35", 2, &["a at 1"]))
                .contains("source lacks the destination's `b at 2`")
        );
        let behind = |places: &[&str]| machine("q35", 2, places);
        let booted = behind(&["a at 01:00.0", "a at 02:00.0"]);
        assert_eq!(difference(&booted, &behind(&["a at 00:00.0", "a at 00:00.0"])), None);
        let why = difference(&booted, &behind(&["a at 00:00.0"])).unwrap();
        assert!(why.contains("lacks the source's `a at 02:00.0`"), "{why}");
    }
}
