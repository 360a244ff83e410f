//! Device state that QEMU has saved is not in a core dump of the process that moves the guest.

#[path = "../../memory/tests/dumps/mod.rs"]
mod dumps;

use std::path::Path;

use dumps::{hold, is_as_protected, order};
use vmferry::SourceVm;
use vmferry_qemu::QemuSource;
use vmferry_qemu_lab::{Machine, Version, World};

/// The first bytes of a QEMU's state: magic number and version (QEMU
/// `migration/qemu-file-types.h`).
const BEGIN: &[u8] = b"QEVM\0\0\0\x03";

#[test]
fn state_of_a_qemu_is_in_no_core_dump() {
    // A QEMU that has saved its state can't be used after that.
    for undone in [false, true] {
        let world = World::new();
        let machine = Machine::on_kvm(Version::V10_0, "hot=8,rate=40000");
        let qemu = machine.start(&world, "qemu");
        is_as_protected(qemu.qmp.to_str().unwrap(), undone, &[BEGIN.to_vec()], |_| ());
    }
}

/// The process that the test above crashes; not a test of its own.
#[test]
fn child_process_of_the_test() {
    let Some((qmp, undone)) = order() else { return };
    let mut source = QemuSource::attach(Path::new(&qmp)).unwrap();
    source.pause().unwrap();
    let state = source.save().unwrap();
    assert!(state.starts_with(BEGIN));
    hold(undone);
}
