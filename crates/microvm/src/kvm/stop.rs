//! Why a guest stopped by itself.

use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// That the guest cannot go on, and why. Only the first cause is kept: others follow from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestStop {
    /// The vCPU that met it.
    pub vcpu: u32,
    /// What it was doing, if KVM says.
    pub rip: Option<u64>,
    /// What happened.
    pub cause: StopCause,
}

/// What stopped a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// The guest said so at its pvpanic port.
    Panicked,
    /// A triple fault or a request to power off.
    Shutdown,
    /// KVM could not run it: `KVM_EXIT_INTERNAL_ERROR`.
    InternalError {
        /// KVM's code: 1 is an instruction that it cannot emulate.
        suberror: u32,
    },
    /// The processor refused the guest's state.
    EntryFailed {
        /// The processor's reason.
        reason: u64,
    },
    /// `KVM_RUN` failed.
    RunFailed {
        /// The operating system's error number.
        errno: i32,
    },
    /// An exit that this machine has no device for.
    Unexpected {
        /// KVM's name of it.
        exit: String,
    },
}

impl fmt::Display for GuestStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            StopCause::Panicked => write!(f, "the guest panicked")?,
            StopCause::Shutdown => write!(f, "the guest shut down or met a triple fault")?,
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

/// Where the first cause is kept and waited for.
#[derive(Debug, Default)]
pub(super) struct StopRecord {
    first: Mutex<Option<GuestStop>>,
    changed: Condvar,
}

impl StopRecord {
    pub(super) fn record(&self, stop: GuestStop) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(stop);
        self.changed.notify_all();
    }

    pub(super) fn first(&self) -> Option<GuestStop> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn wait(&self, timeout: Duration) -> Option<GuestStop> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(first, timeout, |first| first.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }
}
