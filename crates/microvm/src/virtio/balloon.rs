//! The balloon as the machine owns it.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use vm_memory::GuestMemoryMmap;
use vmferry_balloon::{Balloon as Device, BalloonConfig, BalloonState, MAX_QUEUES};
use vmferry_dirty::DirtyBitmap;
use vmferry_memory::GuestMemory;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::host::Host;
use super::mmio::{Effect, Line, Registers, Transport};
use super::{BALLOON_ADDRESS, BALLOON_BYTES, BALLOON_GSI};
use crate::error::MachineError;
use crate::kvm::{InterruptPin, MmioDevice, MmioWiring};
use crate::state::{SectionKind, StateReader, StateWriter};

pub use self::handle::{Balloon, BalloonStatus};

mod handle;
mod thread;

/// The device's section of the machine state: [`SavedBalloon`], as JSON.
pub(crate) const SECTIONS: &[SectionKind] = &[BALLOON];
const BALLOON: SectionKind = SectionKind::mandatory("balloon", 1);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedBalloon {
    registers: Registers,
    device: BalloonState,
}

/// The balloon of a machine. Dropping it ends its thread.
pub(crate) struct BalloonDevice {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Notified when `running` or `ended` changes, or statistics arrive.
    changed: Condvar,
    /// Number of other threads that wait for the lock. The device's thread yields to them.
    waiting: AtomicUsize,
    memory: Arc<GuestMemoryMmap<DirtyBitmap>>,
    guest: GuestMemory,
    /// Whether the device returns no page to the system.
    keeps_pages: Arc<AtomicBool>,
    kicks: [EventFd; MAX_QUEUES],
    /// Ends the thread's wait for kicks.
    wake: EventFd,
    /// Waits for the kicks and `wake`.
    epoll: Epoll,
    line: Line,
}

struct State {
    transport: Transport,
    running: bool,
    ended: bool,
    /// Whether the state was loaded from another machine, and the device has not run since.
    arrived: bool,
    /// Queues that may have buffers, as bits.
    pending: u32,
    /// Queues with a higher number than the one processed last, as bits. They are processed first.
    next: u32,
}

const ALL_QUEUES: u32 = (1 << MAX_QUEUES) - 1;

impl BalloonDevice {
    /// Creates the device, paused, and its connections to a machine with this memory.
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
            let epoll = Epoll::new()?;
            for event in kicks.iter().chain([&wake]) {
                let readable = EpollEvent::new(EventSet::IN, 0);
                epoll.ctl(ControlOperation::Add, event.as_raw_fd(), readable)?;
            }
            let kicks = kicks.iter().map(EventFd::try_clone).collect::<io::Result<Vec<_>>>()?;
            Ok((epoll, kicks))
        };
        let (epoll, other_kicks) = copies().map_err(MachineError::Balloon)?;
        let pin = Arc::new(InterruptPin::new(BALLOON_GSI));
        let line = Line::new(Arc::clone(&pin));
        let keeps_pages = Arc::new(AtomicBool::new(false));
        let device = Device::new(
            BalloonConfig::default(),
            Arc::clone(&memory),
            Host::new(guest.clone(), Arc::clone(&keeps_pages)),
            line.clone(),
        )
        .map_err(|error| MachineError::Balloon(io::Error::other(error)))?;
        let state = State {
            transport: Transport::new(device, line.clone()),
            running: false,
            ended: false,
            arrived: false,
            pending: 0,
            next: 0,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            memory,
            guest,
            keeps_pages,
            kicks,
            wake,
            epoll,
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

    /// Lets the device work.
    pub(crate) fn resume(&self) {
        self.set_running(true);
    }

    /// Stops the device. After this it neither writes nor discards guest memory, and raises no
    /// interrupts.
    pub(crate) fn pause(&self) {
        self.set_running(false);
    }

    fn set_running(&self, running: bool) {
        let mut state = self.shared.lock();
        state.running = running;
        if running {
            if std::mem::take(&mut state.arrived) {
                state.transport.device.restored_after_migration();
            }
            // Kicks that the source's device has received are not part of the loaded state.
            state.pending = ALL_QUEUES;
        }
        self.shared.line.set_live(running);
        drop(state);
        self.shared.changed.notify_all();
        self.shared.wake();
    }

    pub(crate) fn save(&self, out: &mut StateWriter) -> Result<(), MachineError> {
        let state = self.shared.lock();
        let saved = SavedBalloon {
            registers: state.transport.save(),
            device: state.transport.device.save(),
        };
        let bytes =
            serde_json::to_vec(&saved).map_err(|error| MachineError::Balloon(error.into()))?;
        Ok(out.section(&BALLOON, 0, &bytes)?)
    }

    pub(crate) fn load(&self, from: &StateReader<'_>) -> Result<(), MachineError> {
        let section = from.section(&BALLOON, 0)?;
        let saved: SavedBalloon = serde_json::from_slice(section.payload())
            .map_err(|error| section.invalid(error.to_string()))?;
        let device = Device::restore(
            BalloonConfig::default(),
            Arc::clone(&self.shared.memory),
            Host::new(self.shared.guest.clone(), Arc::clone(&self.shared.keeps_pages)),
            self.shared.line.clone(),
            &saved.device,
        )
        .map_err(|error| section.invalid(error.to_string()))?;
        let mut state = self.shared.lock();
        state.transport.restore(device, saved.registers);
        state.arrived = true;
        Ok(())
    }

    /// A handle of the device.
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
            // A panic of the thread has already stopped the device.
            let _ = thread.join();
        }
    }
}

/// Register accesses, on the vCPU threads.
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
    /// Takes the lock. Not for the device's own thread, which yields to the users of this function.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let state = self.state.lock();
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        state
    }

    /// The same, if the lock is free within this time.
    fn lock_within(&self, patience: Duration) -> Option<MutexGuard<'_, State>> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let state = self.state.try_lock_for(patience);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        state
    }

    fn wake(&self) {
        // Fails only if the thread is awake already.
        let _ = self.wake.write(1);
    }
}
