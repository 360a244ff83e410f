//! Why a guest has stopped by itself.

use std::fmt;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Why the guest cannot continue. Only the first cause is kept, because others follow from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestStop {
    /// The vCPU on which it happened.
    pub vcpu: u32,
    /// The vCPU's instruction pointer, if known.
    pub rip: Option<u64>,
    /// The cause.
    pub cause: StopCause,
}

/// The cause of a guest's stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// The guest reported a panic on its pvpanic port.
    Panicked,
    /// A triple fault or a request to power off.
    Shutdown,
    /// KVM could not run the guest: `KVM_EXIT_INTERNAL_ERROR`.
    InternalError {
        /// KVM's code: 1 is an instruction that KVM cannot emulate.
        suberror: u32,
    },
    /// The processor refused the guest's state on entry.
    EntryFailed {
        /// The hardware's entry failure reason.
        reason: u64,
    },
    /// `KVM_RUN` failed.
    RunFailed {
        /// The operating system's error number.
        errno: i32,
    },
    /// An exit that this machine has no device for.
    Unexpected {
        /// KVM's name for the exit.
        exit: String,
    },
}

impl fmt::Display for GuestStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            StopCause::Panicked => write!(f, "the guest panicked")?,
            StopCause::Shutdown => write!(f, "the guest shut down or had a triple fault")?,
            StopCause::InternalError { suberror: 1 } => {
                write!(f, "KVM cannot emulate an instruction of the guest")?
            }
            StopCause::InternalError { suberror } => write!(f, "KVM internal error {suberror}")?,
            StopCause::EntryFailed { reason } => {
                write!(f, "the processor refused the guest's state ({reason:#x})")?
            }
            StopCause::RunFailed { errno } => {
                write!(f, "KVM_RUN failed: {}", std::io::Error::from_raw_os_error(*errno))?;
            }
            StopCause::Unexpected { exit } => write!(f, "unexpected exit {exit}")?,
        }
        write!(f, " on vCPU {}", self.vcpu)?;
        self.rip.map_or(Ok(()), |rip| write!(f, " at {rip:#x}"))
    }
}

/// Keeps the first cause, and lets a thread wait for it.
#[derive(Debug, Default)]
pub(super) struct StopRecord {
    first: Mutex<Option<GuestStop>>,
    changed: Condvar,
}

impl StopRecord {
    pub(super) fn record(&self, stop: GuestStop) {
        self.first.lock().get_or_insert(stop);
        self.changed.notify_all();
    }

    pub(super) fn first(&self) -> Option<GuestStop> {
        self.first.lock().clone()
    }

    pub(super) fn wait(&self, timeout: Duration) -> Option<GuestStop> {
        let mut first = self.first.lock();
        self.changed.wait_while_for(&mut first, |first| first.is_none(), timeout);
        first.clone()
    }
}
