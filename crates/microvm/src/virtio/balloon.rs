//! The balloon: its thread, the machine's hand on it, and everybody else's.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use vm_memory::GuestMemoryMmap;
use vmferry_balloon::{
    Balloon as Device, BalloonConfig, BalloonState, Features, MAX_QUEUES, PAGE_BYTES, Progress,
    Statistics,
};
use vmferry_dirty::DirtyBitmap;
use vmferry_memory::GuestMemory;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::host::{BalloonListener, HintRound, Host, by_name};
use super::mmio::{Effect, Line, Registers, Transport};
use super::{BALLOON_ADDRESS, BALLOON_BYTES, BALLOON_GSI};
use crate::error::MachineError;
use crate::kvm::{InterruptPin, MmioDevice, MmioWiring};
use crate::state::{SectionKind, StateReader, StateWriter};

/// The device's section of the machine's state: [`Saved`], as JSON.
pub(crate) const SECTIONS: &[SectionKind] = &[BALLOON];
const BALLOON: SectionKind = SectionKind::mandatory("balloon", 1);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    registers: Registers,
    device: BalloonState,
}

/// A balloon, as the machine has it: dropping it ends the thread.
pub(crate) struct BalloonDevice {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// A balloon, for whoever gives it orders.
#[derive(Clone)]
pub struct Balloon(Arc<Shared>);

/// A glance at a balloon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BalloonStatus {
    /// Whether the guest has a driver for it that runs.
    pub driver: bool,
    /// Whether the driver must reset the device, which can't follow it any more.
    pub needs_reset: bool,
    /// The features that device and driver agree on.
    pub features: Vec<&'static str>,
    /// How large it shall be.
    pub target_bytes: u64,
    /// How large it is, as the driver says.
    pub actual_bytes: u64,
    /// What was given back to this host since the machine was made, by inflating and by reports.
    pub discarded_bytes: u64,
    /// What the guest has taken back since then by deflating.
    pub deflated_bytes: u64,
    /// The hints of the last migration from here.
    pub hints: Option<HintRound>,
    /// The last statistics of the guest.
    pub statistics: Option<BTreeMap<&'static str, u64>>,
    /// What the driver has done wrong.
    pub warnings: Vec<String>,
}

struct Shared {
    state: Mutex<State>,
    /// Whether it runs, or statistics have come.
    changed: Condvar,
    /// Those who wait for the lock, to whom the thread gives way.
    waiting: AtomicUsize,
    memory: Arc<GuestMemoryMmap<DirtyBitmap>>,
    guest: GuestMemory,
    kicks: [EventFd; MAX_QUEUES],
    /// Takes the thread out of its wait for kicks.
    wake: EventFd,
    /// Of the kicks and `wake`.
    any: Epoll,
    line: Line,
}

struct State {
    transport: Transport,
    running: bool,
    ended: bool,
    /// Whether its state came from another machine, and it has not run since.
    arrived: bool,
    /// Queues that may have something, as bits.
    pending: u32,
    /// Queues behind the one that was worked on last, as bits: their turn comes first.
    behind: u32,
}

const ALL_QUEUES: u32 = (1 << MAX_QUEUES) - 1;

