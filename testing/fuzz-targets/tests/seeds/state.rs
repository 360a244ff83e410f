//! Runs the seeds of the fuzz target of saved states.

use super::replay;
use vmferry_fuzz_targets::state;

use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::MemoryKind;
use vmferry_microvm::config::GuestConfig;
use vmferry_microvm::state::{StateReader, StateWriter};
use vmferry_microvm::{GuestKind, Machine, MachineConfig};
use vmferry_wire::GuestIdentity;

#[test]
fn seeds_are_handled() {
    replay::every_seed("state", state::run);
}

#[test]
fn cut_and_damaged_seeds_are_handled() {
    replay::every_seed_cut_and_damaged("state", state::run, 60);
}

/// The seeds take the fuzzer past the container's checks.
#[test]
fn seeds_are_valid_states() {
    for (path, seed) in replay::in_the_tree("state") {
        assert!(StateReader::parse(&seed[1..]).is_ok(), "{path}");
    }
}

/// The state of a machine of this kind that has run.
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
    machine.save().unwrap().to_vec()
}

/// The machines with seeds: name, kind, vCPUs, and whether it has a balloon.
const MACHINES: [(&str, GuestKind, u8, bool); 5] = [
    ("process", GuestKind::Process, 1, false),
    ("process-two", GuestKind::Process, 2, false),
    ("kvm", GuestKind::Kvm, 1, false),
    ("kvm-balloon", GuestKind::Kvm, 1, true),
    ("kvm-two", GuestKind::Kvm, 2, false),
];

/// The saved states differ between runs and, on KVM, between processors. So only the names of the
/// seeds are compared, and for machines that need no KVM also their sections.
#[test]
fn seeds_are_in_the_tree() {
    let made = seeds(|kind, vcpus, balloon| match kind {
        GuestKind::Kvm | GuestKind::Auto => Vec::new(),
        GuestKind::Process => saved(kind, vcpus, balloon),
    });
    for (name, seed) in made.iter().filter(|(name, _)| name.starts_with("process")) {
        let path = replay::corpus("state").join(name);
        let tree = std::fs::read(&path).unwrap();
        assert_eq!(sections(seed), sections(&tree), "{}", path.display());
    }
    replay::are_in_the_tree("state", made, |name| !name.starts_with("empty"));
}

/// Each section's name, version and length.
fn sections(seed: &[u8]) -> Vec<(String, u16, usize)> {
    let reader = StateReader::parse(&seed[1..]).unwrap();
    let sections = reader.sections().iter();
    let of = |name: &str, version, payload: &[u8]| (name.to_owned(), version, payload.len());
    sections.map(|one| of(one.name(), one.version(), one.payload())).collect()
}

/// Run `cargo test -p vmferry-fuzz-targets -- --ignored` on a host with /dev/kvm after a change of
/// the format.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    replay::write("state", seeds(saved));
}

/// A state of each machine and an empty one, both unchanged and with corrected checksums.
fn seeds(state: impl Fn(GuestKind, u8, bool) -> Vec<u8>) -> Vec<(String, Vec<u8>)> {
    let machines = MACHINES.map(|(name, kind, vcpus, balloon)| (name, state(kind, vcpus, balloon)));
    let empty = ("empty", StateWriter::new().finish().to_vec());
    let states = machines.into_iter().chain([empty]);
    let ways = |(name, state): (&str, Vec<u8>)| {
        ["as-it-is", "sealed"]
            .iter()
            .zip(0_u8..)
            .map(|(way, sealed)| (format!("{name}-{way}"), [&[sealed][..], &state].concat()))
            .collect::<Vec<_>>()
    };
    states.flat_map(ways).collect()
}
