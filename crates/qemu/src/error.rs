//! Errors of a QEMU process.

use std::path::PathBuf;
use std::time::Duration;

use vmferry::vmm::told::Told;
use vmferry_wire::SessionId;

use crate::qmp::{QmpError, shown};

/// Why a QEMU can't be migrated, or why its migration failed.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// QMP failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The process is not accessible.
    #[error(
        "can't {action} of QEMU's process {pid}: run vmferry as root, or as the user that runs \
         QEMU where ptrace is allowed"
    )]
    Process {
        /// What was tried.
        action: &'static str,
        /// The process.
        pid: u32,
        /// The system error.
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
    /// A device or setting forbids the migration.
    #[error("this guest can't be migrated: {}", shown(.0))]
    Unsupported(String),
    /// The guest can't be attached; QEMU's own migration may work.
    #[error("this guest can't be attached: {}", shown(.0))]
    Unattachable(String),
    /// QEMU is not in the required state.
    #[error("QEMU is `{}`, and must be {wanted}", shown(found))]
    State {
        /// `query-status`, or the migration's status.
        found: String,
        /// The required state, and how to get there.
        wanted: &'static str,
    },
    /// Its process is not visible from here.
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
        /// The lock's holder, if it is visible from here.
        by: Option<u32>,
    },
    /// The guest has powered off.
    #[error("there is nothing to move")]
    PoweredOff(#[source] vmferry::PoweredOff),
    /// Its process is stopped.
    #[error(
        "QEMU's process {pid} has been stopped for {} s: continue it with `kill -CONT {pid}`",
        after.as_secs()
    )]
    Stopped {
        /// The process.
        pid: u32,
        /// How long the wait was.
        after: Duration,
    },
    /// It was told to quit, and has not ended.
    #[error(
        "QEMU's process {pid} was told to end and has not ended within {} s: it waits for its \
         disks. Look at their storage, or end it with `kill -KILL {pid}`",
        after.as_secs()
    )]
    NotEnded {
        /// The process.
        pid: u32,
        /// How long the wait was.
        after: Duration,
    },
    /// Another QEMU answers at the socket.
    #[error("the QEMU at this socket is process {found}, and the guest was in process {wanted}")]
    Another {
        /// The process there.
        found: u32,
        /// The expected process.
        wanted: u32,
    },
    /// The guest belongs to a later session.
    #[error("the guest was sent again since, by session {session}: it is no longer this one's")]
    SentAgain {
        /// The later session.
        session: SessionId,
    },
    /// The guest may belong to another session.
    #[error(
        "the guest was given away by session {session}, whose journal has no number, and by this \
         host's clock, which may have been wrong, that was later: where the journals of the other \
         host do not say that it has the guest, `cont` in QEMU's monitor continues it"
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
    /// QEMU's own post-copy has failed. Its guest stays paused.
    #[error("QEMU has given its post-copy up: {}", shown(reason))]
    PostCopyFailed {
        /// QEMU's reason.
        reason: String,
        /// What this means for the guest.
        #[source]
        source: vmferry::PostCopyFailed,
    },
    /// QEMU has ended while it received a guest.
    #[error(
        "QEMU could not take the guest and has ended{}",
        unless(printed, ": what it has printed says why")
    )]
    EndedTaking {
        /// What QEMU has printed, if it is known here.
        #[source]
        printed: Option<Told>,
    },
    /// A thread of QEMU could not be made to execute a system call.
    #[error("no userfaultfd could be had from QEMU's process {pid}: {}", shown(why))]
    Inject {
        /// The process.
        pid: u32,
        /// Why.
        why: String,
    },
    /// Nothing could report the missing pages of a guest.
    #[error(
        "{why}. It needs no such right if vmferry's user can read /dev/userfaultfd, but vmferry \
         {device}"
    )]
    NoFaults {
        /// Why QEMU could create no userfaultfd.
        why: String,
        /// Why vmferry could not open the device.
        device: String,
    },
    /// A guest has devices that free pages.
    #[error("it has a balloon or virtio-mem, which free pages while others are missing")]
    FreesPages,
    /// A guest's memory is on hugetlbfs.
    #[error("its memory is on hugetlbfs, where QEMU's threads can't wait for parts of a huge page")]
    HugePages,
    /// A guest lacks pages, and nothing reports when it touches one.
    #[error(
        "QEMU's process {pid} no longer reports missing pages: what the guest lacked reads as \
         zeros there, and the guest is damaged. End this QEMU, and start the guest again from its disks"
    )]
    NotReported {
        /// The process.
        pid: u32,
    },
    /// A guest lacks pages that are at another host.
    #[error(
        "the guest in QEMU's process {pid} lacks pages that have not arrived yet: let its receiver \
         fetch them first"
    )]
    LacksPages {
        /// The process.
        pid: u32,
    },
    /// The two QEMUs have the same file.
    #[error(
        "source and destination have the same memory file {path}: give the destination a file of \
         its own"
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
    /// It can't be known whether another process has a memory file mapped.
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
        /// Why it can't be known.
        why: String,
    },
    /// A QEMU that was started has ended by itself.
    #[error("QEMU has ended ({status}){}", unless(printed, ": its own message says why"))]
    Ended {
        /// Its exit status.
        status: std::process::ExitStatus,
        /// What QEMU has printed, if it is known here.
        #[source]
        printed: Option<Told>,
    },
    /// An operation on local files or sockets failed.
    #[error("can't {action}")]
    Local {
        /// What was tried.
        action: &'static str,
        /// The system error.
        #[source]
        source: std::io::Error,
    },
}