impl BalloonDevice {
    /// The device, quiet, and how it is to be connected to a machine with this memory.
    pub(crate) fn new(
        memory: Arc<GuestMemoryMmap<DirtyBitmap>>,
        guest: GuestMemory,
    ) -> Result<(Self, MmioWiring), MachineError> {
        let event = || EventFd::new(EFD_NONBLOCK);
        let wires = || -> io::Result<_> {
            let kicks = [event()?, event()?, event()?, event()?, event()?];
            Ok((kicks, event()?))
        };
        let (kicks, wake) = wires().map_err(MachineError::Balloon)?;
        let copies = || -> io::Result<_> {
            let any = Epoll::new()?;
            for event in kicks.iter().chain([&wake]) {
                let readable = EpollEvent::new(EventSet::IN, 0);
                any.ctl(ControlOperation::Add, event.as_raw_fd(), readable)?;
            }
            let kicks = kicks.iter().map(EventFd::try_clone).collect::<io::Result<Vec<_>>>()?;
            Ok((any, kicks))
        };
        let (any, other_kicks) = copies().map_err(MachineError::Balloon)?;
        let pin = Arc::new(InterruptPin::new(BALLOON_GSI));
        let line = Line::new(Arc::clone(&pin));
        let device = Device::new(
            BalloonConfig::default(),
            Arc::clone(&memory),
            Host::new(guest.clone()),
            line.clone(),
        )
        .map_err(|error| MachineError::Balloon(io::Error::other(error)))?;
        let state = State {
            transport: Transport::new(device, line.clone()),
            running: false,
            ended: false,
            arrived: false,
            pending: 0,
            behind: 0,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            memory,
            guest,
            kicks,
            wake,
            any,
            line,
        });
        let wiring = MmioWiring {
            address: BALLOON_ADDRESS,
            bytes: BALLOON_BYTES,
            device: Arc::clone(&shared) as Arc<dyn MmioDevice>,
            interrupt: pin,
            kick_offset: VIRTIO_MMIO_QUEUE_NOTIFY.into(),
            kicks: other_kicks,
        };
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("balloon".into())
            .spawn(move || serving.serve())
            .map_err(MachineError::Thread)?;
        Ok((Self { shared, thread: Some(thread) }, wiring))
    }

    /// Lets it work, or makes it quiet: on return from `run(false)` it neither writes guest memory nor discards
    /// any, and interrupts nobody.
    pub(crate) fn run(&self, running: bool) {
        let mut state = self.shared.lock();
        state.running = running;
        if running {
            if std::mem::take(&mut state.arrived) {
                state.transport.device.restored_after_migration();
            }
            // Kicks that another machine has heard are not in its state.
            state.pending = ALL_QUEUES;
        }
        self.shared.line.set_live(running);
        drop(state);
        self.shared.changed.notify_all();
        self.shared.wake();
    }

    pub(crate) fn save(&self, out: &mut StateWriter) -> Result<(), MachineError> {
        let state = self.shared.lock();
        let saved =
            Saved { registers: state.transport.save(), device: state.transport.device.save() };
        let bytes =
            serde_json::to_vec(&saved).map_err(|error| MachineError::Balloon(error.into()))?;
        Ok(out.section(&BALLOON, 0, &bytes)?)
    }

    pub(crate) fn load(&self, from: &StateReader<'_>) -> Result<(), MachineError> {
        let section = from.section(&BALLOON, 0)?;
        let saved: Saved = serde_json::from_slice(section.payload())
            .map_err(|error| section.invalid(error.to_string()))?;
        let device = Device::restore(
            BalloonConfig::default(),
            Arc::clone(&self.shared.memory),
            Host::new(self.shared.guest.clone()),
            self.shared.line.clone(),
            &saved.device,
        )
        .map_err(|error| section.invalid(error.to_string()))?;
        let mut state = self.shared.lock();
        state.transport.restore(device, saved.registers);
        state.arrived = true;
        Ok(())
    }

    /// The same, for others.
    pub(crate) fn handle(&self) -> Balloon {
        Balloon(Arc::clone(&self.shared))
    }
}

impl Drop for BalloonDevice {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A panic there has stopped the device already.
            let _ = thread.join();
        }
    }
}

impl Balloon {
    /// How large the balloon shall be: so many bytes, in whole pages of 4096, the guest shall do without.
    ///
    /// # Errors
    /// [`MachineError::Config`] if that is more than the guest's memory.
    pub fn set_target(&self, bytes: u64) -> Result<(), MachineError> {
        let memory_bytes = self.0.guest.total_pages() * PAGE_BYTES;
        let pages = u32::try_from(bytes / PAGE_BYTES).ok().filter(|_| bytes <= memory_bytes);
        let Some(pages) = pages else {
            let reason = format!("{bytes} bytes; the guest has {memory_bytes}");
            return Err(MachineError::Config { setting: "balloon", reason });
        };
        self.0.lock().transport.device.set_target(pages);
        Ok(())
    }

    /// A glance at it.
    #[must_use]
    pub fn status(&self) -> BalloonStatus {
        let state = self.0.lock();
        let device = &state.transport.device;
        let host = device.host();
        BalloonStatus {
            driver: device.is_active(),
            needs_reset: device.needs_reset(),
            features: device.negotiated().names().collect(),
            target_bytes: u64::from(device.target_pages()) * PAGE_BYTES,
            actual_bytes: u64::from(device.actual_pages()) * PAGE_BYTES,
            discarded_bytes: host.discarded_bytes,
            deflated_bytes: host.deflated_bytes,
            hints: host.hints,
            statistics: device.statistics().map(by_name),
            warnings: host.warnings.clone(),
        }
    }

    /// The last statistics that the guest has sent.
    #[must_use]
    pub fn statistics(&self) -> Option<Statistics> {
        self.0.lock().transport.device.statistics().copied()
    }

