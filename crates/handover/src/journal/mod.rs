//! The journal: each side's promises, on disk before the side acts on them.
//!
//! There is one file per session and side: `SESSION.source.journal` or
//! `SESSION.destination.journal`. A record is one line, `crc32c(hex) SP json LF`. It is appended
//! and synced before [`Journal::append`] returns. A torn last line is a record that was never
//! written. A damaged complete line is an error, because the lost record may have been a promise.
//! The files are readable text.

mod file;
mod list;
mod lock;
mod order;
mod record;

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use self::file::{FileJournal, Opening, RecordFile};
use self::file::{parse_name, path_of};
pub use self::list::{SessionRecords, record_files, recorded_sessions, records_of};
pub use self::order::{
    LaterSession, Order, later_session, later_session_after_arrival, unfinished,
};
pub use self::record::{BadLine, BadRecord, JournalRecord, Record, Side, decode, decode_line};
use crate::{
    DestinationEffect, DestinationRecords, DestinationState, GuestIdentity, OperatorWord,
    SessionId, SessionKind, SessionWord, SourceEffect, SourceRecords, SourceState, WitnessId,
};

/// Storage for records. The engine uses [`FileJournal`]; the simulation provides its own.
pub trait Journal: Send {
    /// Appends a record. On return it is on stable storage.
    ///
    /// # Errors
    /// The record may or may not be on disk. The journal accepts no more records.
    fn append(&mut self, record: &Record) -> Result<(), JournalError>;
}

/// An error of a journal.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file or its directory could not be created, read, written or synced.
    #[error(
        "can't {action} the journal {path}: check that the disk is there, writable and not full, \
        then try again"
    )]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// An earlier write failed, so it is unknown what is on disk.
    #[error("an earlier write to the journal {path} failed, so it accepts no more records")]
    Poisoned {
        /// The file.
        path: PathBuf,
    },
    /// The path no longer names this file, so another process would not find the promise.
    #[error(
        "the journal {path} was removed or replaced during its session: do not delete files of \
        the state directory, and keep it away from cleanup jobs"
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
    /// A newer release has written a record that may be a promise.
    #[error(
        "the journal {path}, line {line}: a newer vmferry has written a record `{record}` that \
        this release does not know, so it cannot answer for this session: use the newer release \
        until the session has ended"
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
    #[error("the journal {path} is in use: the process that leads the session is still running")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The directory already has a journal for this session.
    #[error("the journal {path} already exists: a session number is used only once")]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

/// The content of one session's journal.
#[derive(Clone, Debug, Serialize)]
pub struct SessionSummary {
    /// The session.
    pub session: SessionId,
    /// The role of this host in the migration.
    pub side: Side,
    /// All records, oldest first.
    pub records: Vec<Record>,
    /// The conclusion from the records.
    pub verdict: Verdict,
    /// Whether a process leads the session now, so that the verdict may still change.
    pub led: bool,
}

/// Which host has the guest, according to one side's journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// This host has the guest, or had it when the host crashed.
    Here,
    /// The other host has it.
    There,
    /// The source has journaled COMMIT, and its journal does not say how the handover ended.
    InDoubt,
}

impl SessionSummary {
    /// Summarizes the records of one side's journal. `led` says whether a process leads the session
    /// now.
    #[must_use]
    pub fn new(session: SessionId, side: Side, records: Vec<Record>, led: bool) -> Self {
        let verdict = match side {
            Side::Source => match recover_source(&records).0 {
                SourceState::Given | SourceState::Serving => Verdict::There,
                SourceState::InDoubt { .. } => Verdict::InDoubt,
                _ => Verdict::Here,
            },
            Side::Destination => match recover_destination(&records) {
                Some((state, _)) if state.may_run() => Verdict::Here,
                _ => Verdict::There,
            },
        };
        Self { session, side, records, verdict, led }
    }

    /// The guest, if the first record is present.
    #[must_use]
    pub fn guest(&self) -> Option<&GuestIdentity> {
        self.records.iter().find_map(|record| match record {
            Record::Open { guest, .. } => Some(guest),
            _ => None,
        })
    }

