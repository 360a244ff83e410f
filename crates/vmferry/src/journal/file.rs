//! A journal in a file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use vmferry_wire::SessionId;

use super::{Journal, JournalError, Record, Side, record};

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
    record::decode(&bytes, side).map_err(|record::BadLine { line, reason }| JournalError::Damaged {
        path: path.to_owned(),
        line,
        reason,
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
}