    /// Asks the guest for statistics, and waits for them for at most `patience`. False if none have come: the guest
    /// is paused, knows no statistics, or does not answer.
    #[must_use]
    pub fn refresh_statistics(&self, patience: Duration) -> bool {
        let mut state = self.0.lock();
        let device = &mut state.transport.device;
        let before = device.host().answers;
        let knows = device.is_active() && device.negotiated().contains(Features::STATS_VQ);
        if !knows || device.needs_reset() || !state.running {
            return false;
        }
        // If it has not answered the last request, its answer to that will do.
        state.transport.device.request_statistics();
        let unanswered = |state: &mut State| {
            state.transport.device.host().answers == before && state.running && !state.ended
        };
        state = self
            .0
            .changed
            .wait_timeout_while(state, patience, unanswered)
            .unwrap_or_else(PoisonError::into_inner)
            .0;
        state.transport.device.host().answers != before
    }

    /// Whether the guest has a driver that hints its free pages when it is asked.
    #[must_use]
    pub fn can_hint(&self) -> bool {
        let state = self.0.lock();
        let device = &state.transport.device;
        device.is_active() && device.negotiated().contains(Features::FREE_PAGE_HINT)
    }

    /// Asks the guest for hints of free pages and returns the command ID; `None` if it knows none or has no driver.
    /// An older round ends.
    pub fn start_hints(&self) -> Option<u32> {
        let mut state = self.0.lock();
        let id = state.transport.device.start_hints()?.number();
        state.transport.device.host_mut().hints = Some(HintRound { id, ..HintRound::default() });
        Some(id)
    }

    /// Ends the round of hints: on return none is under way, and none of it will be told any more. The guest keeps
    /// the hinted pages for itself. While the machine is paused no guest memory is touched.
    pub fn stop_hints(&self) {
        let mut state = self.0.lock();
        if state.running {
            state.transport.device.stop_hints();
        } else {
            state.transport.device.withdraw_hints();
        }
    }

    /// Lets the guest use the hinted pages again: the migration is over, whichever way.
    pub fn finish_hints(&self) {
        self.0.lock().transport.device.finish_hints();
    }

    /// Who hears of hints and discards; there is one at most.
    pub fn set_listener(&self, listener: Option<Arc<dyn BalloonListener>>) {
        self.0.lock().transport.device.host_mut().listener = listener;
    }
}

/// vCPUs come here.
impl MmioDevice for Shared {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.lock().transport.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.lock();
        let kicked = match state.transport.write(offset, data) {
            Effect::Nothing => return,
            Effect::Kick(queue) => 1_u32.checked_shl(queue.into()).unwrap_or(0) & ALL_QUEUES,
            Effect::KickAll => ALL_QUEUES,
        };
        state.pending |= kicked;
        drop(state);
        self.wake();
    }
}

impl Shared {
    /// The lock, for everybody but the thread.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        state
    }

    fn wake(&self) {
        // Fails only if it is awake.
        let _ = self.wake.write(1);
    }

    /// The thread: one bounded piece of work after the other, each under the lock, so that whoever makes the
    /// device quiet waits for one at most.
    fn serve(&self) {
        loop {
            // A lock that is taken again at once would leave no chance to others.
            while self.waiting.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            }
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let quiet = |state: &mut State| !state.running && !state.ended;
            state = self.changed.wait_while(state, quiet).unwrap_or_else(PoisonError::into_inner);
            if state.ended {
                return;
            }
            state.pending |= self.heard();
            if state.pending == 0 {
                drop(state);
                self.wait_for_kicks();
                continue;
            }
            self.work(&mut state);
        }
    }

    fn work(&self, state: &mut State) {
        // In turns: one that never gets empty keeps nobody waiting for longer than one call.
        let behind = state.pending & state.behind;
        let first = if behind == 0 { state.pending } else { behind };
        let queue = first.trailing_zeros() as u16;
        state.behind = ALL_QUEUES << (queue + 1);
        let answers = state.transport.device.host().answers;
        let progress = state.transport.device.process(queue);
        state.pending &= !(1 << queue);
        if progress == Progress::More {
            // Heard at once, and worked on when the others have had their turn.
            let _ = self.kicks[usize::from(queue)].write(1);
        }
        if state.transport.device.host().answers != answers {
            self.changed.notify_all();
        }
    }

    /// The queues that were kicked since the last call.
    fn heard(&self) -> u32 {
        let _ = self.wake.read();
        let kicked = (0..MAX_QUEUES).filter(|queue| self.kicks[*queue].read().is_ok());
        kicked.fold(0, |all, queue| all | 1 << queue)
    }

    fn wait_for_kicks(&self) {
        // One is enough to look at all. Interrupted by a signal, it looks once too often.
        let _ = self.any.wait(-1, &mut [EpollEvent::default()]);
    }
}
