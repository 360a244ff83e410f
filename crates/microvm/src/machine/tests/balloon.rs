//! Machines with a balloon.

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::BALLOON_ADDRESS;

fn with_balloon(kind: GuestKind) -> MachineConfig {
    let mut config = config(kind, 1, WORKLOAD);
    config.guest.balloon = true;
    config
}

#[test]
fn process_guest_has_no_balloon() {
    let error = Machine::new(with_balloon(GuestKind::Process)).err().unwrap().to_string();
    assert!(error.starts_with("balloon: needs a guest on KVM"), "{error}");
    assert!(started(config(GuestKind::Process, 1, WORKLOAD)).balloon().is_none());
}

#[test]
fn balloon_state_moves_with_the_guest() {
    let mut machine = started(with_balloon(GuestKind::Kvm));
    let address: u64 = machine.mapped.read_obj(GuestAddress(0x6000 + 40)).unwrap();
    assert_eq!(address, BALLOON_ADDRESS, "the boot parameters have the device's address");
    let balloon = machine.balloon().unwrap();
    balloon.set_target(MIB).unwrap();
    assert!(balloon.start_hints().is_some(), "there is a driver");
    machine.pause().unwrap();
    let state = machine.save().unwrap();

    let mut without = Machine::new(config(GuestKind::Kvm, 1, WORKLOAD)).unwrap();
    let error = without.load(&state).unwrap_err().to_string();
    assert!(error.contains("\"balloon\""), "{error}");
    drop(without);

    let mut next = Machine::new(with_balloon(GuestKind::Kvm)).unwrap();
    copy(&machine.memory().populated().unwrap(), machine.memory(), next.memory());
    drop(machine);
    next.load(&state).unwrap();
    next.resume().unwrap();
    assert_eq!(check_all(&next).corruptions, 0);
    let status = next.balloon().unwrap().status();
    assert_eq!((status.target_bytes, status.driver), (MIB, true));
    // A handle may outlive its machine.
    drop(next);
    assert_eq!(balloon.status().target_bytes, MIB);
}
