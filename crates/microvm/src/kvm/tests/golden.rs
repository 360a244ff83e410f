//! The state of a guest on KVM as a host of another release sends it.
//!
//! `golden/kvm.state` was saved by this VMM and is never changed. A section whose content changes
//! gets a new version (`SectionKind::since`) and another golden file.

use super::super::vcpu_state::{KvmFeatures, VcpuState};
use super::super::vm_state::VmState;
use super::super::{devices, ioctl};
use super::*;
use crate::state::Section;

/// A guest with one vCPU, paused between two ticks.
const GOLDEN: &[u8] = include_bytes!("golden/kvm.state");

/// The sections that depend on the processor. Guests move between hosts with equal processors.
const PROCESSORS: [&str; 4] = ["vcpu.cpuid", "vcpu.tsc_khz", "vcpu.msrs", "vcpu.xsave"];

/// The features of a host that can load the golden state.
fn features() -> KvmFeatures {
    KvmFeatures { sregs2: true, xsave_bytes: ioctl::XSAVE_BYTES, msrs: Vec::new() }
}

/// Reads a state and writes it again.
fn again(state: &[u8]) -> Vec<u8> {
    let reader = StateReader::parse(state).unwrap();
    reader.refuse_unknown(KvmBackend::sections()).unwrap();
    let mut has = features();
    has.xsave_bytes = has.xsave_bytes.max(of(&reader, "vcpu.xsave").payload().len());
    let mut out = StateWriter::new();
    VcpuState::read(0, &reader, &has).unwrap().write(0, &mut out).unwrap();
    VmState::read(&reader).unwrap().write(&mut out).unwrap();
    devices::write_serial(&devices::read_serial(&reader).unwrap(), &mut out).unwrap();
    out.finish().to_vec()
}

fn of<'a>(reader: &StateReader<'a>, name: &str) -> Section<'a> {
    *reader.sections().iter().find(|section| section.name() == name).expect(name)
}

/// A copy of a state in which `other` replaces some sections.
fn with(state: &[u8], other: impl Fn(&Section<'_>) -> Option<(&'static str, Vec<u8>)>) -> Vec<u8> {
    let mut out = StateWriter::new();
    for section in StateReader::parse(state).unwrap().sections() {
        let (name, payload) = other(section)
            .unwrap_or_else(|| (kind(section.name()).name, section.payload().to_vec()));
        out.section(kind(name), section.instance(), &payload).unwrap();
    }
    out.finish().to_vec()
}

fn kind(name: &str) -> &'static crate::state::SectionKind {
    kinds().find(|kind| kind.name == name).expect(name)
}

/// If this fails, the content of a section has changed: raise its version, and keep writing the
/// previous version for older hosts.
#[test]
fn sections_match_their_golden_state() {
    assert!(again(GOLDEN) == GOLDEN, "another layout under the same version");
    let reader = StateReader::parse(GOLDEN).unwrap();
    for kind in kinds().filter(|kind| kind.name != "vcpu.sregs") {
        assert_eq!(of(&reader, kind.name).version(), kind.version, "{}", kind.name);
    }
    // A changed byte must appear in the output, so no byte is ignored.
    for section in reader.sections() {
        let at = section.payload().len() / 2;
        let changed = with(GOLDEN, |one| {
            let mut payload = one.payload().to_vec();
            let is_it = (one.name(), one.instance()) == (section.name(), section.instance());
            // A byte in the middle of the payload: a chip's number comes first, and the section
            // gives the length of a list.
            payload.get_mut(at).filter(|_| is_it).map(|byte| *byte ^= 1)?;
            Some((kind(one.name()).name, payload))
        });
        assert!(again(&changed) == changed && changed != GOLDEN, "{}", section.name());
    }
}

/// A host whose KVM is older sends the older form of the system registers.
#[test]
fn old_system_registers_are_read() {
    let bytes = size_of::<kvm_bindings::kvm_sregs>();
    let old = with(GOLDEN, |section| {
        (section.name() == "vcpu.sregs2")
            .then(|| ("vcpu.sregs", (0..bytes).map(|i| i as u8).collect()))
    });
    assert!(again(&old) == old);
}

#[test]
fn machine_loads_the_golden_state() {
    need_kvm();
    let mut guest = Guest::new(1);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.pause().unwrap();
    let here = guest.save();
    let reader = StateReader::parse(&here).unwrap();
    if !reader.sections().iter().any(|section| section.name() == "vcpu.sregs2") {
        panic!("this test needs KVM_SET_SREGS2");
    }
    let golden = with(GOLDEN, |section| {
        let processor = PROCESSORS.contains(&section.name());
        processor
            .then(|| (kind(section.name()).name, of(&reader, section.name()).payload().to_vec()))
    });
    let mut next = Guest::new(1);
    next.load(&golden).unwrap();
    assert_eq!(differences(&golden, &next.save()), Vec::<String>::new());
}

/// Writes the file again, for a new kind of machine:
/// `cargo test -p vmferry-microvm -- --ignored write_the_golden_state`.
#[test]
#[ignore = "it writes into the source tree"]
fn write_the_golden_state() {
    let mut guest = Guest::new(1);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.pause().unwrap();
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kvm/tests/golden/kvm.state");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, guest.save()).unwrap();
}
