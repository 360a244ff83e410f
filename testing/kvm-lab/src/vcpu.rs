//! A vCPU, leased to the caller that runs it.
//!
//! Rule that the `unsafe` here upholds: the `immediate_exit` byte is in the vCPU's shared `kvm_run`
//! page, which is mapped as long as its `VcpuFd` exists. The `VcpuFd` is in its [`Vcpu`] or in a
//! [`Lease`] of it, which holds the [`Vcpu`] and puts it back. So the byte exists as long as the
//! [`Vcpu`] does.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;
use kvm_ioctls::{VcpuExit, VcpuFd};
use parking_lot::Mutex;

use crate::guest::Entry;
use crate::{LabError, Shared};

pub(crate) struct Vcpu {
    index: usize,
    immediate_exit: *const AtomicU8,
    /// `None` while it is leased.
    fd: Mutex<Option<VcpuFd>>,
    pub(crate) shared: Arc<Shared>,
}

// SAFETY: `immediate_exit` points to an atomic that is valid as long as the `Vcpu` (see the top of
// the file); everything else is `Send` and `Sync` by itself.
unsafe impl Send for Vcpu {}
// SAFETY: as above.
unsafe impl Sync for Vcpu {}

/// A vCPU in use. Dropping it returns the vCPU.
pub(crate) struct Lease {
    vcpu: Arc<Vcpu>,
    /// `Some` until it is dropped.
    fd: Option<VcpuFd>,
}

/// Why `KVM_RUN` has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// The work is done.
    Done,
    /// Nothing is pending: the cause was a signal, or `immediate_exit`.
    Interrupted,
}

impl Vcpu {
    pub(crate) fn new(index: usize, mut fd: VcpuFd, shared: Arc<Shared>) -> Result<Self, LabError> {
        let mut sregs = fd.get_sregs().map_err(LabError::kvm("KVM_GET_SREGS"))?;
        shared.placement.set_mode(&mut sregs);
        fd.set_sregs(&sregs).map_err(LabError::kvm("KVM_SET_SREGS"))?;
        let immediate_exit = (&raw mut fd.get_kvm_run().immediate_exit).cast::<AtomicU8>();
        Ok(Self { index, immediate_exit, fd: Mutex::new(Some(fd)), shared })
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Makes the next `KVM_RUN`, or the one that a signal interrupts, return.
    pub(crate) fn set_immediate_exit(&self, on: bool) {
        // SAFETY: see the top of the file. The kernel reads the byte at any time.
        unsafe { &*self.immediate_exit }.store(on.into(), Ordering::SeqCst);
    }

    pub(crate) fn lease(self: &Arc<Self>) -> Result<Lease, LabError> {
        let fd = self.fd.lock().take();
        match fd {
            Some(fd) => Ok(Lease { vcpu: Arc::clone(self), fd: Some(fd) }),
            None => Err(LabError::Busy { vcpu: self.index }),
        }
    }
}

impl Lease {
    pub(crate) fn vcpu(&self) -> &Arc<Vcpu> {
        &self.vcpu
    }

    pub(crate) fn fd(&mut self) -> &mut VcpuFd {
        self.fd.as_mut().expect("it is taken by drop alone")
    }

    /// Sets the registers for an entry.
    pub(crate) fn enter(&mut self, entry: Entry) -> Result<(), LabError> {
        let registers = self.vcpu.shared.placement.registers(entry);
        self.fd().set_regs(&registers).map_err(LabError::kvm("KVM_SET_REGS"))
    }

    /// Runs an entry that ends.
    pub(crate) fn call(&mut self, entry: Entry) -> Result<(), LabError> {
        self.enter(entry)?;
        while self.run()? == Left::Interrupted {}
        // The doorbell write completes only when KVM_RUN is called again (api.rst, 5 "kvm_run").
        self.vcpu.set_immediate_exit(true);
        let completed = self.run();
        self.vcpu.set_immediate_exit(false);
        completed.map(drop)
    }

    /// Runs until the work is done or a signal arrives. Full dirty rings are handled.
    pub(crate) fn run(&mut self) -> Result<Left, LabError> {
        let (vcpu, shared) = (self.vcpu.index, Arc::clone(&self.vcpu.shared));
        let exit = loop {
            break match self.fd().run() {
                Ok(VcpuExit::MmioWrite(gpa, _)) if gpa == shared.placement.doorbell() => {
                    return Ok(Left::Done);
                }
                // kvm-ioctls 0.25 has no name for it.
                Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => {
                    shared.ring_full(vcpu)?;
                    continue;
                }
                Ok(VcpuExit::Intr) => continue,
                Ok(exit) => format!("{exit:?}"),
                Err(error) if error.errno() == libc::EINTR => return Ok(Left::Interrupted),
                Err(error) if error.errno() == libc::EAGAIN => continue,
                Err(error) => format!("an error of KVM_RUN ({error})"),
            };
        };
        let rip = self.fd().get_regs().map_or(0, |regs| regs.rip);
        Err(LabError::Exit { vcpu, exit, rip })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        *self.vcpu.fd.lock() = self.fd.take();
    }
}

/// The signal that makes a thread leave the guest: the first real-time signal, as is the convention
/// of VMMs.
pub(crate) fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN()
}

/// Installs a handler that does nothing. Without it the signal would kill the process.
pub(crate) fn install_signal_handler() -> Result<(), LabError> {
    extern "C" fn nothing(_signal: libc::c_int) {}

    static FAILED: OnceLock<Option<i32>> = OnceLock::new();
    let failed = FAILED.get_or_init(|| {
        // SAFETY: all zeroes are a valid `sigaction`: no flags (so KVM_RUN is not restarted), an
        // empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as *const () as libc::sighandler_t;
        // SAFETY: the handler does nothing, so it may run at any point of any thread.
        let result =
            unsafe { libc::sigaction(kick_signal(), &raw const action, std::ptr::null_mut()) };
        (result < 0).then(|| io::Error::last_os_error().raw_os_error().unwrap_or_default())
    });
    match failed {
        None => Ok(()),
        Some(errno) => Err(LabError::System {
            what: "a signal handler",
            source: io::Error::from_raw_os_error(*errno),
        }),
    }
}
