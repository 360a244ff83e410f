//! A vCPU and the thread that runs it.
//!
//! The thread owns the vCPU's descriptor, so only this thread makes requests about the vCPU, and
//! only outside `KVM_RUN` (some KVMs block such requests until `KVM_RUN` returns). The thread is
//! either *parked*, waiting for commands, or in the run loop:
//!
//! ```text
//!             Run                     immediate_exit set and KVM_RUN returned EINTR
//!   parked --------> run loop ---------------------------------------------------------> parked
//!     ^ | call                 or the guest stopped (recorded first)
//!     +-+
//! ```
//!
//! Pausing sets `immediate_exit` in the shared `kvm_run` page and then signals the thread. The
//! signal may arrive in the guest, in a device or just before `KVM_RUN`. In each case the next
//! `KVM_RUN` completes the pending port or memory access and then returns EINTR. So a parked vCPU
//! has no incomplete instruction, and its registers can be saved.
//!
//! A throttle ([`super::throttle`]) uses the same way out: it kicks the vCPU, and after the rest it
//! clears `immediate_exit` and sends Run. A vCPU that has not parked by then stays in the guest,
//! and that Run remains in the channel until the next kick. This does not delay a pause, which
//! leaves `immediate_exit` set: the remaining Run returns with EINTR at once, and the pause's call
//! follows.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Once};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;
use kvm_ioctls::{VcpuExit, VcpuFd};
use parking_lot::Mutex;
use vmferry_dirty::DirtyRings;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler, unblock_signal};

use super::KvmError;
use super::boot::GuestRam;
use super::devices::Devices;
use super::stop::{GuestStop, StopCause, StopRecord};

/// The delay before another attempt to reset a full dirty ring that KVM refused to reset. KVM is
/// not known to refuse. The delay is short for the guest, and long for the processor.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(1);

/// How long a vCPU's thread may take to answer after it was kicked. Leaving the guest takes
/// microseconds, but the host may be busy. If it takes longer than this, KVM does not work.
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

/// What a vCPU's thread uses besides its vCPU.
pub(super) struct VcpuContext {
    pub(super) devices: Arc<Devices>,
    pub(super) stop: Arc<StopRecord>,
    /// The dirty rings, if the machine has them. They must be emptied when they are full.
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
    /// Starts the thread. The vCPU is parked.
    pub(super) fn spawn(
        index: u32,
        mut fd: VcpuFd,
        context: VcpuContext,
    ) -> Result<Self, KvmError> {
        install_signal_handler(index)?;
        let kick = Arc::new(Kick::default());
        let (commands, orders) = channel();
        let thread_kick = Arc::clone(&kick);
        let body = move || {
            // The embedding program's signal mask, which the thread inherits, could block the kick.
            // A vCPU that cannot be kicked cannot be paused, so the thread then ends, which every
            // request reports.
            if unblock_signal(kick_signal()).is_err() {
                return;
            }
            // `fd` outlives the guard, so its page is unmapped after the pointer to it is removed.
            let target = KickTarget::of(&mut fd);
            let _guard = thread_kick.aim(target);
            serve(index, &mut fd, &orders, &context, &thread_kick);
        };
        let builder = std::thread::Builder::new().name(format!("vcpu{index}"));
        let thread = builder
            .spawn(body)
            .map_err(|error| thread_error(index, format!("could not be started: {error}")))?;
        Ok(Self { index, commands: Some(commands), thread: Some(thread), kick })
    }

    /// Runs `work` on the vCPU's thread, after all earlier orders. This does not interrupt a
    /// running vCPU: see [`Vcpu::kick`].
    pub(super) fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&VcpuFd) -> Result<T, KvmError> + Send + 'static,
    ) -> Result<Reply<T>, KvmError> {
        let (answer, reply) = channel();
        let call = Box::new(move |fd: &VcpuFd| {
            // Fails if the caller no longer waits.
            let _ = answer.send(work(fd));
        });
        self.order(Command::Call(call))?;
        Ok(Reply { vcpu: self.index, answer: reply })
    }

    /// Enters the guest, or stays in it if the vCPU was kicked and has not parked yet.
    pub(super) fn run(&self) -> Result<(), KvmError> {
        self.kick.clear();
        self.order(Command::Run)
    }

    /// Makes the vCPU leave the guest soon. Once it answers a later call, it has left the guest.
    pub(super) fn kick(&self) {
        self.kick.kick();
    }

    fn order(&self, command: Command) -> Result<(), KvmError> {
        let gone = || thread_error(self.index, "has ended".into());
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
                RecvTimeoutError::Disconnected => "ended during a request".into(),
                RecvTimeoutError::Timeout => {
                    format!("has not left the guest for {} s", ANSWER_TIMEOUT.as_secs())
                }
            };
            thread_error(self.vcpu, reason)
        })?
    }
}

