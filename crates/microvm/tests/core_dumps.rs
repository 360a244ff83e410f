//! No core dump contains the state of a machine. The test lets a VMM crash after it has loaded and
//! saved a state, and searches its core dump.

#[path = "../../memory/tests/dumps/mod.rs"]
mod dumps;

use dumps::{PATTERN, are_kept_out, fill, hold, order, patterns};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::{GuestBytes, MemoryKind};
use vmferry_microvm::config::GuestConfig;
use vmferry_microvm::state::{SectionKind, StateReader, StateWriter};
use vmferry_microvm::{GuestKind, Machine, MachineConfig};
use vmferry_wire::GuestIdentity;

/// The vCPU's vector registers, which may contain the guest's keys.
const XSAVE: &str = "vcpu.xsave";

/// XMM0 to XMM15 in the legacy region of XSAVE (Intel SDM, volume 1, 13.4.1).
const XMM: std::ops::Range<usize> = 160..416;

/// XSTATE_BV, the bitmap of the components in use, and its bit for XMM (13.4.2).
const XSTATE_BV: usize = 512;
const SSE: u8 = 2;

const PATTERNS: usize = (XMM.end - XMM.start) / PATTERN;

#[test]
fn core_dump_has_no_vector_registers() {
    are_kept_out("xsave", &patterns(PATTERNS as u64), |_| ());
}

/// Not a test: the process that the test above lets crash.
#[test]
fn child_process_of_the_test() {
    let Some((_, undone)) = order() else { return };
    let mut first = machine();
    first.start().unwrap();
    first.pause().unwrap();
    let state = with_patterns(&first.save().unwrap());
    drop(first);
    let mut second = machine();
    second.load(&state).unwrap();
    drop(state);
    let saved = second.save().unwrap();
    let reader = StateReader::parse(&saved).unwrap();
    let arrived = reader.sections().iter().find(|section| section.name() == XSAVE).unwrap();
    let is_there = |number| {
        let mut expected = GuestBytes::zeroed(PATTERN).unwrap();
        fill(number as u64, &mut expected);
        arrived.payload()[XMM][number * PATTERN..].starts_with(&expected)
    };
    assert!((0..PATTERNS).all(is_there), "KVM has other vector registers");
    hold(undone);
}

fn machine() -> Machine {
    let guest = GuestConfig {
        memory_bytes: 32 << 20,
        vcpus: 1,
        command_line: "idle".into(),
        balloon: false,
    };
    Machine::new(MachineConfig {
        identity: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "core".into() },
        guest,
        kind: GuestKind::Kvm,
        memory_kind: MemoryKind::Private,
        dirty_log: LogChoice::Auto,
        device_log: SoftwareWay::default(),
    })
    .expect("this test needs /dev/kvm")
}

/// A copy of the state with patterns in the vector registers.
fn with_patterns(state: &[u8]) -> GuestBytes {
    let mut out = StateWriter::new();
    for section in StateReader::parse(state).unwrap().sections() {
        let mut payload = GuestBytes::from(section.payload());
        if section.name() == XSAVE {
            payload[XSTATE_BV] |= SSE;
            for (number, at) in XMM.step_by(PATTERN).enumerate() {
                fill(number as u64, &mut payload[at..]);
            }
        }
        let name: &'static str = section.name().to_owned().leak();
        let kind = SectionKind::mandatory(name, section.version());
        out.section(&kind, section.instance(), &payload).unwrap();
    }
    out.finish()
}
