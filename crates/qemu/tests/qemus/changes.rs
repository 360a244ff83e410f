//! Devices and disks of real QEMUs that change while vmferry is attached.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::support::{hop, migrate_after};
use vmferry::ErrorClass;
use vmferry_qemu_lab::{Machine, Version, World};

/// Sends a command to a QEMU through its second monitor.
fn order(monitor: &Path, order: &str) {
    let stream = UnixStream::connect(monitor).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap()).lines();
    for line in ["{\"execute\":\"qmp_capabilities\"}", order] {
        writeln!(&stream, "{line}").unwrap();
        loop {
            let answer = answers.next().unwrap().unwrap();
            assert!(!answer.contains("\"error\""), "{order}: {answer}");
            if answer.contains("\"return\"") {
                break;
            }
        }
    }
}

/// The QMP command that hot-plugs a device.
const ADD: &str = r#"{
    "execute": "device_add",
    "arguments": {"driver": "virtio-rng-pci", "id": "odd", "bus": "spare"}
}"#;

/// QEMU has no migration under way, so it accepts such commands, and the destination is not
/// notified.
#[test]
fn changed_device_or_disk_ends_the_migration_and_is_named_on_both_sides() {
    for version in Version::ALL {
        let world = World::new();
        let disk = world.disk(16);
        let snapshot = world.path("snapshot.qcow2");
        let node = format!("driver=file,node-name=disk,filename={}", disk.display());
        let machine = Machine::on_kvm(version, "hot=8,rate=40000").with(&[
            "-device",
            "pcie-root-port,id=spare,chassis=1,slot=1",
            "-blockdev",
            &node,
            "-device",
            "virtio-blk-pci,drive=disk,id=root",
        ]);
        let cover = format!(
            r#"{{
                "execute": "blockdev-snapshot-sync",
                "arguments": {{
                    "node-name": "disk",
                    "snapshot-file": "{}",
                    "snapshot-node-name": "top"
                }}
            }}"#,
            snapshot.display()
        );
        let changes = [
            (cover.as_str(), "the disk `root` was changed from"),
            (ADD, "the device `virtio-rng-pci` (`odd`) was added"),
        ];
        for (number, (change, says)) in (1..).zip(changes) {
            let monitor = world.path(&format!("second-{number}.qmp"));
            let socket = format!("unix:{},server=on,wait=off", monitor.display());
            let here = machine.clone().with(&["-qmp", &socket]);
            let mut here = here.start(&world, &format!("here-{number}"));
            here.check_guest();
            let there = machine.incoming(&world, &format!("there-{number}"));
            let (error, told) =
                migrate_after(&world, number, &here, &there, || order(&monitor, change));
            assert_eq!(error.class(), ErrorClass::Incompatible, "{version:?}: {error}");
            for said in [vmferry::chain(&error), vmferry::chain(&told)] {
                assert!(said.contains(says), "{version:?}: {said}");
            }
            here.check_guest();
        }
    }
}

/// Devices that existed before are not a change.
#[test]
fn device_added_before_the_migration_is_moved() {
    let world = World::new();
    let monitor = world.path("second.qmp");
    let socket = format!("unix:{},server=on,wait=off", monitor.display());
    let machine = Machine::on_kvm(Version::V10_0, "hot=8,rate=40000")
        .with(&["-device", "pcie-root-port,id=spare,chassis=1"]);
    let mut here = machine.clone().with(&["-qmp", &socket]).start(&world, "here");
    here.check_guest();
    order(&monitor, ADD);
    let mut there =
        machine.with(&["-device", "virtio-rng-pci,id=odd,bus=spare"]).incoming(&world, "there");
    hop(&world, 1, &here, &there);
    there.check_guest();
}
