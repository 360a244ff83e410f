//! A journal in a file.

mod renew;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::marker::PhantomData;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::{GuestIdentity, SessionId, WitnessId};

use super::lock::lock;
use super::{BadRecord, Journal, JournalError, JournalRecord, Record, Side, order, record};

/// A journal of a handover in a file.
pub type FileJournal = RecordFile<Record>;

/// A journal in a file. The file is locked while it is open, so that no other process can write the
/// session's last record while this one leads the session.
#[derive(Debug)]
pub struct RecordFile<R> {
    path: PathBuf,
    file: File,
    poisoned: bool,
    records: PhantomData<fn(R)>,
}

impl<R: JournalRecord> RecordFile<R> {
    /// Creates the journal of a new session, and the directory if it is missing.
    ///
    /// # Errors
    /// [`JournalError::Exists`] if the session already has a journal, and I/O errors.
    pub fn create(directory: &Path, session: SessionId, side: Side) -> Result<Self, JournalError> {
        make_directory(directory)?;
        Self::make(directory, session, side, Self::settle)
    }

    /// Creates a journal and initializes it with `begin`. If that fails, the file is removed:
    /// nothing was promised, and a session that never began must not look unfinished.
    fn make(
        directory: &Path,
        session: SessionId,
        side: Side,
        begin: impl FnOnce(&mut Self, &Path) -> Result<(), JournalError>,
    ) -> Result<Self, JournalError> {
        let path = path_for::<R>(directory, session, side);
        let file = match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(JournalError::Exists { path });
            }
            Err(source) => return Err(JournalError::Io { action: "make", path, source }),
        };
        let mut journal = Self { path, file, poisoned: false, records: PhantomData };
        if let Err(error) = begin(&mut journal, directory) {
            // Only our own file is removed, not one that replaced it. If removal fails, an empty
            // journal remains, which promises nothing.
            if journal.is_in_place() {
                let _ = std::fs::remove_file(&journal.path);
            }
            return Err(error);
        }
        Ok(journal)
    }

    /// Locks a new journal, and makes its name as durable as its content.
    fn settle(&mut self, directory: &Path) -> Result<(), JournalError> {
        lock(&self.file, &self.path)?;
        sync_directory(directory)
    }

    /// Opens a session's journal for more records, and truncates a torn last line.
    ///
    /// # Errors
    /// [`JournalError::InUse`] while another process leads the session, [`JournalError::Damaged`],
    /// and I/O errors.
    pub fn reopen(
        directory: &Path,
        session: SessionId,
        side: Side,
    ) -> Result<(Self, Vec<R>), JournalError> {
        let path = path_for::<R>(directory, session, side);
        let at = |action| {
            let path = path.clone();
            move |source| JournalError::Io { action, path, source }
        };
        let file = OpenOptions::new().append(true).open(&path).map_err(at("open"))?;
        lock(&file, &path)?;
        let (records, whole_bytes) = read_file(&path, side)?;
        file.set_len(whole_bytes as u64)
            .and_then(|()| file.sync_all())
            .map_err(at("mend the end of"))?;
        Ok((Self { path, file, poisoned: false, records: PhantomData }, records))
    }

    /// Appends a record. On return it is on stable storage.
    ///
    /// # Errors
    /// The record may or may not be on disk. The journal accepts no more records.
    pub fn write(&mut self, record: &R) -> Result<(), JournalError> {
        if self.poisoned {
            return Err(JournalError::Poisoned { path: self.path.clone() });
        }
        // A promise that later processes cannot find is void.
        if !self.is_in_place() {
            self.poisoned = true;
            return Err(JournalError::Removed { path: self.path.clone() });
        }
        let line = record::line(record);
        // One write, then one sync. After an error it is unknown how much has reached the disk.
        if let Err(source) = self.file.write_all(&line).and_then(|()| self.file.sync_data()) {
            self.poisoned = true;
            return Err(JournalError::Io { action: "write", path: self.path.clone(), source });
        }
        Ok(())
    }

    /// Removes the file of a session that nobody needs to know about any more. A process that waits
    /// for its lock finds no journal then.
    ///
    /// # Errors
    /// [`JournalError::Removed`] if the path names another file, and I/O errors.
    pub fn remove(self) -> Result<(), JournalError> {
        if !self.is_in_place() {
            return Err(JournalError::Removed { path: self.path });
        }
        std::fs::remove_file(&self.path).map_err(|source| {
            let path = self.path.clone();
            JournalError::Io { action: "remove", path, source }
        })?;
        sync_directory(self.path.parent().unwrap_or(Path::new(".")))
    }

    /// Whether the path still names the open file.
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

