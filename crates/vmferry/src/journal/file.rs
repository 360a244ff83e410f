//! A journal in a file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vmferry_wire::{GuestIdentity, SessionId};

use super::{BadRecord, Journal, JournalError, Record, Side, order, record};

/// A journal in a file, locked for as long as it is open: while a process leads a session, no other
/// one may write the session's last word.
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
        make_directory(directory)?;
        let path = path_of(directory, session, side);
        let file = match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(JournalError::Exists { path });
            }
            Err(source) => return Err(JournalError::Io { action: "make", path, source }),
        };
        lock(&file, &path)?;
        // The name must survive a crash as well as the content.
        sync_directory(directory)?;
        Ok(Self { path, file, poisoned: false })
    }

    /// Makes the journal of a session that begins, with its first record: the guest, and the peer's address and
    /// names. If that can't be written nothing stays behind: nothing was promised.
    ///
    /// # Errors
    /// As [`create`](Self::create) and [`append`](Journal::append).
    pub fn begin(
        directory: &Path,
        session: SessionId,
        side: Side,
        guest: GuestIdentity,
        (peer, peer_names): (&str, &[String]),
    ) -> Result<Self, JournalError> {
        make_directory(directory)?;
        let order = order::next(directory)?;
        let mut journal = Self::create(directory, session, side)?;
        let written = journal.append(&Record::Open {
            guest,
            peer: peer.to_owned(),
            peer_names: peer_names.to_vec(),
            at: order::now_seconds(),
            order,
        });
        if let Err(error) = written {
            // An empty journal is left where even that is refused, and says nothing.
            let _ = std::fs::remove_file(&journal.path);
            return Err(error);
        }
        Ok(journal)
    }

    /// Opens the journal of a session for more records, dropping a torn last line.
    ///
    /// # Errors
    /// [`JournalError::InUse`] while another process leads the session, [`JournalError::Damaged`],
    /// and I/O errors.
    pub fn reopen(
        directory: &Path,
        session: SessionId,
        side: Side,
    ) -> Result<(Self, Vec<Record>), JournalError> {
        let path = path_of(directory, session, side);
        let at = |action| {
            let path = path.clone();
            move |source| JournalError::Io { action, path, source }
        };
        let file = OpenOptions::new().append(true).open(&path).map_err(at("open"))?;
        lock(&file, &path)?;
        let (records, whole_bytes) = read(&path, side)?;
        file.set_len(whole_bytes as u64)
            .and_then(|()| file.sync_all())
            .map_err(at("mend the end of"))?;
        Ok((Self { path, file, poisoned: false }, records))
    }

    /// Whether the open file is still the one that others find by its name.
    fn is_in_place(&self) -> bool {
        let identity = |found: std::fs::Metadata| (found.dev(), found.ino());
        match (self.file.metadata(), std::fs::symlink_metadata(&self.path)) {
            (Ok(open), Ok(named)) => identity(open) == identity(named),
            _ => false,
        }
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
        // A promise that whoever comes next can't find is none.
        if !self.is_in_place() {
            self.poisoned = true;
            return Err(JournalError::Removed { path: self.path.clone() });
        }
        let line = record.encode();
        // One write, then one sync: after an error neither tells how much has reached the disk.
        if let Err(source) = self.file.write_all(&line).and_then(|()| self.file.sync_data()) {
            self.poisoned = true;
            return Err(JournalError::Io { action: "write", path: self.path.clone(), source });
        }
        Ok(())
    }
}

/// The records of a file, and the length in bytes of the lines that hold them.
pub(super) fn read(path: &Path, side: Side) -> Result<(Vec<Record>, usize), JournalError> {
    let bytes = std::fs::read(path).map_err(|source| JournalError::Io {
        action: "read",
        path: path.to_owned(),
        source,
    })?;
    record::decode(&bytes, side).map_err(|record::BadLine { line, reason }| {
        let path = path.to_owned();
        match reason {
            BadRecord::Damaged(reason) => JournalError::Damaged { path, line, reason },
            BadRecord::Unknown(record) => JournalError::Newer { path, line, record },
        }
    })
}

/// Whether a process leads the session. One that can't be asked about is taken for led: whoever wants
/// to write to it finds out.
pub(super) fn is_locked(path: &Path) -> bool {
    File::open(path).map_or(true, |file| file.try_lock_shared().is_err())
}

/// `SESSION.SIDE.journal`.
pub(super) fn path_of(directory: &Path, session: SessionId, side: Side) -> PathBuf {
    directory.join(format!("{session}.{}.journal", side.name()))
}

/// The session and side of a file's name, if it is a journal's.
pub(super) fn parse_name(name: &str) -> Option<(SessionId, Side)> {
    let stem = name.strip_suffix(".journal")?;
    let (session, side) = stem.split_once('.')?;
    let side = match side {
        "source" => Side::Source,
        "destination" => Side::Destination,
        _ => return None,
    };
    Some((session.parse().ok()?, side))
}

fn lock(file: &File, path: &Path) -> Result<(), JournalError> {
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => JournalError::InUse { path: path.to_owned() },
        TryLockError::Error(source) => {
            JournalError::Io { action: "lock", path: path.to_owned(), source }
        }
    })
}

/// Makes a directory that survives a crash: each new name is synced in the directory above it.
fn make_directory(directory: &Path) -> Result<(), JournalError> {
    if directory.is_dir() {
        return Ok(());
    }
    let above = match directory.parent() {
        Some(above) if !above.as_os_str().is_empty() => above,
        _ => Path::new("."),
    };
    make_directory(above)?;
    match std::fs::create_dir(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(JournalError::Io {
            action: "make the directory of",
            path: directory.to_owned(),
            source: error,
        }),
        _ => sync_directory(above),
    }
}

fn sync_directory(directory: &Path) -> Result<(), JournalError> {
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(|source| {
        JournalError::Io { action: "sync the directory of", path: directory.to_owned(), source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_journal_that_was_removed_or_replaced_takes_no_promise() {
        let directory = tempfile::tempdir().unwrap();
        let mut journal =
            FileJournal::create(directory.path(), SessionId([1; 16]), Side::Source).unwrap();
        journal.append(&Record::Commit).unwrap();
        let copy = directory.path().join("copy");
        std::fs::copy(journal.path(), &copy).unwrap();
        std::fs::rename(&copy, journal.path()).unwrap();
        let kept = Record::Kept { by_operator: false };
        assert!(matches!(journal.append(&kept), Err(JournalError::Removed { .. })));
        assert!(matches!(journal.append(&kept), Err(JournalError::Poisoned { .. })));

        let mut journal =
            FileJournal::create(directory.path(), SessionId([2; 16]), Side::Source).unwrap();
        std::fs::remove_file(journal.path()).unwrap();
        assert!(matches!(journal.append(&Record::Commit), Err(JournalError::Removed { .. })));
    }

    #[test]
    fn a_session_that_can_not_begin_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let guest = GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() };
        let begin = || {
            let session = SessionId([3; 16]);
            FileJournal::begin(directory.path(), session, Side::Source, guest.clone(), ("b", &[]))
        };
        let journal = begin().unwrap();
        assert!(matches!(begin(), Err(JournalError::Exists { .. })));
        assert!(journal.path().exists(), "the journal of the other one is left alone");
    }
}
