//! Guests of real QEMUs that can't be attached, and are carried by the engine.

use crate::support::{all, carry, versions};
use vmferry_qemu_lab::{Backend, Machine, Qemu, World};

/// Waits until the guest has checked all its memory, and its disk if it has one, without an error.
fn check(qemu: &mut Qemu) {
    let before = qemu.check_guest().get("disk_rounds");
    if before > 0 {
        let said = qemu.wait_for("uses its disk", |said| said.get("disk_rounds") > before + 1);
        assert_eq!((said.get("disk_errors"), said.get("corruptions")), (0, 0), "{said:?}");
    }
}

/// Carries a guest from QEMU to QEMU, and checks it on each. Every second hop uses `multifd`.
fn travel(world: &World, machine: &Machine, hops: u32) {
    let mut here = machine.start(world, "qemu-0");
    check(&mut here);
    for number in 1..=hops {
        let there = machine.incoming(world, &format!("qemu-{number}"));
        let channels = if number % 2 == 1 { 2 } else { 0 };
        let stats = carry(world, number, &here, &there, channels, |_| {}).unwrap();
        assert_eq!(stats.digest_match, Some(true));
        assert!(stats.rounds.len() >= 2 && stats.encoded.content() > 1000, "{stats:?}");
        assert_eq!(stats.channels, 1 + channels);
        here.child.wait().unwrap();
        here = there;
        check(&mut here);
    }
}

/// With a disk on storage that both hosts can access, and video memory.
fn with_devices(machine: Machine, world: &World) -> Machine {
    let drive = format!("if=none,id=disk,format=raw,file={}", world.disk(96).display());
    machine.with(&["-device", "VGA", "-drive", &drive, "-device", "virtio-blk-pci,drive=disk"])
}

/// There and back, three times in the long run.
#[test]
fn linux_guests_are_carried_from_qemu_to_qemu_by_the_engine() {
    let hops = if all() { 6 } else { 2 };
    for &version in versions() {
        let of = |backend, workload: &str| Machine { backend, ..Machine::new(version, workload) };
        let world = World::new();
        let machine = of(Backend::Private, "static=40 dirty=20 disk=16");
        println!("{version:?}: private memory, video memory and a disk");
        travel(&world, &with_devices(machine, &world), hops);
        if !all() {
            continue;
        }
        for machine in [
            of(Backend::Memfd, "static=60 dirty=20"),
            Machine { mib: 512, vcpus: 2, ..of(Backend::Private, "dirty=100") },
            // This guest is paused for the whole migration, as all are with 7.2.
            Machine { kind: "pc", ..of(Backend::TwoNodes, "static=40 dirty=20") },
            Machine { mib: 4096, ..of(Backend::Private, "dirty=10") },
        ] {
            println!("{machine:?}");
            travel(&World::new(), &machine, hops);
        }
    }
}
