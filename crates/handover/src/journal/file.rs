//! A journal in a file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::{GuestIdentity, SessionId};

use super::{BadRecord, Journal, JournalError, Record, Side, order, record};

/// For how long others who only look are waited for, and how often it is tried.
const LOOK_PATIENCE: Duration = Duration::from_millis(200);
const LOOK_PERIOD: Duration = Duration::from_millis(1);

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
        Self::make(directory, session, side, Self::settle)
    }

    /// Makes a journal and does the rest of its beginning. Where that fails the file goes too: nothing was promised, and
    /// a session that never began must not look like one that was left open.
    fn make(
        directory: &Path,
        session: SessionId,
        side: Side,
        begin: impl FnOnce(&mut Self, &Path) -> Result<(), JournalError>,
    ) -> Result<Self, JournalError> {
        let path = path_of(directory, session, side);
        let file = match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(JournalError::Exists { path });
            }
            Err(source) => return Err(JournalError::Io { action: "make", path, source }),
        };
        let mut journal = Self { path, file, poisoned: false };
        if let Err(error) = begin(&mut journal, directory) {
            // Another's file that stands in its place is left alone. An empty journal is left where even the removal is
            // refused, and says nothing.
            if journal.is_in_place() {
                let _ = std::fs::remove_file(&journal.path);
            }
            return Err(error);
        }
        Ok(journal)
    }

    /// Locks a new journal, and makes its name survive a crash as well as its content.
    fn settle(&mut self, directory: &Path) -> Result<(), JournalError> {
        lock(&self.file, &self.path)?;
        sync_directory(directory)
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
        peer: (&str, &[String]),
    ) -> Result<Self, JournalError> {
        Self::begin_for(directory, session, side, (guest, None), peer)
    }

    /// The same of a guest that is in this process of a VMM.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn begin_for(
        directory: &Path,
        session: SessionId,
        side: Side,
        (guest, process): (GuestIdentity, Option<String>),
        (peer, peer_names): (&str, &[String]),
    ) -> Result<Self, JournalError> {
        make_directory(directory)?;
        let order = order::next(directory)?;
        let open = Record::Open {
            guest,
            peer: peer.to_owned(),
            peer_names: peer_names.to_vec(),
            at: order::now_seconds(),
            order,
            process,
        };
        Self::make(directory, session, side, |journal, directory| {
            journal.settle(directory)?;
            journal.append(&open)
        })
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

/// Locks a journal for whoever leads its session. Somebody who [asks](is_locked) whether it is led holds a shared lock
/// for a moment, which is waited for; whoever leads it holds another kind, which is not.
fn lock(file: &File, path: &Path) -> Result<(), JournalError> {
    let deadline = Instant::now() + LOOK_PATIENCE;
    let failed = |error| match error {
        TryLockError::WouldBlock => JournalError::InUse { path: path.to_owned() },
        TryLockError::Error(source) => {
            JournalError::Io { action: "lock", path: path.to_owned(), source }
        }
    };
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {}
            other => return other.map_err(failed),
        }
        // Only beside shared locks is there room for one more.
        file.try_lock_shared().map_err(failed)?;
        let unlocked = file.unlock();
        unlocked.map_err(|error| failed(TryLockError::Error(error)))?;
        thread::sleep(LOOK_PERIOD);
    }
}

/// Makes a directory that survives a crash: each new name is synced in the directory above it.
/// Nobody else may look into it, or change what is above it: a journal says who decides about a
/// guest.
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

    const SESSION: SessionId = SessionId([3; 16]);

    fn begin(directory: &Path) -> Result<FileJournal, JournalError> {
        let guest = GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() };
        FileJournal::begin(directory, SESSION, Side::Source, guest, ("b", &[]))
    }

    #[test]
    fn a_session_that_exists_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let journal = begin(directory.path()).unwrap();
        assert!(matches!(begin(directory.path()), Err(JournalError::Exists { .. })));
        assert!(journal.is_in_place());
        assert_eq!(read(journal.path(), Side::Source).unwrap().0.len(), 1);
    }

    /// Names the directory in the process that may not write to files.
    const FULL: &str = "VMFERRY_TEST_FULL_DISK";

    #[test]
    fn a_session_that_can_not_begin_leaves_nothing() {
        if let Some(directory) = std::env::var_os(FULL) {
            let directory = Path::new(&directory);
            let error = begin(directory).unwrap_err();
            assert!(matches!(error, JournalError::Io { action: "write", .. }), "{error}");
            assert!(!path_of(directory, SESSION, Side::Source).exists());
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        // This test once more, where no file may grow: every write fails, with an error and not with a signal.
        let test = "journal::file::tests::a_session_that_can_not_begin_leaves_nothing";
        let output = std::process::Command::new("sh")
            .args(["-c", r#"trap "" XFSZ; ulimit -f 0; exec "$0" "$@""#])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .env(FULL, directory.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        begin(directory.path()).expect("with room again the same session can begin");
    }

    #[test]
    fn whatever_fails_behind_the_name_takes_the_file_along() {
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
        // Another's file in its place is another's.
        let replace = |path: &Path| {
            std::fs::write(path.with_extension("new"), "other").unwrap();
            std::fs::rename(path.with_extension("new"), path).unwrap();
        };
        assert!(make(&replace).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
    }

    #[test]
    fn who_looks_is_waited_for_and_who_leads_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let open = || OpenOptions::new().append(true).create(true).open(&path).unwrap();
        let (ours, other) = (open(), open());
        other.lock_shared().unwrap();
        let looking = thread::spawn(move || {
            // For so long it looks: less than is waited for.
            thread::sleep(Duration::from_millis(20));
            other.unlock().unwrap();
            other
        });
        lock(&ours, &path).expect("the other one only looked");
        let other = looking.join().unwrap();
        assert!(matches!(lock(&other, &path), Err(JournalError::InUse { .. })));
        ours.unlock().unwrap();
        // One who looks and never ends is given up.
        other.lock_shared().unwrap();
        let begun = Instant::now();
        assert!(matches!(lock(&ours, &path), Err(JournalError::InUse { .. })));
        assert!(begun.elapsed() >= LOOK_PATIENCE);
    }

    #[test]
    fn an_empty_journal_is_no_unfinished_session() {
        let directory = tempfile::tempdir().unwrap();
        drop(FileJournal::create(directory.path(), SESSION, Side::Source).unwrap());
        let sessions = crate::journal::sessions(directory.path()).unwrap();
        assert!(!sessions[0].is_unfinished_source(), "nobody was told of it");
        let (mut journal, _) =
            FileJournal::reopen(directory.path(), SESSION, Side::Source).unwrap();
        journal.append(&Record::Commit).unwrap();
        drop(journal);
        let sessions = crate::journal::sessions(directory.path()).unwrap();
        assert!(sessions[0].is_unfinished_source(), "whatever is promised counts");
    }
}
