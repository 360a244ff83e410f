//! A device that writes guest memory on its own: one of 16 pages in turn, every 5 ms.
//!
//! It represents the devices of a VMM. KVM does not log their writes, so this device writes
//! through `vm-memory`, which marks the pages, and it is stopped before the last harvest. The
//! guest checks that the sequence number in each page never decreases.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_dirty::DirtyBitmap;

use crate::error::MachineError;
use crate::state::{SectionKind, StateReader, StateWriter};

/// The device's section of the machine state: the last sequence number, little-endian.
pub(crate) const SECTIONS: &[SectionKind] = &[HEARTBEAT];
const HEARTBEAT: SectionKind = SectionKind::mandatory("heartbeat", 1);

const PERIOD: Duration = Duration::from_millis(5);
/// Guest-physical address, as in the guest's `report.h`.
const FIRST_PAGE: u64 = 0x2_0000;
const PAGES: u64 = 16;

/// The device and its thread. Dropping it ends the thread.
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
    /// Creates the device, stopped.
    pub(crate) fn new(memory: Arc<GuestMemoryMmap<DirtyBitmap>>) -> Result<Self, MachineError> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), memory });
        let working = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("heartbeat".into())
            .spawn(move || working.work())
            .map_err(MachineError::Thread)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Lets the device write.
    pub(crate) fn resume(&self) {
        self.set_running(true);
    }

    /// Stops the device. It writes nothing after this call returns.
    pub(crate) fn pause(&self) {
        self.set_running(false);
    }

    fn set_running(&self, running: bool) {
        self.shared.state.lock().running = running;
        self.shared.changed.notify_all();
    }

    pub(crate) fn save(&self, out: &mut StateWriter) -> Result<(), MachineError> {
        let sequence = self.shared.state.lock().sequence;
        Ok(out.section(&HEARTBEAT, 0, &sequence.to_le_bytes())?)
    }

    pub(crate) fn load(&self, from: &StateReader<'_>) -> Result<(), MachineError> {
        let section = from.section(&HEARTBEAT, 0)?;
        let sequence: [u8; 8] = section
            .payload()
            .try_into()
            .map_err(|_| section.invalid("a sequence number has 8 bytes".into()))?;
        self.shared.state.lock().sequence = u64::from_le_bytes(sequence);
        Ok(())
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already stopped the device.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.state.lock();
        while !state.ended {
            if state.running {
                state.sequence += 1;
                // Under the lock, so that `pause` waits for the write.
                self.beat(state.sequence);
                let goes_on = |state: &mut State| state.running && !state.ended;
                self.changed.wait_while_for(&mut state, goes_on, PERIOD);
            } else {
                self.changed.wait(&mut state);
            }
        }
    }

    /// Writes sequence, hash, sequence in this order. The guest reads them in reverse order.
    fn beat(&self, sequence: u64) {
        let page = FIRST_PAGE + sequence % PAGES * 4096;
        for (index, word) in [sequence, mix(sequence ^ page), sequence].into_iter().enumerate() {
            // Every machine has these pages, so the write cannot fail.
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
