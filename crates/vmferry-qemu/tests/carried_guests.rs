//! Guests of real QEMUs that can't be attached, carried by the engine.

mod support;

use support::carry;
use vmferry_qemu_lab::{Backend, Machine, Version, World};

/// Carries a guest from QEMU to QEMU, there and back, and looks after it on each.
fn travel(machine: &Machine, channels: u8, hops: u32) {
    let world = World::new();
    let mut here = machine.start(&world, "qemu-0");
    here.check_guest();
    for number in 1..=hops {
        let there = machine.incoming(&world, &format!("qemu-{number}"));
        let stats = carry(&world, number, &here, &there, channels, |config| {
            if std::env::var_os("OFF").is_some() {
                config.compression.way = vmferry::compression::CompressionWay::Off;
            }
        })
        .unwrap();
        assert_eq!(stats.digest_match, Some(true));
        assert!(stats.rounds.len() >= 2 && stats.encoded.content() > 1000, "{stats:?}");
        here.child.wait().unwrap();
        here = there;
        here.check_guest();
    }
}

#[test]
fn linux_guests_are_carried_from_qemu_to_qemu() {
    for version in [Version::V10_0; 6] {
        for channels in [2] {
            let machine =
                Machine { backend: Backend::Private, ..Machine::new(version, "dirty=20") };
            println!("{version:?} {channels}");
            travel(&machine, channels, 5);
        }
    }
}
