//! Every row of the table, with inventories that differ in nothing else.

use std::collections::BTreeMap;

use super::*;

fn stored(within: &str, name: &str) -> Option<Storage> {
    Some(Storage { kind: "file".into(), within: within.into(), name: name.into() })
}

fn medium() -> Medium {
    Medium {
        bytes: 8 << 20,
        format: "qcow2".into(),
        images: "/images/web of 8 MiB".into(),
        file: "/images/web".into(),
        storage: stored("nfs server:/images", "7"),
        ..Medium::default()
    }
}

fn inventory() -> Inventory {
    let smp = |count| ["cpus", "maxcpus", "sockets"].map(|name| (name.to_owned(), count));
    let disk = |device: &str, removable| Disk {
        device: device.into(),
        removable,
        medium: Some(medium()),
        ..Disk::default()
    };
    Inventory {
        topology: smp(2).into(),
        blocks: [("ram".to_owned(), 128 << 20), ("vga.vram".to_owned(), 16 << 20)].into(),
        devices: [("usb-tablet".to_owned(), 1), ("isa-serial".to_owned(), 1)].into(),
        added: ["usb-tablet".to_owned()].into(),
        disks: vec![disk("cd", true), disk("disk", false)],
        ending_bitmaps: Vec::new(),
    }
}

/// The destination's refusal of a source that differs so.
fn refusal(change: impl Fn(&mut Inventory)) -> Vec<String> {
    let mut theirs = inventory();
    change(&mut theirs);
    inventory().differences(&theirs, Allowed::default())
}

fn disk(inventory: &mut Inventory) -> &mut Medium {
    inventory.disks[1].medium.as_mut().unwrap()
}

#[test]
fn equal_inventories_have_no_difference() {
    assert_eq!(refusal(|_| {}), [""; 0]);
    // A release that does not know the rows.
    let unknown = Inventory { disks: inventory().disks, ..Inventory::default() };
    let found = inventory().differences(&unknown, Allowed::default());
    assert!(found.iter().all(|it| !it.contains("disk") && !it.contains("-smp")), "{found:?}");
}

#[test]
fn each_row_finds_its_difference_alone() {
    type Change = fn(&mut Inventory);
    let cases: [(Change, &str); 13] = [
        (|it| *it.topology.get_mut("maxcpus").unwrap() = 4, "maxcpus=4 and the destination maxc"),
        (|it| *it.blocks.get_mut("vga.vram").unwrap() = 32 << 20, "32 MiB of memory in `vga.vram`"),
        (|it| _ = it.blocks.remove("vga.vram"), "nothing of memory in `vga.vram`"),
        (|it| _ = it.devices.remove("usb-tablet"), "device `usb-tablet`: the source has 0"),
        (|it| it.disks[1].device = "other".into(), "lacks the source's disk device `other`"),
        (|it| drop(it.disks.pop()), "the source lacks the destination's disk device `disk`"),
        (|it| it.disks[1].medium = None, "which can't be ejected"),
        (|it| disk(it).format = "raw".into(), "as `raw` and the destination as `qcow2`"),
        (|it| disk(it).read_only = true, "is read-only at the source and writable"),
        (|it| disk(it).storage = stored("nfs server:/images", "8"), "which is another one"),
        (
            |it| (disk(it).bytes, disk(it).storage) = (4 << 20, stored("host a 1", "7")),
            "has 4194304 bytes at the source",
        ),
        (|it| (disk(it).bytes, disk(it).storage) = (4 << 20, None), "has 4194304 bytes"),
        (
            |it| it.disks[0].medium.as_mut().unwrap().storage = stored("nfs server:/images", "9"),
            "the disk `cd`",
        ),
    ];
    for (change, words) in cases {
        let found = refusal(change);
        assert!(found.len() == 1 && found[0].contains(words), "{found:?} do not say `{words}`");
    }
}

#[test]
fn differences_that_do_no_harm_are_accepted() {
    let changes: [fn(&mut Inventory); 5] = [
        |it| _ = it.topology.insert("modules".into(), 7),
        |it| _ = it.devices.insert("isa-serial".into(), 2),
        // Ejected at the source: it is ejected here, too.
        |it| it.disks[0].medium = None,
        // The same image, resized since it was opened here.
        |it| disk(it).bytes = 16 << 20,
        // Two local paths: nothing tells.
        |it| disk(it).storage = stored("host a 1", "7"),
    ];
    for (at, change) in changes.into_iter().enumerate() {
        assert_eq!(refusal(change), [""; 0], "change {at}");
    }
    let mut unlike = inventory();
    unlike.disks[0].medium = None;
    let found = unlike.differences(&inventory(), Allowed::default());
    assert!(found[0].contains("the drive `cd` is empty at the destination"), "{found:?}");
}

#[test]
fn only_the_storage_may_differ_with_the_permission_for_it() {
    let allowed = Allowed { disks_differ: true };
    let mut theirs = inventory();
    disk(&mut theirs).storage = stored("nfs server:/images", "8");
    assert_eq!(inventory().differences(&theirs, allowed), [""; 0]);
    disk(&mut theirs).bytes = 1;
    assert_eq!(inventory().differences(&theirs, allowed).len(), 1);
}

#[test]
fn drives_of_devices_without_ids_are_found_by_their_names() {
    let mut theirs = inventory();
    let mut ours = inventory();
    (theirs.disks[1].device, ours.disks[1].device) = ("device[1]".into(), "device[2]".into());
    assert_eq!(ours.differences(&theirs, Allowed::default()).len(), 1);
    for inventory in [&mut theirs, &mut ours] {
        inventory.disks[1].name = "virtio0".into();
    }
    assert_eq!(ours.differences(&theirs, Allowed::default()), [""; 0]);
}

#[test]
fn rows_of_the_table_are_those_of_the_documentation() {
    let document = include_str!("../../../../../docs/qemu.md");
    let rows: BTreeMap<_, _> = ROWS.iter().map(|row| (row.subject, row.rule)).collect();
    assert_eq!(rows.len(), ROWS.len());
    for subject in rows.keys() {
        assert!(document.contains(&format!("\n| {subject} |")), "docs/qemu.md: no row {subject}");
    }
}
