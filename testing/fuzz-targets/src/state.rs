//! Any bytes, read as the saved state of a machine.

use std::cell::RefCell;

use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::MemoryKind;
use vmferry_microvm::config::GuestConfig;
use vmferry_microvm::kvm::check_sections;
use vmferry_microvm::state::StateReader;
use vmferry_microvm::{GuestKind, Machine, MachineConfig};
use vmferry_wire::{GuestIdentity, table_checksum};

use super::input::Input;

/// The sizes of a container's header and of a section's header.
const HEADS: [usize; 2] = [20, 44];
const MOST_SECTIONS: usize = 400;

/// With an odd first byte the checksums are corrected, wherever the lengths point, so that the code
/// after the checksum tests is reached.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let sealed = !input.byte().is_multiple_of(2);
    let mut state = input.0.to_vec();
    if sealed {
        seal(&mut state);
    }
    let Ok(reader) = StateReader::parse(&state) else {
        assert!(!load(&state), "a refused container was loaded");
        return;
    };
    let known = reader.sections().iter().map(|section| section.payload().len()).sum::<usize>();
    assert!(known <= state.len());
    for vcpus in [1, 2] {
        if let Err(error) = check_sections(&reader, vcpus) {
            assert!(!error.to_string().is_empty());
        }
    }
    load(&state);
}

/// Corrects the checksums of the header, of the sections' headers and of their payloads.
fn seal(state: &mut [u8]) {
    let [head, section_head] = HEADS;
    if state.len() < head {
        return;
    }
    put(state, 0, head - 4);
    let mut at = head;
    for _ in 0..MOST_SECTIONS {
        let Some(bytes) = state.get(at..at + section_head) else { return };
        let length = u32::from_le_bytes(bytes[32..36].try_into().unwrap()) as usize;
        let payload = at + section_head;
        if let Some(payload) = state.get(payload..payload.saturating_add(length)) {
            let sum = table_checksum(payload).to_le_bytes();
            state[at + 36..at + 40].copy_from_slice(&sum);
        }
        put(state, at, at + 40);
        at = payload.saturating_add(length);
    }
}

/// Writes the CRC-32C of `from..to` after it.
fn put(state: &mut [u8], from: usize, to: usize) {
    let sum = table_checksum(&state[from..to]).to_le_bytes();
    state[to..to + 4].copy_from_slice(&sum);
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

/// Loads the state into a machine whose vCPUs are threads, as one on KVM would. Returns whether it
/// was loaded.
fn load(state: &[u8]) -> bool {
    MACHINE.with(|place| {
        let mut machine = place.take().unwrap_or_else(machine);
        let loaded = machine.load(state);
        if let Err(error) = &loaded {
            assert!(!error.to_string().is_empty());
            // A refused state must not affect the next one.
            place.replace(Some(machine));
        }
        loaded.is_ok()
    })
}

fn machine() -> Machine {
    let config = MachineConfig {
        identity: GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "fuzz".into() },
        guest: GuestConfig {
            memory_bytes: 32 << 20,
            vcpus: 1,
            command_line: "idle".into(),
            balloon: false,
        },
        kind: GuestKind::Process,
        memory_kind: MemoryKind::Private,
        dirty_log: LogChoice::Userfaultfd,
        device_log: SoftwareWay::default(),
    };
    Machine::new(config).expect("a machine of threads needs nothing")
}
