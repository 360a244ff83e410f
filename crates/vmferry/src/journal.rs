//! The journal: what each side has promised, on disk before it acts.
//!
//! One file per session and side, `SESSION.source.journal` or `SESSION.destination.journal`. A
//! record is one line, `crc32c(hex) SP json LF`, appended and synced before [`Journal::append`]
//! returns. A torn last line is a record that was never written; a damaged line before the last
//! is an error, since no word may be given on such a file. People can read the files.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmferry_wire::{GuestIdentity, SessionId, SessionWord};

use crate::handover::{self, DestinationState};

/// One promise or outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "kebab-case")]
pub enum Record {
    /// The session began: written before anything else, on both sides.
    Open {
        /// The guest.
        guest: GuestIdentity,
        /// The other host, as it was reached or as its certificate names it.
        peer: String,
        /// The names in the peer's certificate; empty without TLS.
        peer_names: Vec<String>,
        /// Seconds since 1970.
        at: u64,
    },
    /// Source: the guest never runs here again, unless the destination says ABORTED.
    Commit,
    /// Source: the destination has the guest.
    Given {
        /// Whether an operator said so instead of the destination.
        by_operator: bool,
    },
    /// Source: the guest runs here.
    Kept {
        /// Whether an operator said so.
        by_operator: bool,
    },
    /// Destination: the guest is this host's from now on.
    RunIntent,
    /// Destination: the guest never ran here and never will.
    Aborted {
        /// Why, for people.
        reason: String,
    },
}

/// Which half of a migration a journal belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The host that the guest leaves.
    Source,
    /// The host that it goes to.
    Destination,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

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
    /// A session of this number is in the directory already.
    #[error("the journal {path} exists already: a session number is used once")]
    Exists {
        /// The file.
        path: PathBuf,
    },
}

/// A journal in a file.
#[derive(Debug)]
pub struct FileJournal {
    path: PathBuf,
    file: File,
    poisoned: bool,
}

impl FileJournal {
    /// Makes the journal of a new session, and the directory if it is missing.
    ///
    /// # Errors
    /// [`JournalError::Exists`] if the session has one already, and I/O errors.
    pub fn create(directory: &Path, session: SessionId, side: Side) -> Result<Self, JournalError> {
        let at = |action, path: &Path| {
            let path = path.to_owned();
            move |source| JournalError::Io { action, path, source }
        };
        std::fs::create_dir_all(directory).map_err(at("make the directory of", directory))?;
        let path = path_of(directory, session, side);
        let file = match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(JournalError::Exists { path });
            }
            Err(error) => return Err(at("make", &path)(error)),
        };
        // The name must survive a crash as well as the content.
        File::open(directory)
            .and_then(|directory| directory.sync_all())
            .map_err(at("sync the directory of", directory))?;
        Ok(Self { path, file, poisoned: false })
    }

    /// Opens the journal of a session for more records, dropping a torn last line.
    ///
    /// # Errors
    /// As [`read`], and I/O errors.
    pub fn reopen(
        directory: &Path,
        session: SessionId,
        side: Side,
    ) -> Result<(Self, Vec<Record>), JournalError> {
        let path = path_of(directory, session, side);
        let (records, whole_bytes) = read_counted(&path)?;
        let at = |action| {
            let path = path.clone();
            move |source| JournalError::Io { action, path, source }
        };
        let file = OpenOptions::new().append(true).open(&path).map_err(at("open"))?;
        file.set_len(whole_bytes).and_then(|()| file.sync_all()).map_err(at("mend the end of"))?;
        Ok((Self { path, file, poisoned: false }, records))
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Journal for FileJournal {
    fn append(&mut self, record: &Record) -> Result<(), JournalError> {
        if self.poisoned {
            return Err(JournalError::Poisoned { path: self.path.clone() });
        }
        let line = encode(record);
        // One write, then one sync: after an error neither tells how much has reached the disk.
        if let Err(source) = self.file.write_all(&line).and_then(|()| self.file.sync_data()) {
            self.poisoned = true;
            return Err(JournalError::Io { action: "write", path: self.path.clone(), source });
        }
        Ok(())
    }
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
    fn new(session: SessionId, side: Side, records: Vec<Record>) -> Self {
        let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
        let verdict = match side {
            Side::Source if has(|r| matches!(r, Record::Given { .. })) => Verdict::There,
            Side::Source if has(|r| matches!(r, Record::Kept { .. })) => Verdict::Here,
            Side::Source if has(|r| matches!(r, Record::Commit)) => Verdict::InDoubt,
            Side::Source => Verdict::Here,
            Side::Destination if has(|r| matches!(r, Record::RunIntent)) => Verdict::Here,
            Side::Destination => Verdict::There,
        };
        Self { session, side, records, verdict }
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
        let records = read(directory, session, side)?;
        summaries.push(SessionSummary::new(session, side, records));
    }
    summaries.sort_by_key(|summary| (opened_at(&summary.records), summary.session.to_string()));
    Ok(summaries)
}

/// The records of one session; empty if there is no such journal.
///
/// # Errors
/// [`JournalError::Damaged`] or I/O errors.
pub fn read(directory: &Path, session: SessionId, side: Side) -> Result<Vec<Record>, JournalError> {
    match read_counted(&path_of(directory, session, side)) {
        Ok((records, _)) => Ok(records),
        Err(JournalError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(Vec::new())
        }
        Err(error) => Err(error),
    }
}

/// The word that this host, as a destination, may give about a session after a restart.
///
/// A session that was left open is closed first: ABORTED is written, then said.
///
/// # Errors
/// If the journal can't be read, or ABORTED can't be written. No word may be given then.
pub fn recovered_word(directory: &Path, session: SessionId) -> Result<SessionWord, JournalError> {
    let records = read(directory, session, Side::Destination)?;
    let has = |wanted: fn(&Record) -> bool| records.iter().any(wanted);
    let state = handover::recover(
        has(|r| matches!(r, Record::Open { .. })),
        has(|r| matches!(r, Record::RunIntent)),
        has(|r| matches!(r, Record::Aborted { .. })),
    );
    match state {
        None => Ok(SessionWord::Unknown),
        Some(DestinationState::AbortWriting) => {
            let (mut journal, _) = FileJournal::reopen(directory, session, Side::Destination)?;
            journal.append(&Record::Aborted { reason: "the destination was restarted".into() })?;
            Ok(SessionWord::Aborted)
        }
        Some(state) => Ok(state.word()),
    }
}

/// Seconds since 1970, for [`Record::Open`].
#[must_use]
pub fn now_seconds() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_secs())
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

