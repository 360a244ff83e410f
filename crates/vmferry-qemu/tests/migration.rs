//! Guests of real QEMUs, moved by the engine.

mod support;

use support::{Machine, Qemu, Version, World};
use vmferry::destination::{Received, Stop, receive};
use vmferry::source::{Orders, SourceOutcome, migrate};
use vmferry::stats::SourceStats;
use vmferry::{DestinationConfig, SourceConfig};
use vmferry_qemu::{QemuDestination, QemuSource};
use vmferry_transport::{Address, Dialer, Listener};

/// Moves a guest from one QEMU to another, and ends the first.
fn hop(world: &World, number: u32, from: &Qemu, to: &Qemu) -> SourceStats {
    let address = Address::Unix(world.path(&format!("link-{number}")));
    let listener = Listener::bind(&address, None).unwrap();
    let destination = QemuDestination::attach(&to.qmp).unwrap();
    let directory = world.path("there");
    let receiving = std::thread::spawn(move || {
        let mut config = DestinationConfig::new(directory);
        config.once = true;
        receive(listener, destination, &config, &Stop::default(), &mut |_| {})
    });
    let source = QemuSource::attach(&from.qmp).unwrap();
    let mut config = SourceConfig::new(world.path("here"));
    config.verify = true;
    let dialer = Dialer::new(address, None);
    let outcome = migrate(source, &dialer, config, &Orders::default(), &mut |_| {});
    let received = receiving.join().unwrap();
    let (vm, stats) = match outcome {
        SourceOutcome::Given { vm, stats } => (vm, stats),
        SourceOutcome::Kept { error, .. } => panic!("kept: {}", vmferry::chain(&error)),
    };
    let Received::Owns(owned) = received else { panic!("not received") };
    assert!(owned.crash.is_none(), "{:?}", owned.crash);
    vm.quit().unwrap();
    *stats
}

#[test]
fn a_linux_guest_that_writes_all_the_time_moves() {
    for version in Version::ALL {
        let world = World::new();
        let machine = Machine::new(version, "static=40 dirty=10");
        let mut here = machine.start(&world, "here", &[]);
        here.check_guest();
        let mut there = machine.incoming(&world, "there");
        let stats = hop(&world, 0, &here, &there);
        println!("{version:?} {stats:#?}");
        assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
        here.child.wait().unwrap();
        there.check_guest();
    }
}
