//! Negative controls of the tests with KVM. A dirty log drops pages: one that the guest writes and
//! two that KVM writes. The guest detects each after its arrival, and `verify` detects it before
//! the handover.

use crate::support::migrate_source;
use vmferry::config::BandwidthCap;
use vmferry::{MigrateError, SourceVm};
use vmferry_doubles::{FilteredLog, SourceDouble};
use vmferry_memory::{PAGE_SIZE, PageRun, SlotId};
use vmferry_qemu::QemuSource;
use vmferry_qemu_lab::{Machine, Qemu, Version, World};

/// The guest's workload, and the address of the first page that it rewrites.
const WORKLOAD: &str = "fill=8,incompressible hot=8,rate=40000";
const HOT_ADDRESS: u64 = 24 << 20;

/// Slow, so that KVM writes its pages often after they were copied: it rewrites the whole clock
/// when the guest is continued, and an older clock then differs only in its version.
const SLOW: u64 = 8 << 20;

/// Moves a guest with a log that drops the page at this address.
fn move_without(
    world: &World,
    address: u64,
    here: &Qemu,
    there: &Qemu,
    verify: bool,
) -> Result<(), MigrateError> {
    let moved = migrate_source(world, 1, there, |config| {
        config.verify = verify;
        config.max_bandwidth = Some(BandwidthCap::new(SLOW).unwrap());
        let source = QemuSource::attach(&here.qmp).unwrap();
        let lost = PageRun { slot: SlotId(0), first: address / PAGE_SIZE as u64, pages: 1 };
        let log = FilteredLog::losing(source.dirty_log(), lost);
        SourceDouble::with_log(source, log)
    });
    moved.map(|(vm, _)| drop(vm.vm.quit().unwrap()))
}

#[test]
fn lost_pages_are_detected_by_the_guest() {
    let machine = Machine::on_kvm(Version::V10_0, WORKLOAD);
    for lost in ["hot", "clock_page", "steal_page"] {
        let world = World::new();
        let mut here = machine.start_booted(&world, "here");
        let said = here.check_guest();
        let address = if lost == "hot" { HOT_ADDRESS } else { said.get(lost) };
        let mut there = machine.incoming(&world, "there");
        move_without(&world, address, &here, &there, false).unwrap();
        let said = there.wait_for("finds damage", |said| said.get("corruptions") > 0);
        assert_eq!(said.get("first_gpa"), address, "{lost}: {said:?}");
    }
}

#[test]
fn lost_pages_are_detected_by_verify_and_the_guest_runs_on() {
    let machine = Machine::on_kvm(Version::V7_2, WORKLOAD);
    let world = World::new();
    let mut here = machine.start_booted(&world, "here");
    let steal_page = here.check_guest().get("steal_page");
    for (name, address) in [("hot", HOT_ADDRESS), ("steal", steal_page)] {
        let there = machine.incoming(&world, name);
        let error = move_without(&world, address, &here, &there, true).unwrap_err();
        assert!(matches!(error, MigrateError::VerifyMismatch { .. }), "{name}: {error}");
        here.check_guest();
    }
}