fn path_of(directory: &Path, session: SessionId, side: Side) -> PathBuf {
    directory.join(format!("{session}.{}.journal", side.name()))
}

fn parse_name(name: &str) -> Option<(SessionId, Side)> {
    let stem = name.strip_suffix(".journal")?;
    let (session, side) = stem.split_once('.')?;
    let side = match side {
        "source" => Side::Source,
        "destination" => Side::Destination,
        _ => return None,
    };
    Some((session.parse().ok()?, side))
}

fn encode(record: &Record) -> Vec<u8> {
    let json = serde_json::to_string(record).expect("a record has only strings and numbers");
    format!("{:08x} {json}\n", checksum(json.as_bytes())).into_bytes()
}

fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn decode(line: &[u8]) -> Result<Record, String> {
    let line = std::str::from_utf8(line).map_err(|_| "not text".to_owned())?;
    let (sum, json) = line.split_once(' ').ok_or("no checksum")?;
    let sum = u32::from_str_radix(sum, 16).map_err(|_| "no checksum".to_owned())?;
    if sum != checksum(json.as_bytes()) {
        return Err("the checksum differs".into());
    }
    serde_json::from_str(json).map_err(|error| error.to_string())
}

/// The records, and the length in bytes of the lines that hold them.
fn read_counted(path: &Path) -> Result<(Vec<Record>, u64), JournalError> {
    let bytes = std::fs::read(path).map_err(|source| JournalError::Io {
        action: "read",
        path: path.to_owned(),
        source,
    })?;
    let mut records = Vec::new();
    let mut whole = 0;
    for (index, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let last = whole + line.len() == bytes.len();
        match line.strip_suffix(b"\n").ok_or_else(|| "it is torn".to_owned()).and_then(decode) {
            Ok(record) => records.push(record),
            Err(_) if last => break,
            Err(reason) => {
                return Err(JournalError::Damaged {
                    path: path.to_owned(),
                    line: index + 1,
                    reason,
                });
            }
        }
        whole += line.len();
    }
    Ok((records, whole as u64))
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
        for cut in keep as usize..whole.len() {
            std::fs::write(journal.path(), &whole[..cut]).unwrap();
            assert_eq!(
                recovered_word(directory.path(), session()).unwrap(),
                SessionWord::Aborted,
                "cut at {cut}"
            );
        }
        std::fs::write(journal.path(), &whole).unwrap();
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
    fn an_unknown_session_is_unknown_and_not_aborted() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(recovered_word(directory.path(), session()).unwrap(), SessionWord::Unknown);
        assert!(sessions(&directory.path().join("missing")).unwrap().is_empty());
    }

    #[test]
    fn a_failed_write_poisons_the_journal() {
        let mut journal = FileJournal {
            path: "/dev/full".into(),
            file: OpenOptions::new().append(true).open("/dev/full").unwrap(),
            poisoned: false,
        };
        assert!(matches!(
            journal.append(&Record::Commit),
            Err(JournalError::Io { action: "write", .. })
        ));
        assert!(matches!(journal.append(&Record::Commit), Err(JournalError::Poisoned { .. })));
    }
}