fn thread_error(vcpu: u32, reason: String) -> KvmError {
    KvmError::Thread { vcpu, reason }
}

/// The thread's loop, until the handle is dropped.
fn serve(
    vcpu: u32,
    fd: &mut VcpuFd,
    orders: &Receiver<Command>,
    context: &VcpuContext,
    kick: &Kick,
) {
    // A guest that cannot continue is not entered again, but its state can still be read.
    let mut stopped = false;
    for order in orders {
        match order {
            Command::Call(call) => call(fd),
            Command::Run if stopped => {}
            Command::Run => {
                if let Some(cause) = run_guest(vcpu, fd, context, kick) {
                    stopped = true;
                    let rip = fd.get_regs().ok().map(|regs| regs.rip);
                    context.stop.record(GuestStop { vcpu, rip, cause });
                }
            }
        }
    }
}

/// Runs the guest until the vCPU is kicked (`None`) or cannot continue.
fn run_guest(vcpu: u32, fd: &mut VcpuFd, context: &VcpuContext, kick: &Kick) -> Option<StopCause> {
    let VcpuContext { devices, rings, .. } = context;
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
            // kvm-ioctls has no variant for this exit.
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                // The log reports an error. While the ring is full, KVM does not enter the guest,
                // and a later attempt may succeed.
                if !rings.as_ref().is_some_and(|rings| rings.reap_full()) {
                    std::thread::sleep(NO_ROOM_PAUSE);
                }
                false
            }
            Ok(VcpuExit::FailEntry(reason, _)) => return Some(StopCause::EntryFailed { reason }),
            Ok(VcpuExit::InternalError) => true,
            Ok(exit) => return Some(StopCause::Unexpected { exit: format!("{exit:?}") }),
            Err(error) => match error.errno() {
                // Only this exit means that no access is pending.
                libc::EINTR if kick.is_wanted() => return None,
                libc::EINTR | libc::EAGAIN => false,
                errno => return Some(StopCause::RunFailed { errno }),
            },
        };
        if internal_error {
            // SAFETY: The exit reason is KVM_EXIT_INTERNAL_ERROR, so the kernel has filled in this
            // field of the union.
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

// SAFETY: The pointer is to an atomic in memory that is shared with the kernel. `Kick` makes sure
// that it is used only while it is valid, on any thread.
unsafe impl Send for KickTarget {}

impl KickTarget {
    fn of(fd: &mut VcpuFd) -> Self {
        let immediate_exit = (&raw mut fd.get_kvm_run().immediate_exit).cast::<AtomicU8>();
        // SAFETY: Always succeeds and has no preconditions.
        let thread = unsafe { libc::pthread_self() };
        Self { immediate_exit, thread }
    }

    fn flag(&self) -> &AtomicU8 {
        // SAFETY: The pointer is into the vCPU's mapped `kvm_run` page. A target is reachable only
        // through `Kick`, under its lock, and `KickGuard` removes it before the page is unmapped.
        unsafe { &*self.immediate_exit }
    }
}

impl Kick {
    /// Sets the target. To be called by the vCPU's thread. Dropping the guard removes the target.
    fn aim(&self, target: KickTarget) -> KickGuard<'_> {
        *self.0.lock() = Some(target);
        KickGuard(self)
    }

    fn kick(&self) {
        if let Some(target) = *self.0.lock() {
            target.flag().store(1, Ordering::SeqCst);
            // SAFETY: The thread has not ended: before it ends, it removes the target under this
            // lock. The signal's handler does nothing, so the signal only interrupts KVM_RUN.
            unsafe { libc::pthread_kill(target.thread, kick_signal()) };
        }
    }

    fn clear(&self) {
        if let Some(target) = *self.0.lock() {
            target.flag().store(0, Ordering::SeqCst);
        }
    }

    fn is_wanted(&self) -> bool {
        self.0.lock().is_some_and(|target| target.flag().load(Ordering::SeqCst) != 0)
    }
}

struct KickGuard<'a>(&'a Kick);

impl Drop for KickGuard<'_> {
    fn drop(&mut self) {
        *self.0.0.lock() = None;
    }
}

/// The first real-time signal, which Linux VMMs use for this by convention. A program that embeds
/// this VMM must not use it for something else.
fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}

fn install_signal_handler(vcpu: u32) -> Result<(), KvmError> {
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

    static ONCE: Once = Once::new();
    static FAILED: AtomicU8 = AtomicU8::new(0);
    ONCE.call_once(|| {
        // Without SA_RESTART, so that KVM_RUN returns. Without a handler the signal would not
        // interrupt it.
        if register_signal_handler(kick_signal(), nothing).is_err() {
            FAILED.store(1, Ordering::Relaxed);
        }
    });
    if FAILED.load(Ordering::Relaxed) != 0 {
        return Err(thread_error(
            vcpu,
            format!("cannot be interrupted: signal {} could not be handled", kick_signal()),
        ));
    }
    Ok(())
}
