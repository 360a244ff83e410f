//! The journal: what each side has promised, on disk before it acts.
//!
//! One file per session and side, `SESSION.source.journal` or `SESSION.destination.journal`. A
//! record is one line, `crc32c(hex) SP json LF`, appended and synced before [`Journal::append`]
//! returns. A torn last line is a record that was never written; a damaged whole line
//! is an error, since no word may be given on such a file. People can read the files.

mod file;
mod record;

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use vmferry_wire::{GuestIdentity, SessionId, SessionWord};

pub use self::file::FileJournal;
use self::file::{parse_name, path_of};
pub use self::record::{BadLine, Record, Side, decode, decode_line};
use crate::handover::{self, DestinationState, SourceEffect, SourceState};

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
    #[error("can't {action} the journal {path}: check that the disk is writable and not full")]
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
                Some(DestinationState::Owns) => Verdict::Here,
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

    /// When it began, in seconds since 1970 by this host's clock; 0 if the first record is missing.
    #[must_use]
    pub fn opened_at(&self) -> u64 {
        opened_at(&self.records)
    }

    /// Whether this host was the source, and the process that led the session has died before its end: the
    /// guest may stand still, and somebody should [recover](crate::source::recover) it.
    #[must_use]
    pub fn is_unfinished_source(&self) -> bool {
        let ended = |record: &Record| matches!(record, Record::Kept { .. } | Record::Given { .. });
        self.side == Side::Source && !self.led && !self.records.iter().any(ended)
    }
}

/// Every session whose journal is in the directory; none if there is no such directory.
///
/// # Errors
/// The first file that can't be read or is damaged.
pub fn sessions(directory: &Path) -> Result<Vec<SessionSummary>, JournalError> {
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
        // Before the records: a process that ends in between has written its last one.
        let led = file::is_locked(&path_of(directory, session, side));
        let records = read(directory, session, side)?;
        summaries.push(SessionSummary::new(session, side, records, led));
    }
    summaries.sort_by_key(|summary| (opened_at(&summary.records), summary.session.to_string()));
    Ok(summaries)
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

/// Where a session stands at a destination that has only its journal, after a restart: `None` if
/// the journal does not know it.
#[must_use]
pub fn recover_destination(records: &[Record]) -> Option<DestinationState> {
    let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
    handover::recover_destination(
        has(|r| matches!(r, Record::Open { .. })),
        has(|r| matches!(r, Record::RunIntent)),
        has(|r| matches!(r, Record::Aborted { .. })),
    )
}

/// Where a session stands at a source that has only its journal, after the process that led it has
/// died, and what whoever has the guest now must do.
#[must_use]
pub fn recover_source(records: &[Record]) -> (SourceState, &'static [SourceEffect]) {
    let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
    handover::recover_source(
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
        Some(DestinationState::AbortWriting) => close_session(directory, session),
        Some(state) => Ok(state.word()),
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
        Some(DestinationState::AbortWriting) => {
            journal.append(&Record::Aborted { reason: "the destination was restarted".into() })?;
            Ok(SessionWord::Aborted)
        }
        state => Ok(state.map_or(SessionWord::Unknown, DestinationState::word)),
    }
}

/// Seconds since 1970, for [`Record::Open`].
#[must_use]
pub fn now_seconds() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
}

/// The sessions of a guest that this host has left open as a source, and that still matter: a guest that has come
/// back since is here by a later promise.
#[must_use]
pub fn unfinished<'a>(
    sessions: &'a [SessionSummary],
    guest: &GuestIdentity,
) -> Vec<&'a SessionSummary> {
    let ours = || sessions.iter().filter(|session| session.guest() == Some(guest));
    let arrived = ours()
        .filter(|one| one.side == Side::Destination && one.verdict == Verdict::Here)
        .map(SessionSummary::opened_at)
        .max();
    ours()
        .filter(|one| one.is_unfinished_source())
        .filter(|one| arrived.is_none_or(|at| one.opened_at() >= at))
        .collect()
}

