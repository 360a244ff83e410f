//! What goes wrong with a QEMU process.

use std::path::PathBuf;
use std::time::Duration;

use vmferry::told::Told;
use vmferry_wire::SessionId;

use crate::qmp::{QmpError, shown};
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
    #[error("the guest's memory `{}` {}", shown(block), shown(why))]
    Memory {
        /// QEMU's name of the RAM block.
        block: String,
        /// Why, and what to change.
        why: String,
    },
    /// A device or setting forbids it.
    #[error("this guest can't be migrated: {}", shown(.0))]
    Unsupported(String),
    /// The guest can't be moved from outside; QEMU itself may be able to.
    #[error("this guest can't be attached: {}", shown(.0))]
    Unattachable(String),
    /// QEMU is not in the state in which this can be done.
    #[error("QEMU is `{}`, and must be {wanted}", shown(found))]
    State {
        /// `query-status`, or the migration's status.
        found: String,
        /// What it should be, and how to get there.
        wanted: &'static str,
    },
    /// Its process is not seen from here.
    #[error(
        "the process of the QEMU at {path} can't be found from here: it is in another PID \
         namespace, or its files in /proc may not be read. Run vmferry where that process is seen, \
         and as root or as QEMU's user"
    )]
    Unseen {
        /// The QMP socket.
        path: PathBuf,
    },
    /// Another vmferry works on it.
    #[error(
        "QEMU's process {pid} is in the hands of {}: one vmferry at a time works on a QEMU, \
         whichever of its sockets it uses. Wait until that one has ended",
        holder(*by)
    )]
    Locked {
        /// QEMU.
        pid: u32,
        /// Who has it, if it is seen from here.
        by: Option<u32>,
    },
    /// The guest has powered off.
    #[error("there is nothing to move")]
    PoweredOff(#[source] vmferry::PoweredOff),
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
    /// It was told to end, and has not.
    #[error(
        "QEMU's process {pid} was told to end and has not ended within {} s: it waits for its \
         disks. Look at their storage, or end it with `kill -KILL {pid}`",
        after.as_secs()
    )]
    NotEnded {
        /// The process.
        pid: u32,
        /// For how long it was waited for.
        after: Duration,
    },
    /// Another QEMU answers at the socket.
    #[error("the QEMU at this socket is process {found}, and the guest was in process {wanted}")]
    Another {
        /// The process there.
        found: u32,
        /// The process that was meant.
        wanted: u32,
    },
    /// The guest is another session's.
    #[error("the guest was sent again since, by session {session}: it is no longer this one's")]
    SentAgain {
        /// The later session.
        session: SessionId,
    },
    /// The guest may be another session's.
    #[error(
        "the guest was given away by session {session}, whose journal has no number, and by this host's clock, which may have \
         been wrong, that was later: where `vmferry status --sessions` on the other host does not say that it has the guest, \
         `cont` in QEMU's monitor continues it"
    )]
    MayBeGiven {
        /// The session that gave it away.
        session: SessionId,
    },
    /// QEMU's own migration has failed.
    #[error(
        "QEMU has given its migration up: {}{}",
        shown(reason),
        unless(printed, " (what it has printed may say more)")
    )]
    GivenUp {
        /// QEMU's reason.
        reason: String,
        /// What QEMU has printed, if it is known here.
        #[source]
        printed: Option<Told>,
    },
    /// QEMU has ended while it took a guest.
    #[error(
        "QEMU could not take the guest and has ended{}",
        unless(printed, ": what it has printed says why")
    )]
    EndedTaking {
        /// What QEMU has printed, if it is known here.
        #[source]
        printed: Option<Told>,
    },
    /// A thread of QEMU could not be made to make a system call.
    #[error("no userfaultfd could be had from QEMU's process {pid}: {}", shown(why))]
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
    /// Another process has a memory file mapped.
    #[error(
        "the memory file {} of `{}` is another process's too: {pid} ({}) has it mapped, and may \
         run a guest on it: give this QEMU a memory file of its own (`mem-path`), or end that \
         process",
        shown(path),
        shown(block),
        shown(name)
    )]
    FileInUse {
        /// QEMU's name of the RAM block.
        block: String,
        /// The file.
        path: String,
        /// The other process.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// It can't be known whether anybody else has a memory file mapped.
    #[error(
        "the memory file {} of `{}` may be another process's too, and is not emptied: {}. \
         Run vmferry as root, where it sees all processes of this machine",
        shown(path),
        shown(block),
        shown(why)
    )]
    Unproved {
        /// QEMU's name of the RAM block.
        block: String,
        /// The file.
        path: String,
        /// Why not.
        why: String,
    },
    /// A QEMU that was started has ended by itself.
    #[error("QEMU has ended ({status}){}", unless(printed, ": its own message says why"))]
    Ended {
        /// How.
        status: std::process::ExitStatus,
        /// What QEMU has printed, if it is known here.
        #[source]
        printed: Option<Told>,
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

/// Where to look for what QEMU has printed, unless it follows.
fn unless<'a>(printed: &Option<Told>, hint: &'a str) -> &'a str {
    if printed.is_some() { "" } else { hint }
}

