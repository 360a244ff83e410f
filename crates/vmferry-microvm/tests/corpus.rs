//! The seeds of the fuzz target of saved states through the same function.

#[path = "../../../fuzz/harness/input.rs"]
#[allow(dead_code, reason = "the target uses a part of it")]
mod input;
#[path = "../../../fuzz/harness/replay.rs"]
mod replay;
#[path = "../../../fuzz/harness/state.rs"]
mod state;

use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::MemoryKind;
use vmferry_microvm::config::GuestConfig;
use vmferry_microvm::state::{StateReader, StateWriter};
use vmferry_microvm::{GuestKind, Machine, MachineConfig};
use vmferry_wire::GuestIdentity;

#[test]
fn every_seed_is_handled() {
    replay::every_seed("state", state::run);
}

#[test]
fn every_seed_cut_and_damaged_is_handled() {
    replay::every_seed_cut_and_damaged("state", state::run, 60);
}

/// The fuzzer begins behind the container, not before it.
#[test]
fn the_seeds_are_states() {
    for (path, seed) in replay::in_the_tree("state") {
        assert!(StateReader::parse(&seed[1..]).is_ok(), "{path}");
    }
}

/// The state of a machine of its kind that has run.
fn saved(kind: GuestKind, vcpus: u8, balloon: bool) -> Vec<u8> {
    let mut machine = Machine::new(MachineConfig {
        identity: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "seed".into() },
        guest: GuestConfig { memory_bytes: 32 << 20, vcpus, command_line: "idle".into(), balloon },
        kind,
        memory_kind: MemoryKind::Private,
        dirty_log: LogChoice::Auto,
        device_log: SoftwareWay::default(),
    })
    .unwrap();
    machine.start().unwrap();
    machine.pause().unwrap();
    machine.save().unwrap()
}

/// `cargo test -p vmferry-microvm --test corpus -- --ignored`, where there is /dev/kvm, after a change of the format.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    let mut seeds = Vec::new();
    for (name, state) in [
        ("process", saved(GuestKind::Process, 1, false)),
        ("kvm", saved(GuestKind::Kvm, 1, false)),
        ("kvm-balloon", saved(GuestKind::Kvm, 1, true)),
        ("kvm-two", saved(GuestKind::Kvm, 2, false)),
        ("empty", StateWriter::new().finish()),
    ] {
        for sealed in [0, 1] {
            let seed = [&[sealed][..], &state].concat();
            seeds.push((format!("{name}-{}", ["as-it-is", "sealed"][usize::from(sealed)]), seed));
        }
    }
    replay::write("state", seeds);
}