fn opened_at(records: &[Record]) -> u64 {
    records
        .iter()
        .find_map(|record| match record {
            Record::Open { at, .. } => Some(*at),
            _ => None,
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> SessionId {
        SessionId([7; 16])
    }

    fn open() -> Record {
        Record::Open {
            guest: GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() },
            peer: "host-b".into(),
            peer_names: vec![],
            at: 1,
        }
    }

    #[test]
    fn records_come_back_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let mut journal = FileJournal::create(directory.path(), session(), Side::Source).unwrap();
        journal.append(&open()).unwrap();
        journal.append(&Record::Commit).unwrap();
        let found = sessions(directory.path()).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].records, [open(), Record::Commit]);
        assert_eq!(found[0].verdict, Verdict::InDoubt);
    }

    #[test]
    fn a_torn_tail_at_any_byte_is_a_record_never_written() {
        let directory = tempfile::tempdir().unwrap();
        let mut journal =
            FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
        journal.append(&open()).unwrap();
        let keep = std::fs::metadata(journal.path()).unwrap().len();
        journal.append(&Record::RunIntent).unwrap();
        let whole = std::fs::read(journal.path()).unwrap();
        let path = journal.path().to_owned();
        drop(journal);
        for cut in keep as usize..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(
                recovered_word(directory.path(), session()).unwrap(),
                SessionWord::Aborted,
                "cut at {cut}"
            );
        }
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(recovered_word(directory.path(), session()).unwrap(), SessionWord::Owns);
    }

    #[test]
    fn damage_before_the_end_gives_no_word() {
        let directory = tempfile::tempdir().unwrap();
        let mut journal =
            FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
        journal.append(&open()).unwrap();
        journal.append(&Record::RunIntent).unwrap();
        let mut bytes = std::fs::read(journal.path()).unwrap();
        bytes[12] ^= 1;
        std::fs::write(journal.path(), &bytes).unwrap();
        assert!(matches!(
            recovered_word(directory.path(), session()),
            Err(JournalError::Damaged { line: 1, .. })
        ));
    }

    #[test]
    fn a_journal_of_the_other_side_gives_no_word() {
        let directory = tempfile::tempdir().unwrap();
        let mut journal = FileJournal::create(directory.path(), session(), Side::Source).unwrap();
        journal.append(&open()).unwrap();
        journal.append(&Record::Commit).unwrap();
        drop(journal);
        let path = |side| path_of(directory.path(), session(), side);
        std::fs::rename(path(Side::Source), path(Side::Destination)).unwrap();
        let error = recovered_word(directory.path(), session()).unwrap_err();
        assert!(matches!(error, JournalError::Damaged { line: 2, .. }), "{error}");
        assert!(error.to_string().contains("a destination never writes `commit`"), "{error}");
    }

    #[test]
    fn an_unknown_session_is_unknown_and_not_aborted() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(recovered_word(directory.path(), session()).unwrap(), SessionWord::Unknown);
        assert!(sessions(&directory.path().join("missing")).unwrap().is_empty());
    }

    #[test]
    fn a_damaged_last_line_gives_no_word_either() {
        let directory = tempfile::tempdir().unwrap();
        let mut journal =
            FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
        journal.append(&open()).unwrap();
        journal.append(&Record::RunIntent).unwrap();
        let mut bytes = std::fs::read(journal.path()).unwrap();
        let end = bytes.len();
        bytes[end - 3] ^= 1;
        std::fs::write(journal.path(), &bytes).unwrap();
        // The guest may run by this promise: ABORTED would make it two.
        assert!(matches!(
            recovered_word(directory.path(), session()),
            Err(JournalError::Damaged { line: 2, .. })
        ));
    }

    #[test]
    fn what_was_left_open_matters_until_the_guest_comes_back() {
        let directory = tempfile::tempdir().unwrap();
        let Record::Open { guest, .. } = open() else { unreachable!() };
        let write = |number: u8, side: Side, at: u64, records: &[Record]| {
            let session = SessionId([number; 16]);
            let mut journal = FileJournal::create(directory.path(), session, side).unwrap();
            let (peer, peer_names) = ("host-b".into(), vec![]);
            journal.append(&Record::Open { guest: guest.clone(), peer, peer_names, at }).unwrap();
            records.iter().for_each(|record| journal.append(record).unwrap());
        };
        let found = || {
            let sessions = sessions(directory.path()).unwrap();
            unfinished(&sessions, &guest).iter().map(|one| one.opened_at()).collect::<Vec<_>>()
        };
        write(1, Side::Source, 10, &[Record::Commit, Record::Kept { by_operator: false }]);
        assert!(found().is_empty(), "it has an end");
        write(2, Side::Source, 20, &[Record::Commit]);
        assert_eq!(found(), [20], "in doubt");
        write(3, Side::Destination, 30, &[Record::Aborted { reason: "no".into() }]);
        assert_eq!(found(), [20], "nobody came");
        write(4, Side::Destination, 40, &[Record::RunIntent]);
        assert!(found().is_empty(), "the guest is here by a later promise");
        write(5, Side::Source, 50, &[]);
        assert_eq!(found(), [50], "its process has died before COMMIT");
    }

    #[test]
    fn a_session_that_a_process_leads_is_not_aborted_by_another() {
        let directory = tempfile::tempdir().unwrap();
        let mut journal =
            FileJournal::create(directory.path(), session(), Side::Destination).unwrap();
        journal.append(&open()).unwrap();
        let word = || recovered_word(directory.path(), session()).unwrap();
        assert_eq!(word(), SessionWord::Pending);
        journal.append(&Record::RunIntent).unwrap();
        assert_eq!(word(), SessionWord::Owns);
        assert!(matches!(
            FileJournal::reopen(directory.path(), session(), Side::Destination),
            Err(JournalError::InUse { .. })
        ));
        drop(journal);
        assert_eq!(word(), SessionWord::Owns);
    }
}