/// Who has a QEMU.
fn holder(by: Option<u32>) -> String {
    by.map_or_else(
        || "a process that can't be seen from here".to_owned(),
        |by| format!("process {by}"),
    )
}

impl QemuError {
    /// Whether QEMU may just not have got to it yet: it may be tried again.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::Qmp(error) => error.is_timeout(),
            Self::NotEnded { .. } => true,
            _ => false,
        }
    }

    /// The same of what an embedder was told.
    #[must_use]
    pub fn is_timeout_of(error: &vmferry::VmError) -> bool {
        error.downcast_ref::<Self>().is_some_and(Self::is_timeout)
            || error.downcast_ref::<QmpError>().is_some_and(QmpError::is_timeout)
    }

    /// Whether an embedder was told that the guest is a later session's.
    #[must_use]
    pub fn is_sent_again(error: &vmferry::VmError) -> bool {
        matches!(error.downcast_ref(), Some(Self::SentAgain { .. }))
    }

    /// Of a QEMU that was taking a guest: its connection ends when it does, since a QEMU that can't
    /// load a guest prints why and ends.
    pub(crate) fn while_taking(self) -> Self {
        match self {
            Self::Qmp(QmpError::Io { .. }) => Self::EndedTaking { printed: None },
            other => other,
        }
    }

    /// Adds what the QEMU has printed last, for both hosts, where it has failed.
    #[must_use]
    pub(crate) fn with_words(mut self, words: impl FnOnce() -> Option<String>) -> Self {
        if let Self::GivenUp { printed, .. }
        | Self::EndedTaking { printed }
        | Self::Ended { printed, .. } = &mut self
            && printed.is_none()
        {
            *printed = words().map(|words| Told::failed(format!("QEMU has printed: {words}")));
        }
        self
    }

    /// See [`QmpError::look_again`].
    pub fn look_again(&mut self, view: &dyn View, process: Option<u32>) {
        if let Self::Qmp(error) = self {
            error.look_again(view, process);
        }
    }

    /// The same in what an embedder is told.
    pub fn look_again_in(error: &mut vmferry::VmError, view: &dyn View, process: Option<u32>) {
        if let Some(error) = error.downcast_mut::<Self>() {
            error.look_again(view, process);
        } else if let Some(error) = error.downcast_mut::<QmpError>() {
            error.look_again(view, process);
        }
    }

    /// Whether this stands against attaching to a QEMU only, whose own migration may well work.
    #[must_use]
    pub fn is_of_attaching(&self) -> bool {
        match self {
            Self::Memory { .. }
            | Self::Unseen { .. }
            | Self::Unproved { .. }
            | Self::Unattachable(_)
            | Self::Process { .. }
            | Self::Inject { .. } => true,
            Self::Qmp(_)
            | Self::Unsupported(_)
            | Self::State { .. }
            | Self::PoweredOff(_)
            | Self::Stopped { .. }
            | Self::NotEnded { .. }
            | Self::Locked { .. }
            | Self::Another { .. }
            | Self::SentAgain { .. }
            | Self::MayBeGiven { .. }
            | Self::GivenUp { .. }
            | Self::EndedTaking { .. }
            | Self::SameFile { .. }
            | Self::FileInUse { .. }
            | Self::Ended { .. }
            | Self::Local { .. } => false,
        }
    }
}
