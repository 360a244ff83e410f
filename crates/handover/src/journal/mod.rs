//! The journal: what each side has promised, on disk before it acts.
//!
//! One file per session and side, `SESSION.source.journal` or `SESSION.destination.journal`. A
//! record is one line, `crc32c(hex) SP json LF`, appended and synced before [`Journal::append`]
//! returns. A torn last line is a record that was never written; a damaged whole line
//! is an error, since no word may be given on such a file. People can read the files.

mod file;
mod order;
mod record;

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use self::file::FileJournal;
use self::file::{parse_name, path_of};
pub use self::order::{Order, Since, since, since_arrival, unfinished};
pub use self::record::{BadLine, BadRecord, Record, Side, decode, decode_line};
use crate::{
    DestinationEffect, DestinationState, GuestIdentity, SessionId, SessionWord, SourceEffect,
    SourceState,
};

/// Where records go. The engine uses [`FileJournal`]; simulations bring a disk of their own.
pub trait Journal: Send {
    /// Appends a record; on return it is on stable storage.
    ///
    /// # Errors
    /// The record may or may not be on disk then, and the journal takes no more records.
    fn append(&mut self, record: &Record) -> Result<(), JournalError>;
}

/// A journal that failed.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file or its directory could not be made, read, written or synced.
    #[error(
        "can't {action} the journal {path}: check that the disk is there, writable and not full, then try again"
    )]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// An earlier write failed, so that nobody knows what is on disk.
    #[error("the journal {path} failed before and takes no more records")]
    Poisoned {
        /// The file.
        path: PathBuf,
    },
    /// The file is not where it was made: whoever looks there would not find the promise.
    #[error(
        "the journal {path} was removed or replaced while its session goes on: leave the runtime directory alone, and \
         keep it where nothing tidies it up"
    )]
    Removed {
        /// The file.
        path: PathBuf,
    },
    /// A line before the last is damaged.
    #[error("the journal {path} is damaged at line {line}: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A newer release has written what may be a promise.
    #[error(
        "the journal {path}, line {line}: a newer vmferry has written a record `{record}` that this release does not know, so it \
         gives no word on this session: use the newer release until the session is over"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The record's kind.
        record: String,
    },
    /// Another process leads the session.
    #[error("the journal {path} is in use: the process that leads the session still lives")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A session of this number is in the directory already.
    #[error("the journal {path} exists already: a session number is used once")]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

/// What a directory of journals says of one session.
#[derive(Clone, Debug, Serialize)]
pub struct SessionSummary {
    /// The session.
    pub session: SessionId,
    /// Which half of the migration was on this host.
    pub side: Side,
    /// All records, oldest first.
    pub records: Vec<Record>,
    /// The verdict in one word.
    pub verdict: Verdict,
    /// Whether a process leads the session now, so that the verdict may still change.
    pub led: bool,
}

/// Who has the guest, by one side's journal alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// This host has it, or had it when it crashed.
    Here,
    /// The other host has it.
    There,
    /// The source has journalled COMMIT and knows nothing of what came of it.
    InDoubt,
}

impl SessionSummary {
    /// What these records of a side's journal say. `led`: whether a process leads the session now.
    #[must_use]
    pub fn new(session: SessionId, side: Side, records: Vec<Record>, led: bool) -> Self {
        let verdict = match side {
            Side::Source => match recover_source(&records).0 {
                SourceState::Given => Verdict::There,
                SourceState::InDoubt { .. } => Verdict::InDoubt,
                _ => Verdict::Here,
            },
            Side::Destination => match recover_destination(&records) {
                Some((DestinationState::Owns, _)) => Verdict::Here,
                _ => Verdict::There,
            },
        };
        Self { session, side, records, verdict, led }
    }

    /// The guest, if the first record is there.
    #[must_use]
    pub fn guest(&self) -> Option<&GuestIdentity> {
        self.records.iter().find_map(|record| match record {
            Record::Open { guest, .. } => Some(guest),
            _ => None,
        })
    }

    /// The process of the guest's VMM, if the first record says which one it was.
    #[must_use]
    pub fn process(&self) -> Option<&str> {
        self.records.iter().find_map(|record| match record {
            Record::Open { process, .. } => process.as_deref(),
            _ => None,
        })
    }

    /// Its place among the sessions of this host; the lowest if the first record is missing.
    #[must_use]
    pub fn order(&self) -> Order {
        Order::of(&self.records)
    }

    /// Whether this host was the source, and the process that led the session has died before its end: the
    /// guest may stand still, and somebody should recover it. A journal without a record is
    /// left by one that was killed, or had no room, before its session began: nobody was told of that.
    #[must_use]
    pub fn is_unfinished_source(&self) -> bool {
        let ended = |record: &Record| matches!(record, Record::Kept { .. } | Record::Given { .. });
        self.side == Side::Source
            && !self.led
            && !self.records.is_empty()
            && !self.records.iter().any(ended)
    }
}

/// Every session whose journal is in the directory; none if there is no such directory.
///
/// # Errors
/// The first file that can't be read, is damaged, or is a newer release's.
pub fn sessions(directory: &Path) -> Result<Vec<SessionSummary>, JournalError> {
    sessions_where(directory, |_| true)
}

