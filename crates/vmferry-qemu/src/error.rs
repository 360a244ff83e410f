//! What goes wrong with a QEMU process.

use std::path::PathBuf;
use std::time::Duration;

use crate::qmp::QmpError;
use crate::starter::View;

/// Why a QEMU can't be migrated, or could not be.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// QMP failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The process can't be looked at.
    #[error(
        "can't {action} of QEMU's process {pid}: run vmferry as root, or as the user that runs QEMU where ptrace is allowed"
    )]
    Process {
        /// What was tried.
        action: &'static str,
        /// The process.
        pid: u32,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A part of the guest's memory can't be carried.
    #[error("the guest's memory `{block}` {why}")]
    Memory {
        /// QEMU's name of the RAM block.
        block: String,
        /// Why, and what to change.
        why: String,
    },
    /// A device or setting forbids it.
    #[error("this guest can't be migrated: {0}")]
    Unsupported(String),
    /// The guest can't be moved from outside; QEMU itself may be able to.
    #[error("this guest can't be attached: {0}")]
    Unattachable(String),
    /// QEMU is not in the state in which this can be done.
    #[error("QEMU is `{found}`, and must be {wanted}")]
    State {
        /// `query-status`, or the migration's status.
        found: String,
        /// What it should be, and how to get there.
        wanted: &'static str,
    },
    /// Its process stands still.
    #[error(
        "QEMU's process {pid} is stopped for {} s now, and goes on with `kill -CONT {pid}`", after.as_secs()
    )]
    Stopped {
        /// The process.
        pid: u32,
        /// For how long it was waited for.
        after: Duration,
    },
    /// Another QEMU is behind the socket.
    #[error("the QEMU at this socket is process {found}, and the guest was in process {wanted}")]
    Another {
        /// The process there.
        found: u32,
        /// The process that was meant.
        wanted: u32,
    },
    /// QEMU's own migration has failed.
    #[error("QEMU has given its migration up: {reason} (what it has printed may say more)")]
    GivenUp {
        /// QEMU's reason.
        reason: String,
    },
    /// QEMU has ended while it took a guest.
    #[error("QEMU could not take the guest and has ended: what it has printed says why")]
    EndedTaking,
    /// A thread of QEMU could not be made to make a system call.
    #[error("no userfaultfd could be had from QEMU's process {pid}: {why}")]
    Inject {
        /// The process.
        pid: u32,
        /// Why.
        why: String,
    },
    /// The two QEMUs have the same file.
    #[error(
        "source and destination have the same memory file {path}: give the destination a file of its own"
    )]
    SameFile {
        /// The file.
        path: PathBuf,
    },
    /// A QEMU that was started has ended at once.
    #[error("QEMU has ended before it could take a guest ({status}): its own message says why")]
    Ended {
        /// How.
        status: std::process::ExitStatus,
    },
    /// Local files and sockets.
    #[error("can't {action}")]
    Local {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

impl QemuError {
    /// Whether QEMU may just not have got to it yet: it may be tried again.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Qmp(error) if error.is_timeout())
    }

    /// The same of what an embedder was told.
    #[must_use]
    pub fn is_timeout_of(error: &vmferry::VmError) -> bool {
        error.downcast_ref::<Self>().is_some_and(Self::is_timeout)
            || error.downcast_ref::<QmpError>().is_some_and(QmpError::is_timeout)
    }

    /// See [`QmpError::look_again`].
    pub fn look_again(&mut self, view: &dyn View) {
        if let Self::Qmp(error) = self {
            error.look_again(view);
        }
    }

    /// The same in what an embedder is told.
    pub fn look_again_in(error: &mut vmferry::VmError, view: &dyn View) {
        if let Some(error) = error.downcast_mut::<Self>() {
            error.look_again(view);
        } else if let Some(error) = error.downcast_mut::<QmpError>() {
            error.look_again(view);
        }
    }

    /// Whether this stands against attaching to a QEMU only, whose own migration may well work.
    #[must_use]
    pub fn is_of_attaching(&self) -> bool {
        match self {
            Self::Memory { .. }
            | Self::Unattachable(_)
            | Self::Process { .. }
            | Self::Inject { .. } => true,
            Self::Qmp(_)
            | Self::Unsupported(_)
            | Self::State { .. }
            | Self::Stopped { .. }
            | Self::Another { .. }
            | Self::GivenUp { .. }
            | Self::EndedTaking
            | Self::SameFile { .. }
            | Self::Ended { .. }
            | Self::Local { .. } => false,
        }
    }
}
