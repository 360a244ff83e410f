//! The guests that are carried.

use crate::support::all;
use std::path::Path;
use std::time::Duration;

use vmferry_qemu::{Qmp, Settings};
use vmferry_qemu_lab::{Backend, Machine, Qemu, Version, World};

/// The downtime limit.
pub const DOWNTIME: Duration = Duration::from_millis(300);

/// Channels in addition to the main stream.
pub const CHANNELS: [u8; 2] = [0, 2];

/// A guest with private memory, video memory and a disk. vmferry pauses a guest of 7.2 while it is
/// carried.
pub fn machine(world: &World, version: Version) -> Machine {
    let disk = world.path("disk.raw");
    if !disk.exists() {
        world.disk(96);
    }
    let drive = format!("if=none,id=disk,format=raw,file={}", disk.display());
    let workload = "static=40 dirty=20 disk=16";
    let backend = Backend::Private;
    let private = Machine { backend, ..Machine::new(version, workload) };
    private.with(&["-device", "VGA", "-drive", &drive, "-device", "virtio-blk-pci,drive=disk"])
}

/// Each version with each number of channels, or a sample in which each version and each number
/// occurs once.
pub fn cases() -> Vec<(Version, u8)> {
    if all() {
        let with_each = |version| CHANNELS.map(|channels| (version, channels));
        return Version::ALL.into_iter().flat_map(with_each).collect();
    }
    Version::ALL.into_iter().zip(CHANNELS).collect()
}

/// Starts such a guest for each of the cases, checks it, and runs a test on it.
pub fn each(test: impl Fn(&World, &Machine, Qemu, u8)) {
    for (version, channels) in cases() {
        println!("{version:?} with {channels} channels");
        let world = World::new();
        let machine = machine(&world, version);
        let mut here = machine.start(&world, "here");
        check(&mut here);
        test(&world, &machine, here, channels);
    }
}

/// Waits until the guest has checked all of its memory and its disk once more.
pub fn check(qemu: &mut Qemu) {
    let before = qemu.check_guest().get("disk_rounds");
    let said = qemu.wait_for("uses its disk", |said| said.get("disk_rounds") > before);
    assert_eq!((said.get("disk_errors"), said.get("corruptions")), (0, 0), "{said:?}");
}

/// The settings of QEMU's own migration.
pub fn settings(qmp: &Path) -> Settings {
    Settings::read(&mut Qmp::connect(qmp).unwrap()).unwrap()
}