/// The sessions of one guest. A journal of another one may be as it likes.
///
/// # Errors
/// The first file that can't be read, is damaged, or is a newer release's, and whose first record names this guest or
/// can't be read either.
pub fn sessions_of(
    directory: &Path,
    guest: &GuestIdentity,
) -> Result<Vec<SessionSummary>, JournalError> {
    let may_be_its = |path: &Path| match order::first_record(path) {
        Some(Record::Open { guest: its, .. }) => its == *guest,
        _ => true,
    };
    let mut sessions = sessions_where(directory, may_be_its)?;
    sessions.retain(|session| session.guest() == Some(guest));
    Ok(sessions)
}

/// The sessions of the guest that is in this process of a VMM. Names and UUIDs come again: what a
/// process has promised that is known to be another one was about a guest of before.
///
/// # Errors
/// As [`sessions_of`].
pub fn sessions_in(
    directory: &Path,
    guest: &GuestIdentity,
    process: Option<&str>,
) -> Result<Vec<SessionSummary>, JournalError> {
    let mut sessions = sessions_of(directory, guest)?;
    sessions.retain(|session| match (session.process(), process) {
        (Some(its), Some(process)) => its == process,
        _ => true,
    });
    Ok(sessions)
}

fn sessions_where(
    directory: &Path,
    wanted: impl Fn(&Path) -> bool,
) -> Result<Vec<SessionSummary>, JournalError> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => {
            return Err(JournalError::Io { action: "list", path: directory.to_owned(), source });
        }
    };
    let mut summaries = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some((session, side)) = name.to_str().and_then(parse_name) else { continue };
        if !wanted(&entry.path()) {
            continue;
        }
        // Before the records: a process that ends in between has written its last one.
        let led = file::is_locked(&path_of(directory, session, side));
        let records = read(directory, session, side)?;
        summaries.push(SessionSummary::new(session, side, records, led));
    }
    summaries.sort_by_key(|summary| (summary.order(), summary.session.to_string()));
    Ok(summaries)
}

/// The place of a destination's session among those of this host.
///
/// # Errors
/// As [`read`].
pub fn order_of(directory: &Path, session: SessionId) -> Result<Order, JournalError> {
    Ok(Order::of(&read(directory, session, Side::Destination)?))
}

/// The records of one session; empty if there is no such journal.
///
/// # Errors
/// [`JournalError::Damaged`] or I/O errors.
pub fn read(directory: &Path, session: SessionId, side: Side) -> Result<Vec<Record>, JournalError> {
    match file::read(&path_of(directory, session, side), side) {
        Ok((records, _)) => Ok(records),
        Err(JournalError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(Vec::new())
        }
        Err(error) => Err(error),
    }
}

/// Where a session stands at a destination that has only its journal, after a restart, and what
/// the process that has the guest now must do: `None` if the journal does not know the session.
#[must_use]
pub fn recover_destination(
    records: &[Record],
) -> Option<(DestinationState, &'static [DestinationEffect])> {
    let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
    crate::recover_destination(
        has(|r| matches!(r, Record::Open { .. })),
        has(|r| matches!(r, Record::RunIntent)),
        has(|r| matches!(r, Record::Aborted { .. })),
    )
}

/// Where a session stands at a source that has only its journal, after the process that led it has
/// died, and what the process that has the guest now must do.
#[must_use]
pub fn recover_source(records: &[Record]) -> (SourceState, &'static [SourceEffect]) {
    let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
    crate::recover_source(
        has(|r| matches!(r, Record::Commit)),
        has(|r| matches!(r, Record::Kept { .. })),
        has(|r| matches!(r, Record::Given { .. })),
    )
}

/// The word that this host, as a destination, may give about a session after a restart.
///
/// A session that was left open is closed first: ABORTED is written, then said. While another
/// process leads the session it is pending.
///
/// # Errors
/// If the journal can't be read, or ABORTED can't be written. No word may be given then.
pub fn recovered_word(directory: &Path, session: SessionId) -> Result<SessionWord, JournalError> {
    match recover_destination(&read(directory, session, Side::Destination)?) {
        None => Ok(SessionWord::Unknown),
        Some((DestinationState::AbortWriting, _)) => close_session(directory, session),
        Some((state, _)) => Ok(state.word()),
    }
}

/// The name that the source of a session went by when it was opened here; none if it showed no certificate or the
/// session is not known.
///
/// # Errors
/// If the journal can't be read.
pub fn source_of(directory: &Path, session: SessionId) -> Result<Option<String>, JournalError> {
    let records = read(directory, session, Side::Destination)?;
    Ok(records.into_iter().find_map(|record| match record {
        Record::Open { peer_names, .. } => peer_names.into_iter().next(),
        _ => None,
    }))
}

fn close_session(directory: &Path, session: SessionId) -> Result<SessionWord, JournalError> {
    let (mut journal, records) = match FileJournal::reopen(directory, session, Side::Destination) {
        Err(JournalError::InUse { .. }) => return Ok(SessionWord::Pending),
        other => other?,
    };
    // Whoever held the lock may have written its word since the first look.
    match recover_destination(&records) {
        Some((DestinationState::AbortWriting, _)) => {
            journal.append(&Record::Aborted { reason: "the destination was restarted".into() })?;
            Ok(SessionWord::Aborted)
        }
        recovered => Ok(recovered.map_or(SessionWord::Unknown, |(state, _)| state.word())),
    }
}

#[cfg(test)]
mod tests;
