//! The lock of a journal: an exclusive lock belongs to the process that leads the session.

use std::fs::{File, TryLockError};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::JournalError;

/// How long to wait for processes that only check the lock, and how often to try again.
const CHECK_TIMEOUT: Duration = Duration::from_millis(200);
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Whether a process leads the session. If this cannot be determined, the session counts as led; a
/// process that wants to write will find out.
pub(super) fn is_locked(path: &Path) -> bool {
    File::open(path).map_or(true, |file| file.try_lock_shared().is_err())
}

/// Locks a journal exclusively for the process that leads its session. A process that
/// [checks](is_locked) the lock holds a shared lock for a moment, which is waited for. An exclusive
/// lock belongs to a leading process, and is an error at once.
pub(super) fn lock(file: &File, path: &Path) -> Result<(), JournalError> {
    let deadline = Instant::now() + CHECK_TIMEOUT;
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
        // A shared lock is granted only while all other locks are shared.
        file.try_lock_shared().map_err(failed)?;
        let unlocked = file.unlock();
        unlocked.map_err(|error| failed(TryLockError::Error(error)))?;
        thread::sleep(CHECK_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    #[test]
    fn lock_waits_for_a_check_but_not_for_a_leader() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let open = || OpenOptions::new().append(true).create(true).open(&path).unwrap();
        let (ours, other) = (open(), open());
        other.lock_shared().unwrap();
        let looking = thread::spawn(move || {
            // A check of the lock that takes less time than `CHECK_TIMEOUT`.
            thread::sleep(Duration::from_millis(20));
            other.unlock().unwrap();
            other
        });
        lock(&ours, &path).expect("the other lock is only a check");
        let other = looking.join().unwrap();
        assert!(matches!(lock(&other, &path), Err(JournalError::InUse { .. })));
        ours.unlock().unwrap();
        // A check that never ends makes the lock fail.
        other.lock_shared().unwrap();
        let begun = Instant::now();
        assert!(matches!(lock(&ours, &path), Err(JournalError::InUse { .. })));
        assert!(begun.elapsed() >= CHECK_TIMEOUT);
    }
}