/// What the first record of a journal says, besides the peer.
#[derive(Clone, Debug)]
pub struct Opening {
    /// The guest.
    pub guest: GuestIdentity,
    /// The process of the guest's VMM on this host, if it outlives the process that leads the
    /// session.
    pub process: Option<String>,
    /// The session's witness.
    pub witness: Option<WitnessId>,
}

impl FileJournal {
    /// Creates the journal of a new session with its first record: the guest, and the peer's
    /// address and names. If the record cannot be written, no file remains.
    ///
    /// # Errors
    /// As [`create`](Self::create) and [`append`](Journal::append).
    pub fn begin(
        directory: &Path,
        session: SessionId,
        side: Side,
        guest: GuestIdentity,
        peer: (&str, &[String]),
    ) -> Result<Self, JournalError> {
        let of = Opening { guest, process: None, witness: None };
        Self::begin_for(directory, session, side, of, peer)
    }

    /// Like [`begin`](Self::begin), with more to record.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn begin_for(
        directory: &Path,
        session: SessionId,
        side: Side,
        of: Opening,
        (peer, peer_names): (&str, &[String]),
    ) -> Result<Self, JournalError> {
        make_directory(directory)?;
        let order = order::next(directory)?;
        let Opening { guest, process, witness } = of;
        let open = Record::Open {
            guest,
            peer: peer.to_owned(),
            peer_names: peer_names.to_vec(),
            at: order::now_seconds(),
            order,
            process,
            witness,
        };
        Self::make(directory, session, side, |journal, directory| {
            journal.settle(directory)?;
            journal.append(&open)
        })
    }
}

impl Journal for FileJournal {
    fn append(&mut self, record: &Record) -> Result<(), JournalError> {
        self.write(record)
    }
}

