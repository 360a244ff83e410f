//! A vCPU and the thread that runs it.
//!
//! The thread owns the vCPU's descriptor, so every request about the vCPU is made by it, and only
//! while it is not in `KVM_RUN` (some KVMs let such requests wait until it leaves). It is either
//! *parked*, waiting for commands, or in the run loop:
//!
//! ```text
//!             Run                     immediate_exit set and KVM_RUN returned EINTR
//!   parked --------> run loop ---------------------------------------------------------> parked
//!     ^ | call                 or the guest stopped (recorded first)
//!     +-+
//! ```
//!
//! Pausing sets `immediate_exit` in the shared `kvm_run` page and then signals the thread. Whether
//! the signal finds it in the guest, in a device or just before `KVM_RUN`, the next `KVM_RUN` first
//! completes the port or memory access that is pending and then returns EINTR. So a parked vCPU
//! never has a half-done instruction, and its registers are what its state needs.
//!
//! A throttle ([`super::throttle`]) sends the vCPU round the same way: it kicks, and when the rest is over it
//! clears `immediate_exit` and orders Run. A vCPU that had no time to park by then just goes on, and that
//! Run waits until it is kicked again. This takes nothing from a pause, which leaves `immediate_exit` set:
//! the Run that waited leads to EINTR and back, and then the pause's call is next.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmferry_dirty::DirtyRings;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler, unblock_signal};

use super::KvmError;
use super::boot::GuestRam;
use super::devices::Devices;
use super::stop::{GuestStop, StopCause, StopRecord};

/// Between two tries to make room in a dirty ring that KVM refuses to reset, which it never does:
/// short for a guest that waits, long for a processor.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(1);

/// How long a vCPU's thread may take to answer. It was told to leave the guest, which takes microseconds, and shares its
/// processor with whatever else the host does; one that does not is KVM's fault.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

type Call = Box<dyn FnOnce(&VcpuFd) + Send>;

enum Command {
    Run,
    Call(Call),
}

/// The handle of a vCPU's thread. Dropping it ends the thread.
pub(super) struct Vcpu {
    index: u32,
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
    kick: Arc<Kick>,
}

/// What a vCPU's thread has to do with besides its vCPU.
pub(super) struct Surroundings {
    pub(super) devices: Arc<Devices>,
    pub(super) stop: Arc<StopRecord>,
    /// If the machine has dirty rings, which must be emptied when they are full.
    pub(super) rings: Option<Arc<DirtyRings>>,
    /// Kept alive for as long as the vCPU can write to it.
    pub(super) _memory: Arc<dyn GuestRam>,
}

/// The answer to a call that is under way on a vCPU's thread.
pub(super) struct Reply<T> {
    vcpu: u32,
    answer: Receiver<Result<T, KvmError>>,
}

impl Vcpu {
    /// Starts the thread, parked.
    pub(super) fn spawn(
        index: u32,
        mut fd: VcpuFd,
        surroundings: Surroundings,
    ) -> Result<Self, KvmError> {
        install_signal_handler(index)?;
        let kick = Arc::new(Kick::default());
        let (commands, orders) = channel();
        let thread_kick = Arc::clone(&kick);
        let body = move || {
            // A mask inherited from the embedding program could hold the kick back for ever. Without
            // it there is no pausing: the thread then ends, which every request reports.
            if unblock_signal(kick_signal()).is_err() {
                return;
            }
            // `fd` outlives the guard, so its page is unmapped only after the pointer to it has
            // been taken back.
            let target = KickTarget::of(&mut fd);
            let _guard = thread_kick.aim(target);
            serve(index, &mut fd, &orders, &surroundings, &thread_kick);
        };
        let builder = std::thread::Builder::new().name(format!("vcpu{index}"));
        let thread =
            builder.spawn(body).map_err(|error| dead(index, format!("cannot be made: {error}")))?;
        Ok(Self { index, commands: Some(commands), thread: Some(thread), kick })
    }