    /// The process of the guest's VMM, if the first record names it.
    #[must_use]
    pub fn process(&self) -> Option<&str> {
        self.records.iter().find_map(|record| match record {
            Record::Open { process, .. } => process.as_deref(),
            _ => None,
        })
    }

    /// The session's witness, if the first record names one.
    #[must_use]
    pub fn witness(&self) -> Option<&WitnessId> {
        witness_of(&self.records)
    }

    /// The session's place among the sessions of this host; the lowest if the first record is
    /// missing.
    #[must_use]
    pub fn order(&self) -> Order {
        Order::of(&self.records)
    }

    /// Whether the guest runs at the destination and may still lack pages of the source.
    #[must_use]
    pub fn lacks_pages(&self) -> bool {
        match self.side {
            Side::Source => recover_source(&self.records).0 == SourceState::Serving,
            Side::Destination => recover_destination(&self.records)
                .is_some_and(|(state, _)| state == DestinationState::Fetching),
        }
    }

    /// Whether this host was the source and the process that led the session died before its end.
    /// The guest may be paused then, and needs recovery. A journal without records does not count:
    /// its process was killed or had no disk space before the session began, so nothing was
    /// promised.
    #[must_use]
    pub fn is_unfinished_source(&self) -> bool {
        let ended = |record: &Record| matches!(record, Record::Kept { .. } | Record::Given { .. });
        self.side == Side::Source
            && !self.led
            && !self.records.is_empty()
            && !self.records.iter().any(ended)
    }
}

/// All sessions with a journal in the directory; empty if the directory does not exist.
///
/// # Errors
/// The first file that cannot be read, is damaged, or was written by a newer release.
pub fn sessions(directory: &Path) -> Result<Vec<SessionSummary>, JournalError> {
    sessions_where(directory, |_| true)
}

/// The sessions of one guest. Journals of other guests may be damaged.
///
/// # Errors
/// The first file that cannot be read, is damaged, or was written by a newer release, if its first
/// record names this guest or is unreadable too.
pub fn sessions_of(
    directory: &Path,
    guest: &GuestIdentity,
) -> Result<Vec<SessionSummary>, JournalError> {
    let may_match = |path: &Path| match order::first_record(path) {
        Some(Record::Open { guest: found, .. }) => found == *guest,
        _ => true,
    };
    let mut sessions = sessions_where(directory, may_match)?;
    sessions.retain(|session| session.guest() == Some(guest));
    Ok(sessions)
}

/// The sessions of the guest in this VMM process. Names and UUIDs are reused, so sessions that
/// another process is known to have led are about an earlier guest.
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
        (Some(recorded), Some(process)) => recorded == process,
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
        // Checked before the records are read: a process that ends in between has written its last
        // record.
        let led = lock::is_locked(&path_of(directory, session, side));
        let records = read(directory, session, side)?;
        summaries.push(SessionSummary::new(session, side, records, led));
    }
    summaries.sort_by_key(|summary| (summary.order(), summary.session.to_string()));
    Ok(summaries)
}

/// The place of a destination's session among the sessions of this host.
///
/// # Errors
/// As [`read`].
pub fn order_of(directory: &Path, session: SessionId) -> Result<Order, JournalError> {
    Ok(Order::of(&read(directory, session, Side::Destination)?))
}

/// The records of one session; empty if it has no journal.
///
/// # Errors
/// [`JournalError::Damaged`] or I/O errors.
pub fn read(directory: &Path, session: SessionId, side: Side) -> Result<Vec<Record>, JournalError> {
    match file::read_file(&path_of(directory, session, side), side) {
        Ok((records, _)) => Ok(records),
        Err(JournalError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(Vec::new())
        }
        Err(error) => Err(error),
    }
}