/// Waits until what any process has written to the file is on disk. A file that does not exist is.
pub(super) fn sync_file(path: &Path) -> Result<(), JournalError> {
    match File::open(path).and_then(|file| file.sync_data()) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(JournalError::Io { action: "sync", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Reads the records of a file, and the length in bytes of the lines that hold them.
pub(super) fn read_file<R: JournalRecord>(
    path: &Path,
    side: Side,
) -> Result<(Vec<R>, usize), JournalError> {
    let bytes = std::fs::read(path).map_err(|source| JournalError::Io {
        action: "read",
        path: path.to_owned(),
        source,
    })?;
    record::decode_records(&bytes, side).map_err(|record::BadLine { line, reason }| {
        let path = path.to_owned();
        match reason {
            BadRecord::Damaged(reason) => JournalError::Damaged { path, line, reason },
            BadRecord::Unknown(record) => JournalError::Newer { path, line, record },
        }
    })
}

/// The path of a handover's journal.
pub(super) fn path_of(directory: &Path, session: SessionId, side: Side) -> PathBuf {
    path_for::<Record>(directory, session, side)
}

/// The path `SESSION.SIDE.journal`, with the records' prefix before the side.
pub(super) fn path_for<R: JournalRecord>(
    directory: &Path,
    session: SessionId,
    side: Side,
) -> PathBuf {
    directory.join(format!("{session}.{}{}.journal", R::FILE_PREFIX, side.name()))
}

/// Parses a file name. `None` if the file is not a handover's journal.
pub(super) fn parse_name(name: &str) -> Option<(SessionId, Side)> {
    parse_name_for::<Record>(name)
}

/// Parses the file name of a journal of such records.
pub(super) fn parse_name_for<R: JournalRecord>(name: &str) -> Option<(SessionId, Side)> {
    let stem = name.strip_suffix(".journal")?;
    let (session, side) = stem.split_once('.')?;
    let side = side.strip_prefix(R::FILE_PREFIX)?;
    Some((session.parse().ok()?, side.parse().ok()?))
}

/// Creates a directory durably: each new name is synced in its parent directory. Other users get no
/// access, because the journals decide who owns a guest.
fn make_directory(directory: &Path) -> Result<(), JournalError> {
    if directory.is_dir() {
        return Ok(());
    }
    let above = match directory.parent() {
        Some(above) if !above.as_os_str().is_empty() => above,
        _ => Path::new("."),
    };
    make_directory(above)?;
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
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
    fn failed_write_poisons_the_journal() {
        let mut journal = FileJournal {
            path: "/dev/full".into(),
            file: OpenOptions::new().append(true).open("/dev/full").unwrap(),
            poisoned: false,
            records: PhantomData,
        };
        assert!(matches!(
            journal.append(&Record::Commit),
            Err(JournalError::Io { action: "write", .. })
        ));
        assert!(matches!(journal.append(&Record::Commit), Err(JournalError::Poisoned { .. })));
    }

    #[test]
    fn append_refuses_a_removed_or_replaced_journal() {
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
    fn remove_leaves_another_file_alone() {
        let directory = tempfile::tempdir().unwrap();
        let made = FileJournal::create(directory.path(), SESSION, Side::Source).unwrap();
        let path = made.path().to_owned();
        std::fs::rename(&path, directory.path().join("away")).unwrap();
        std::fs::write(&path, "other").unwrap();
        assert!(matches!(made.remove(), Err(JournalError::Removed { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
        std::fs::remove_file(&path).unwrap();
        let made = FileJournal::create(directory.path(), SESSION, Side::Source).unwrap();
        made.remove().unwrap();
        assert!(!path.exists());
    }

    const SESSION: SessionId = SessionId([3; 16]);

    fn begin(directory: &Path) -> Result<FileJournal, JournalError> {
        let guest = GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() };
        FileJournal::begin(directory, SESSION, Side::Source, guest, ("b", &[]))
    }

    #[test]
    fn begin_keeps_an_existing_session() {
        let directory = tempfile::tempdir().unwrap();
        let journal = begin(directory.path()).unwrap();
        assert!(matches!(begin(directory.path()), Err(JournalError::Exists { .. })));
        assert!(journal.is_in_place());
        assert_eq!(read_file::<Record>(journal.path(), Side::Source).unwrap().0.len(), 1);
    }

    /// Names the directory for the child process, which may not write to files.
    const FULL: &str = "VMFERRY_TEST_FULL_DISK";

    #[test]
    fn begin_leaves_no_file_if_it_fails() {
        if let Some(directory) = std::env::var_os(FULL) {
            let directory = Path::new(&directory);
            let error = begin(directory).unwrap_err();
            assert!(matches!(error, JournalError::Io { action: "write", .. }), "{error}");
            assert!(!path_of(directory, SESSION, Side::Source).exists());
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        // Runs this test again in a process where no file may grow. Every write fails with an error
        // instead of a signal.
        let test = "journal::file::tests::begin_leaves_no_file_if_it_fails";
        let output = std::process::Command::new("sh")
            .args(["-c", r#"trap "" XFSZ; ulimit -f 0; exec "$0" "$@""#])
            .arg(std::env::current_exe().unwrap())
            .arg(test)
            .env(FULL, directory.path())
            .output()
            .unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && stdout.contains("1 passed"), "{output:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        begin(directory.path()).expect("the session can begin once there is space");
    }

    #[test]
    fn create_removes_its_own_file_if_it_fails() {
        let directory = tempfile::tempdir().unwrap();
        let path = path_of(directory.path(), SESSION, Side::Source);
        let make = |begin: &dyn Fn(&Path)| {
            FileJournal::make(directory.path(), SESSION, Side::Source, |journal, _| {
                begin(&journal.path);
                Err(JournalError::InUse { path: journal.path.clone() })
            })
        };
        assert!(matches!(make(&|path| assert!(path.exists())), Err(JournalError::InUse { .. })));
        assert!(!path.exists());
        // A file that replaced the journal is not removed.
        let replace = |path: &Path| {
            std::fs::write(path.with_extension("new"), "other").unwrap();
            std::fs::rename(path.with_extension("new"), path).unwrap();
        };
        assert!(make(&replace).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
    }

    #[test]
    fn empty_journal_is_not_unfinished() {
        let directory = tempfile::tempdir().unwrap();
        drop(FileJournal::create(directory.path(), SESSION, Side::Source).unwrap());
        let sessions = crate::journal::sessions(directory.path()).unwrap();
        assert!(!sessions[0].is_unfinished_source(), "nothing was promised");
        let (mut journal, _) =
            FileJournal::reopen(directory.path(), SESSION, Side::Source).unwrap();
        journal.append(&Record::Commit).unwrap();
        drop(journal);
        let sessions = crate::journal::sessions(directory.path()).unwrap();
        assert!(sessions[0].is_unfinished_source(), "a promise counts");
    }
}