    /// Lets `work` run on the vCPU's thread, after everything ordered before. A vCPU that is
    /// running is not interrupted by it: see [`Vcpu::kick`].
    pub(super) fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&VcpuFd) -> Result<T, KvmError> + Send + 'static,
    ) -> Result<Reply<T>, KvmError> {
        let (answer, reply) = channel();
        let call = Box::new(move |fd: &VcpuFd| {
            // The caller has given up if this fails.
            let _ = answer.send(work(fd));
        });
        self.order(Command::Call(call))?;
        Ok(Reply { vcpu: self.index, answer: reply })
    }

    /// Enters the guest, or goes on in it if it was kicked and has not parked yet.
    pub(super) fn run(&self) -> Result<(), KvmError> {
        self.kick.clear();
        self.order(Command::Run)
    }

    /// Makes the vCPU leave the guest soon. A call that is answered afterwards proves that it has.
    pub(super) fn kick(&self) {
        self.kick.kick();
    }

    fn order(&self, command: Command) -> Result<(), KvmError> {
        let gone = || dead(self.index, "has ended".into());
        self.commands.as_ref().ok_or_else(gone)?.send(command).map_err(|_| gone())
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.commands = None;
        self.kick.kick();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been printed.
            let _ = thread.join();
        }
    }
}

impl<T> Reply<T> {
    pub(super) fn wait(self) -> Result<T, KvmError> {
        self.answer.recv_timeout(ANSWER_TIMEOUT).map_err(|error| {
            let reason = match error {
                RecvTimeoutError::Disconnected => "ended while it was asked".into(),
                RecvTimeoutError::Timeout => {
                    format!("has not left the guest for {} s", ANSWER_TIMEOUT.as_secs())
                }
            };
            dead(self.vcpu, reason)
        })?
    }
}

fn dead(vcpu: u32, reason: String) -> KvmError {
    KvmError::Thread { vcpu, reason }
}

/// The thread's loop, until the handle is dropped.
fn serve(
    vcpu: u32,
    fd: &mut VcpuFd,
    orders: &Receiver<Command>,
    surroundings: &Surroundings,
    kick: &Kick,
) {
    // Once the guest cannot go on, it is not entered again, but its state can still be looked at.
    let mut stopped = false;
    for order in orders {
        match order {
            Command::Call(call) => call(fd),
            Command::Run if stopped => {}
            Command::Run => {
                if let Some(cause) = run_guest(vcpu, fd, surroundings, kick) {
                    stopped = true;
                    let rip = fd.get_regs().ok().map(|regs| regs.rip);
                    surroundings.stop.record(GuestStop { vcpu, rip, cause });
                }
            }
        }
    }
}

/// Runs the guest until the vCPU is kicked (`None`) or cannot go on.
fn run_guest(
    vcpu: u32,
    fd: &mut VcpuFd,
    surroundings: &Surroundings,
    kick: &Kick,
) -> Option<StopCause> {
    let Surroundings { devices, rings, .. } = surroundings;
    loop {
        let internal_error = match fd.run() {
            Ok(VcpuExit::IoOut(port, data)) => {
                devices.write(vcpu, port, data);
                false
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                devices.read(port, data);
                false
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                devices.read_address(address, data);
                false
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                devices.write_address(address, data);
                false
            }
            Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => false,
            Ok(VcpuExit::Shutdown | VcpuExit::SystemEvent(..)) => return Some(StopCause::Shutdown),
            // kvm-ioctls has no name for it.
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                // The log tells an error. If there is no room, KVM does not let the guest in, and
                // it may have got over whatever it was a little later.
                if !rings.as_ref().is_some_and(|rings| rings.reap_full()) {
                    std::thread::sleep(NO_ROOM_PAUSE);
                }
                false
            }
            Ok(VcpuExit::FailEntry(reason, _)) => return Some(StopCause::EntryFailed { reason }),
            Ok(VcpuExit::InternalError) => true,
            Ok(exit) => return Some(StopCause::Unexpected { exit: format!("{exit:?}") }),
            Err(error) => match error.errno() {
                // Only this way out says that nothing is pending.
                libc::EINTR if kick.is_wanted() => return None,
                libc::EINTR | libc::EAGAIN => false,
                errno => return Some(StopCause::RunFailed { errno }),
            },
        };
        if internal_error {
            // SAFETY: The exit reason is KVM_EXIT_INTERNAL_ERROR, so this is the field that the
            // kernel filled.
            let suberror = unsafe { fd.get_kvm_run().__bindgen_anon_1.internal.suberror };
            return Some(StopCause::InternalError { suberror });
        }
    }
}

