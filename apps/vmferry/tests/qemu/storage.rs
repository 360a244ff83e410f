//! Disks of which no name tells whether they are the same are compared by their contents.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vmferry_qemu::Qmp;
use vmferry_qemu_lab::{Backend, FuseImage, LoopDevice, Machine, Version, qcow2_image};

use crate::support::scene::{Scene, Way};
use crate::support::{Ended, in_parallel, text};

const MIB: usize = 1 << 20;

/// Where the copies differ: in the first block of a file system on the first partition.
const STALE: u64 = MIB as u64 + (16 << 10);

/// A machine with a disk in this file.
fn machine(
    version: Version,
    way: Way,
    workload: &str,
    (driver, format): (&str, &str),
    file: &Path,
) -> Machine {
    let backend = if way == Way::Attached { Backend::File } else { Backend::Private };
    let machine = match workload.contains("disk=") {
        true => Machine { mib: 128, ..Machine::new(version, workload) },
        false => Machine::on_kvm(version, workload),
    };
    let file = format!("driver={driver},node-name=file,filename={},cache.direct=on", text(file));
    let disk = format!("driver={format},node-name=d,file=file");
    let machine = machine.with(&["-blockdev", &file, "-blockdev", &disk]);
    let machine = machine.with(&["-device", "virtio-blk-pci,drive=d,id=disk"]);
    Machine { backend, ..machine }
}

/// An image without a block of zeros, and a copy of it.
fn image_and_copy(directory: &Path) -> [PathBuf; 2] {
    let words = (0..8 * MIB as u64 / 8).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    ["image", "copy"].map(|name| {
        let path = directory.join(name);
        std::fs::write(&path, &bytes).unwrap();
        path
    })
}

/// A copy on storage whose files have no identity that both hosts know.
#[test]
fn copies_are_refused_if_their_contents_differ() {
    let versions = [Version::V7_2, Version::V10_0];
    let all = versions.into_iter().flat_map(|it| [(it, Way::Attached), (it, Way::Carried)]);
    in_parallel(all.collect(), |(version, way)| {
        let directory = tempfile::tempdir().unwrap();
        let [image, copy] = image_and_copy(directory.path());
        let mounted = |of: &Path| {
            let point = of.with_extension("mounted");
            FuseImage::mount(of, point)
        };
        let stores = [mounted(&image), mounted(&copy)];
        let [here, there] = stores
            .each_ref()
            .map(|store| machine(version, way, "hot=2,rate=1000", ("file", "raw"), store.path()));
        let mut scene = Scene::of(here, way);
        scene.machine = there;

        let file = std::fs::File::options().read(true).write(true).open(&copy).unwrap();
        let mut content = [0; 8];
        file.read_exact_at(&mut content, STALE).unwrap();
        file.write_all_at(b"outdated", STALE).unwrap();
        let (qemu, _receiving, address) = scene.receive_tls();
        let refused = scene.send_at_once(&address, &[]);
        refused.failed(6, &format!("differ in the 16 KiB at byte {STALE}"));
        qemu.kill();
        scene.runs_on_here();

        let (qemu, mut receiving, address) = scene.receive_tls();
        let sent = scene.send_at_once(&address, &["--disks-differ"]).exited(0);
        assert_eq!(sent.last()["downtime"]["storage_ms"], 0.0, "{sent:?}");
        receiving.event("received");
        scene.moved_to(qemu);

        // The control: back to the first image, with the same contents again.
        file.write_all_at(&content, STALE).unwrap();
        scene.machine = machine(version, way, "hot=2,rate=1000", ("file", "raw"), stores[0].path());
        let (qemu, mut receiving, address) = scene.receive_tls();
        compared(&scene.send_at_once(&address, &[]).exited(0));
        receiving.event("received");
        scene.moved_to(qemu);
    });
}

/// Checks that both hosts compared the disks.
fn compared(sent: &Ended) {
    let stats: &Value = sent.last();
    assert!(stats["downtime"]["storage_ms"].as_f64().unwrap() > 0.0, "{stats}");
}

/// A guest that reads and writes its disk all the time goes to and fro between two hosts which
/// have it under names that tell nothing. The image of the format qcow2 has a persistent dirty
/// bitmap, which QEMU writes into it after the guest was paused.
fn shared_disk_is_never_taken_for_another((way, version, format): Case, moves: u32) {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let content = if format == "qcow2" { qcow2_image(48) } else { Vec::new() };
    std::fs::write(&image, content).unwrap();
    std::fs::File::options().write(true).open(&image).unwrap().set_len(64 * MIB as u64).unwrap();
    let devices = [LoopDevice::of(&image).unwrap(), LoopDevice::of(&image).unwrap()];
    let machine = |number: usize| {
        let disk = ("host_device", format);
        machine(version, way, "dirty=4 disk=16", disk, devices[number].path())
    };
    let mut scene = Scene::of(machine(0), way);
    if format == "qcow2" {
        let bitmap = json!({ "node": "d", "name": "backup", "persistent": true });
        let mut qmp = Qmp::connect(&scene.here.qmp).unwrap();
        qmp.execute("block-dirty-bitmap-add", bitmap).unwrap();
    }
    for number in 1..=moves {
        scene.machine = machine(number as usize % 2);
        let (there, mut receiving, address) = scene.receive_tls();
        let before = scene.here.said().map_or(0, |said| said.get("disk_rounds"));
        let sent = scene.send_at_once(&address, &[]).exited(0);
        compared(&sent);
        assert_eq!(sent.last()["qemu"]["ending_bitmaps"], json!([]), "{sent:?}");
        receiving.event("received");
        scene.here = there;
        let after = scene.here.wait_for("writes on", |said| said.get("disk_rounds") > before);
        let faults = (after.get("corruptions"), after.get("disk_errors"));
        assert_eq!(faults, (0, 0), "move {number}: {after:?}");
    }
    if format == "qcow2" {
        let mut qmp = Qmp::connect(&scene.here.qmp).unwrap();
        let nodes = qmp.execute("query-named-block-nodes", json!({})).unwrap();
        assert!(nodes.to_string().contains("\"name\":\"backup\""), "{nodes}");
    }
}

type Case = (Way, Version, &'static str);

#[test]
fn shared_disk_that_the_guest_writes_is_the_same() {
    let cases = [(Way::Attached, Version::V7_2, "qcow2"), (Way::Carried, Version::V10_0, "raw")];
    in_parallel(cases.into(), |case| shared_disk_is_never_taken_for_another(case, 2));
}

#[test]
#[cfg_attr(not(feature = "long-tests"), ignore = "a part of the full matrix: make test-all")]
fn shared_disk_that_the_guest_writes_is_the_same_in_20_moves() {
    let mut cases = Vec::new();
    for version in [Version::V7_2, Version::V10_0] {
        for way in [Way::Attached, Way::Carried] {
            cases.extend(["raw", "qcow2"].map(|format| (way, version, format)));
        }
    }
    in_parallel(cases, |case| shared_disk_is_never_taken_for_another(case, 20));
}
