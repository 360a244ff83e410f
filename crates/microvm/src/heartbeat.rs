//! A device that writes guest memory by itself: the next of 16 pages every 5 ms.
//!
//! It stands for all devices of a VMM. KVM does not log its writes, so it writes through
//! `vm-memory`, which marks them, and it must be quiet before the last harvest. The guest checks
//! that none of its pages ever goes back.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_dirty::DirtyBitmap;

use crate::error::MachineError;
use crate::state::{SectionKind, StateReader, StateWriter};

/// The device's section of the machine's state: the last sequence number, little-endian.
pub(crate) const SECTIONS: &[SectionKind] = &[HEARTBEAT];
const HEARTBEAT: SectionKind = SectionKind::mandatory("heartbeat", 1);

const PERIOD: Duration = Duration::from_millis(5);
/// As in the guest's `report.h`.
const FIRST_PAGE: u64 = 0x2_0000;
const PAGES: u64 = 16;

/// The device.
pub(crate) struct Heartbeat {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    memory: Arc<GuestMemoryMmap<DirtyBitmap>>,
}

#[derive(Clone, Copy, Default)]
struct State {
    running: bool,
    ended: bool,
    sequence: u64,
}

impl Heartbeat {
    /// The device, quiet.
    pub(crate) fn new(memory: Arc<GuestMemoryMmap<DirtyBitmap>>) -> Result<Self, MachineError> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), memory });
        let working = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("heartbeat".into())
            .spawn(move || working.work())
            .map_err(MachineError::Thread)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Lets it write, or makes it quiet: on return from `run(false)` it writes nothing more.
    pub(crate) fn run(&self, running: bool) {
        self.shared.state().running = running;
        self.shared.changed.notify_all();
    }

    pub(crate) fn save(&self, out: &mut StateWriter) -> Result<(), MachineError> {
        let sequence = self.shared.state().sequence;
        Ok(out.section(&HEARTBEAT, 0, &sequence.to_le_bytes())?)
    }

    pub(crate) fn load(&self, from: &StateReader<'_>) -> Result<(), MachineError> {
        let section = from.section(&HEARTBEAT, 0)?;
        let sequence: [u8; 8] = section
            .payload()
            .try_into()
            .map_err(|_| section.invalid("a sequence number has 8 bytes".into()))?;
        self.shared.state().sequence = u64::from_le_bytes(sequence);
        Ok(())
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.shared.state().ended = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic there has stopped the device already.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.state();
        while !state.ended {
            if state.running {
                state.sequence += 1;
                // Under the lock, so that whoever makes it quiet waits for the write.
                self.beat(state.sequence);
                state = self
                    .changed
                    .wait_timeout_while(state, PERIOD, |state| state.running && !state.ended)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Sequence, hash, sequence, in this order: the guest reads them backwards.
    fn beat(&self, sequence: u64) {
        let page = FIRST_PAGE + sequence % PAGES * 4096;
        for (index, word) in [sequence, mix(sequence ^ page), sequence].into_iter().enumerate() {
            // The machine has these pages whatever its memory is.
            let _ = self.memory.write_obj(word, GuestAddress(page + 8 * index as u64));
        }
    }
}

/// The guest's hash (`mix` in `workload.c`).
pub(crate) fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