/// Makes a vCPU's thread leave the guest.
#[derive(Default)]
struct Kick(Mutex<Option<KickTarget>>);

/// A running thread and its vCPU's `immediate_exit` byte.
#[derive(Clone, Copy)]
struct KickTarget {
    immediate_exit: *const AtomicU8,
    thread: libc::pthread_t,
}

// SAFETY: The pointer is to an atomic in memory that is shared with the kernel anyway; `Kick` makes
// sure that it is used only while it is valid, from whichever thread.
unsafe impl Send for KickTarget {}

impl KickTarget {
    fn of(fd: &mut VcpuFd) -> Self {
        let immediate_exit = (&raw mut fd.get_kvm_run().immediate_exit).cast::<AtomicU8>();
        // SAFETY: Always succeeds and has no preconditions.
        let thread = unsafe { libc::pthread_self() };
        Self { immediate_exit, thread }
    }

    fn flag(&self) -> &AtomicU8 {
        // SAFETY: It points into the vCPU's mapped `kvm_run` page. A target is reachable only
        // through
        // `Kick`, under its lock, and `Aimed` removes it from there before the page is unmapped.
        unsafe { &*self.immediate_exit }
    }
}

impl Kick {
    /// To be called by the vCPU's thread. When the result is dropped, nothing is kicked any more.
    fn aim(&self, target: KickTarget) -> Aimed<'_> {
        *self.target() = Some(target);
        Aimed(self)
    }

    fn kick(&self) {
        if let Some(target) = *self.target() {
            target.flag().store(1, Ordering::SeqCst);
            // SAFETY: The thread has not ended: it takes the target away, under this lock, before
            // it does. The signal has a handler that does nothing, so it only interrupts KVM_RUN.
            unsafe { libc::pthread_kill(target.thread, kick_signal()) };
        }
    }

    fn clear(&self) {
        if let Some(target) = *self.target() {
            target.flag().store(0, Ordering::SeqCst);
        }
    }

    fn is_wanted(&self) -> bool {
        self.target().is_some_and(|target| target.flag().load(Ordering::SeqCst) != 0)
    }

    fn target(&self) -> std::sync::MutexGuard<'_, Option<KickTarget>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Aimed<'a>(&'a Kick);

impl Drop for Aimed<'_> {
    fn drop(&mut self) {
        *self.0.target() = None;
    }
}

/// The first real-time signal: Linux VMMs use it for this by convention, so a program that embeds
/// this one must not use it for something else.
fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}

fn install_signal_handler(vcpu: u32) -> Result<(), KvmError> {
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

    static ONCE: Once = Once::new();
    static FAILED: AtomicU8 = AtomicU8::new(0);
    ONCE.call_once(|| {
        // Without SA_RESTART, so that KVM_RUN returns; a handler is needed for it to be interrupted
        // at all.
        if register_signal_handler(kick_signal(), nothing).is_err() {
            FAILED.store(1, Ordering::Relaxed);
        }
    });
    if FAILED.load(Ordering::Relaxed) != 0 {
        return Err(dead(
            vcpu,
            format!("cannot be interrupted: no handler for signal {}", kick_signal()),
        ));
    }
    Ok(())
}
