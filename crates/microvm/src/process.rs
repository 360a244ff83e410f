//! A guest without KVM: threads of this process run the guest's workload (the same C code) on its
//! memory.
//!
//! Why `unsafe`: the workload is C and writes guest memory by address. Why it is sound: the
//! workload gets the mappings of a `GuestMemoryMmap` that the threads keep alive, and it accesses
//! nothing outside them, whatever the guest memory contains (a migrated one comes from another
//! host). It has no state outside guest memory. Rust holds no references into guest memory.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
};
use vmferry_dirty::{DirtyBitmap, LogChoice, UffdLog};
use vmferry_memory::GuestMemory;

use crate::backend::{Backend, BackendLog};
use crate::error::MachineError;
use crate::kvm::{DISPLAY, HIGH_RAM, STILL};
use crate::pace::Pace;
use crate::state::{SectionKind, StateReader, StateWriter};

const PROCESS: SectionKind = SectionKind::mandatory("process", 1);
const SECTIONS: &[SectionKind] = &[PROCESS];

/// Guest-physical address of the command line, as in the KVM guest.
const COMMAND_LINE_ADDRESS: u64 = 0x7000;

/// `struct guest_view` of `workload.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct GuestView {
    low_base: u64,
    high_base: u64,
    low_bytes: u64,
    high_bytes: u64,
    display_base: u64,
    still_base: u64,
}

impl GuestView {
    /// The mappings of `memory`. They are valid as long as it lives.
    fn of(memory: &GuestMemoryMmap<DirtyBitmap>) -> Self {
        let mut view = Self::default();
        for region in memory.iter() {
            let (base, bytes) = (region.as_ptr() as u64, region.len());
            match region.start_addr().raw_value() {
                DISPLAY => view.display_base = base,
                STILL => view.still_base = base,
                gpa if gpa < HIGH_RAM => (view.low_base, view.low_bytes) = (base, bytes),
                _ => (view.high_base, view.high_bytes) = (base, bytes),
            }
        }
        view
    }
}

unsafe extern "C" {
    fn workload_init(view: *const GuestView, vcpus: u32);
    fn workload_step(view: *const GuestView, vcpu: u32, ticks: u64) -> i32;
}

/// Threads that act as the vCPUs. Dropping it ends them.
pub(crate) struct ProcessBackend {
    shared: Arc<Shared>,
    vcpus: u32,
    command_line: String,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    view: GuestView,
    memory: Arc<GuestMemoryMmap<DirtyBitmap>>,
}

#[derive(Default)]
struct State {
    running: bool,
    ended: bool,
    /// Number of threads that may be accessing guest memory.
    active: u32,
    /// The throttle, if any.
    pace: Option<Pace>,
    /// Ticks up to the last pause.
    ticks: u64,
    /// When the guest was resumed. `None` while it is paused.
    resumed: Option<Instant>,
}

impl State {
    fn ticks_now(&self) -> u64 {
        let since = self.resumed.map_or(Duration::ZERO, |resumed| resumed.elapsed());
        self.ticks + since.as_millis() as u64
    }
}

impl ProcessBackend {
    /// Starts the threads, paused.
    pub(crate) fn new(
        vcpus: u8,
        command_line: &str,
        memory: Arc<GuestMemoryMmap<DirtyBitmap>>,
    ) -> Result<Self, MachineError> {
        let view = GuestView::of(&memory);
        let shared =
            Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), view, memory });
        let mut backend = Self {
            shared,
            vcpus: vcpus.into(),
            command_line: command_line.to_owned(),
            threads: Vec::new(),
        };
        for vcpu in 0..backend.vcpus {
            let shared = Arc::clone(&backend.shared);
            let thread = std::thread::Builder::new()
                .name(format!("vcpu{vcpu}"))
                .spawn(move || shared.run(vcpu))
                .map_err(MachineError::Thread)?;
            backend.threads.push(thread);
        }
        Ok(backend)
    }
}

impl Drop for ProcessBackend {
    fn drop(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of the thread has already ended that vCPU.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self, vcpu: u32) {
        let mut state = self.state.lock();
        let (mut rested, mut pace) = (Instant::now(), None);
        while !state.ended {
            if !state.running {
                self.changed.wait(&mut state);
                rested = Instant::now();
                continue;
            }
            if state.pace != pace {
                (rested, pace) = (Instant::now(), state.pace);
            }
            if let Some(pace) = pace {
                let ran = rested.elapsed();
                if ran >= pace.slice() {
                    self.rest(&mut state, pace, ran);
                    rested = Instant::now();
                    continue;
                }
            }
            state.active += 1;
            let ticks = state.ticks_now();
            drop(state);
            let idle = self.step(vcpu, ticks);
            state = self.state.lock();
            state.active -= 1;
            if !state.running {
                self.changed.notify_all();
            } else if idle {
                // There is no work before the next tick.
                let goes_on = |state: &mut State| state.running && !state.ended;
                self.changed.wait_while_for(&mut state, goes_on, Duration::from_millis(1));
            }
        }
    }