/// The state of a session at a restarted destination, and the required effects, derived from its
/// records. `None` if the journal does not know the session.
#[must_use]
pub fn recover_destination(
    records: &[Record],
) -> Option<(DestinationState, &'static [DestinationEffect])> {
    let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
    crate::recover_destination(DestinationRecords {
        opened: has(|r| matches!(r, Record::Open { .. })),
        intent: records.iter().find_map(|record| match record {
            Record::RunIntent => Some(SessionKind::PreCopy),
            Record::RunIntentPostCopy => Some(SessionKind::PostCopy),
            _ => None,
        }),
        fetched: has(|r| matches!(r, Record::Fetched)),
        ended: has(|r| matches!(r, Record::Ended)),
        aborted: has(|r| matches!(r, Record::Aborted { .. })),
    })
}

/// The state of a session at a source whose process died, and the required effects, derived from
/// its records. The process that has the guest now must carry out the effects.
#[must_use]
pub fn recover_source(records: &[Record]) -> (SourceState, &'static [SourceEffect]) {
    let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
    crate::recover_source(SourceRecords {
        committed: has(Record::is_commit),
        kept: has(|r| matches!(r, Record::Kept { .. })),
        given: has(|r| matches!(r, Record::Given { .. })),
        serving: has(|r| matches!(r, Record::Serving)),
    })
}

/// The kind of a source's session, as far as its records say: a session that has not come to COMMIT
/// counts as pre-copy.
#[must_use]
pub fn kind_of_source(records: &[Record]) -> SessionKind {
    let post_copy = |record| matches!(record, &Record::CommitPostCopy | &Record::Serving);
    if records.iter().any(post_copy) { SessionKind::PostCopy } else { SessionKind::PreCopy }
}

/// The record of an operator's decision about a source's session in doubt with these records. With
/// post-copy, the word that the destination runs the guest does not free the memory: see
/// [`SourceEvent::of_operator`](crate::SourceEvent::of_operator).
#[must_use]
pub fn record_of_operator(records: &[Record], word: OperatorWord) -> Record {
    match (word, kind_of_source(records)) {
        (OperatorWord::SourceResumes, _) => Record::Kept { by_operator: true },
        (OperatorWord::DestinationOwns, SessionKind::PreCopy) => {
            Record::Given { by_operator: true }
        }
        (OperatorWord::DestinationOwns, SessionKind::PostCopy) => Record::Serving,
    }
}

/// The word that this host, as the destination, may give about a session after a restart.
///
/// A session that was left open is closed first: ABORTED is written before the word is given. While
/// another process leads the session, the word is `Pending`.
///
/// # Errors
/// The journal cannot be read, or ABORTED cannot be written. No word may be given then.
pub fn recovered_word(directory: &Path, session: SessionId) -> Result<SessionWord, JournalError> {
    // The process that leads the session may have written a record that is not on disk yet.
    file::sync_file(&path_of(directory, session, Side::Destination))?;
    match recover_destination(&read(directory, session, Side::Destination)?) {
        None => Ok(SessionWord::Unknown),
        Some((DestinationState::AbortWriting, _)) => close_session(directory, session),
        Some((state, _)) => Ok(state.word()),
    }
}

/// The certificate name of the session's source; `None` if the source presented no certificate or
/// the session is unknown.
///
/// # Errors
/// The journal cannot be read.
pub fn source_of(directory: &Path, session: SessionId) -> Result<Option<String>, JournalError> {
    let records = read(directory, session, Side::Destination)?;
    Ok(records.into_iter().find_map(|record| match record {
        Record::Open { peer_names, .. } => peer_names.into_iter().next(),
        _ => None,
    }))
}

/// The session's witness, if its first record names one.
#[must_use]
pub fn witness_of(records: &[Record]) -> Option<&WitnessId> {
    records.iter().find_map(|record| match record {
        Record::Open { witness, .. } => witness.as_ref(),
        _ => None,
    })
}

fn close_session(directory: &Path, session: SessionId) -> Result<SessionWord, JournalError> {
    let (mut journal, records) = match FileJournal::reopen(directory, session, Side::Destination) {
        Err(JournalError::InUse { .. }) => return Ok(SessionWord::Pending),
        other => other?,
    };
    // The process that held the lock may have written its word since the first read.
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