/// A hint where to find QEMU's output, unless the output is part of the error.
fn unless<'a>(printed: &Option<Told>, hint: &'a str) -> &'a str {
    if printed.is_some() { "" } else { hint }
}

/// The holder of a QEMU's lock, in words.
fn holder(by: Option<u32>) -> String {
    by.map_or_else(
        || "a process that can't be seen from here".to_owned(),
        |by| format!("process {by}"),
    )
}

impl QemuError {
    /// Whether QEMU may simply be slow: the operation may be retried.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::Qmp(error) => error.is_timeout(),
            Self::NotEnded { .. } => true,
            _ => false,
        }
    }

    /// The same for an error that an embedder received.
    #[must_use]
    pub fn is_timeout_of(error: &vmferry::VmError) -> bool {
        error.downcast_ref::<Self>().is_some_and(Self::is_timeout)
            || error.downcast_ref::<QmpError>().is_some_and(QmpError::is_timeout)
    }

    /// Whether an embedder's error says that the guest belongs to a later session.
    #[must_use]
    pub fn is_sent_again(error: &vmferry::VmError) -> bool {
        matches!(error.downcast_ref(), Some(Self::SentAgain { .. }))
    }

    /// Converts an error of a QEMU that was receiving a guest: a QEMU that can't load a guest
    /// prints the reason and ends, which closes the connection.
    pub(crate) fn while_taking(self) -> Self {
        match self {
            Self::Qmp(QmpError::Io { .. } | QmpError::Ended { .. }) => {
                Self::EndedTaking { printed: None }
            }
            other => other,
        }
    }

    /// Adds the last output of the QEMU, for both hosts, to an error that it may explain.
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
    pub fn look_again(&mut self, is_stopped: &dyn Fn(u32) -> bool, process: Option<u32>) {
        if let Self::Qmp(error) = self {
            error.look_again(is_stopped, process);
        }
    }

    /// The same for an error that an embedder received.
    pub fn look_again_in(
        error: &mut vmferry::VmError,
        is_stopped: &dyn Fn(u32) -> bool,
        process: Option<u32>,
    ) {
        if let Some(error) = error.downcast_mut::<Self>() {
            error.look_again(is_stopped, process);
        } else if let Some(error) = error.downcast_mut::<QmpError>() {
            error.look_again(is_stopped, process);
        }
    }

    /// Whether this prevents only attaching to a QEMU, so that carrying the guest may work.
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
            | Self::NoFaults { .. }
            | Self::FreesPages
            | Self::HugePages
            | Self::NotReported { .. }
            | Self::LacksPages { .. }
            | Self::NotEnded { .. }
            | Self::Locked { .. }
            | Self::Another { .. }
            | Self::SentAgain { .. }
            | Self::MayBeGiven { .. }
            | Self::GivenUp { .. }
            | Self::PostCopyFailed { .. }
            | Self::EndedTaking { .. }
            | Self::SameFile { .. }
            | Self::FileInUse { .. }
            | Self::Ended { .. }
            | Self::Local { .. } => false,
        }
    }
}