    /// Rests a throttled vCPU that has run for `ran`. Returns early if the vCPU's orders change.
    fn rest(&self, state: &mut MutexGuard<'_, State>, pace: Pace, ran: Duration) {
        let goes_on = |state: &mut State| state.running && !state.ended && state.pace == Some(pace);
        self.changed.wait_while_for(state, goes_on, pace.rest_after(ran));
    }

    fn step(&self, vcpu: u32, ticks: u64) -> bool {
        // SAFETY: The view names the mappings of `self.memory`, which lives as long as `self`. The
        // workload stays within them, and only this thread writes this vCPU's pages.
        unsafe { workload_step(&raw const self.view, vcpu, ticks) != 0 }
    }
}

impl Backend for ProcessBackend {
    fn kind(&self) -> &'static str {
        "process"
    }

    fn start(&mut self) -> Result<(), MachineError> {
        let mut line = self.command_line.clone().into_bytes();
        line.push(0);
        self.shared.memory.write_slice(&line, GuestAddress(COMMAND_LINE_ADDRESS)).map_err(
            |error| MachineError::Config { setting: "memory", reason: error.to_string() },
        )?;
        // SAFETY: As in `step`. No thread accesses guest memory yet.
        unsafe { workload_init(&raw const self.shared.view, self.vcpus) };
        self.resume()
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        let mut state = self.shared.state.lock();
        state.ticks = state.ticks_now();
        state.resumed = None;
        state.running = false;
        self.shared.changed.notify_all();
        while state.active > 0 {
            self.shared.changed.wait(&mut state);
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), MachineError> {
        let mut state = self.shared.state.lock();
        state.resumed.get_or_insert_with(Instant::now);
        state.running = true;
        self.shared.changed.notify_all();
        Ok(())
    }

    fn throttle(&mut self, pace: Option<Pace>) -> Result<(), MachineError> {
        self.shared.state.lock().pace = pace;
        self.shared.changed.notify_all();
        Ok(())
    }

    fn save(&mut self, out: &mut StateWriter) -> Result<(), MachineError> {
        let mut bytes = self.vcpus.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.shared.state.lock().ticks.to_le_bytes());
        Ok(out.section(&PROCESS, 0, &bytes)?)
    }

    fn load(&mut self, from: &StateReader<'_>) -> Result<(), MachineError> {
        let section = from.section(&PROCESS, 0)?;
        let Some((vcpus, ticks)) = section.payload().split_first_chunk::<4>() else {
            return Err(section.invalid("the section is too short".into()).into());
        };
        let Ok(ticks) = <[u8; 8]>::try_from(ticks) else {
            return Err(section.invalid("the tick count must have 8 bytes".into()).into());
        };
        if u32::from_le_bytes(*vcpus) != self.vcpus {
            let reason = format!("it is not the state of a guest with {} vCPUs", self.vcpus);
            return Err(section.invalid(reason).into());
        }
        self.shared.state.lock().ticks = u64::from_le_bytes(ticks);
        Ok(())
    }

    fn sections(&self) -> Vec<&'static [SectionKind]> {
        vec![SECTIONS]
    }

    fn crash(&self) -> Option<String> {
        let ended = self.threads.iter().position(JoinHandle::is_finished)?;
        Some(format!("the thread of vCPU {ended} has ended"))
    }

    fn serial_text(&self) -> String {
        String::new()
    }

    fn dirty_log(
        &self,
        choice: LogChoice,
        memory: &GuestMemory,
    ) -> Result<BackendLog, MachineError> {
        match choice {
            LogChoice::Auto | LogChoice::Userfaultfd => {
                Ok(BackendLog::of_all_writes(UffdLog::new(memory)?))
            }
            LogChoice::KvmBitmap | LogChoice::KvmClear | LogChoice::KvmRing => {
                Err(MachineError::Config {
                    setting: "dirty-log",
                    reason: format!("`{choice}` needs a guest on KVM; use uffd"),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests;
