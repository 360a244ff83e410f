//! Negative controls of the tests with KVM. A dirty log drops pages: one that the guest writes and
//! two that KVM writes. The guest detects each after its arrival, and `verify` detects it before
//! the handover.

use std::sync::Arc;
use std::time::Duration;

use crate::support::migrate_source;
use vmferry::config::BandwidthCap;
use vmferry::vmm::free_pages::FreePages;
use vmferry::{
    GuestDescription, HarvestGuard, MigrateError, Resume, SourceVm, StateEstimate, VmError,
};
use vmferry_dirty::{DirtyLog, DirtyLogError};
use vmferry_memory::{GuestBytes, GuestMemory, PAGE_SIZE, PageSet, SlotId};
use vmferry_qemu::QemuSource;
use vmferry_qemu_lab::{Machine, Qemu, Version, World};

/// A log that drops one page.
struct ForgetfulLog {
    log: Arc<dyn DirtyLog>,
    page: u64,
}

impl DirtyLog for ForgetfulLog {
    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        self.log.start()
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        self.log.collect(into)?;
        into.bitmap_mut(SlotId(0)).clear(self.page);
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.log.stop()
    }
}

/// A QEMU that is attached with such a log.
struct Forgetful {
    source: QemuSource,
    page: u64,
}

impl Resume for Forgetful {
    fn resume(&mut self) -> Result<(), VmError> {
        self.source.resume()
    }
}

impl SourceVm for Forgetful {
    fn describe(&self) -> GuestDescription {
        self.source.describe()
    }

    fn memory(&self) -> GuestMemory {
        self.source.memory()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        Arc::new(ForgetfulLog { log: self.source.dirty_log(), page: self.page })
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        self.source.pause()
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        self.source.save()
    }

    fn state_estimate(&self) -> StateEstimate {
        self.source.state_estimate()
    }

    fn begin_harvest(&mut self) -> Result<Box<dyn HarvestGuard + '_>, VmError> {
        self.source.begin_harvest()
    }

    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        self.source.free_pages()
    }
}

/// The guest's workload, and the address of the first page that it rewrites.
const WORKLOAD: &str = "fill=8,incompressible hot=8";
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
        let page = address / PAGE_SIZE as u64;
        Forgetful { source: QemuSource::attach(&here.qmp).unwrap(), page }
    });
    moved.map(|(vm, _)| drop(vm.source.quit().unwrap()))
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
