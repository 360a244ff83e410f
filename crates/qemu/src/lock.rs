//! One vmferry at a time works on a QEMU, whichever of its QMP sockets it uses.
//!
//! The lock is a `flock(2)` on a file of the process in `/proc`. It therefore belongs to that very
//! process, is the same from each runtime directory, and is released when the process that holds it
//! ends. Only processes that may trace QEMU can open the file, so no other user can keep a guest
//! from being moved. A lock on a pidfd would hold across all mounts of `/proc`, which this one does
//! not, but any user could take it.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use crate::error::QemuError;

/// How often the lock is retried. The kernel notifies only callers that block without a timeout.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// The right to work on a QEMU. It is released on drop.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough: a child that another thread has forked, and that has not called
        // `exec` yet, shares the open file. An error here means that there is no lock.
        let _ = self.file.unlock();
    }
}

impl Lock {
    /// Takes the lock if it is free.
    ///
    /// # Errors
    /// `QemuError::Locked` with the holder, or that this process may not access QEMU's `/proc`
    /// files.
    pub fn take(pid: u32) -> Result<Self, QemuError> {
        let failed = |source| QemuError::Process { action: "take the lock", pid, source };
        let file = File::open(format!("/proc/{pid}/environ")).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { file }),
            Err(TryLockError::WouldBlock) => {
                Err(QemuError::Locked { pid, by: holder(&file).filter(|by| *by != 0) })
            }
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }

    /// Takes the lock, and retries for this time while a holder that is about to end still has it.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_within(pid: u32, patience: Duration) -> Result<Self, QemuError> {
        let deadline = Instant::now() + patience;
        loop {
            match Self::take(pid) {
                Err(QemuError::Locked { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(LOOK_PERIOD);
                }
                other => return other,
            }
        }
    }

    /// Takes the lock if the QEMU process is visible. There is no lock for a process that is not,
    /// and vmferry does nothing in that process.
    ///
    /// # Errors
    /// `QemuError::Locked` with the holder.
    pub fn take_if_seen(pid: Option<u32>) -> Result<Option<Self>, QemuError> {
        match pid.map(Self::take) {
            Some(Err(QemuError::Process { .. })) | None => Ok(None),
            Some(taken) => taken.map(Some),
        }
    }
}

/// The process that holds the lock on a file, from `/proc/locks`.
fn holder(file: &File) -> Option<u32> {
    let about = file.metadata().ok()?;
    let (major, minor) = (rustix::fs::major(about.dev()), rustix::fs::minor(about.dev()));
    let wanted = format!("{major:02x}:{minor:02x}:{}", about.ino());
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // "1: FLOCK  ADVISORY  WRITE 8195 00:15:64022 0 EOF"
        let mut words = line.split_whitespace().skip(1);
        let (kind, pid, what) = (words.next()?, words.nth(2)?, words.next()?);
        (kind == "FLOCK" && what == wanted).then(|| pid.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_is_exclusive_and_names_its_holder() {
        let mut process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = process.id();
        let lock = Lock::take(pid).unwrap();
        let error = Lock::take(pid).unwrap_err();
        let own = std::process::id();
        assert!(matches!(error, QemuError::Locked { by: Some(by), .. } if by == own), "{error:?}");
        // Another process is another lock.
        Lock::take(own).unwrap();
        // A forked process would hold this copy.
        let copy = lock.file.try_clone().unwrap();
        let waiting = std::thread::spawn(move || Lock::take_within(pid, Duration::from_secs(60)));
        drop(lock);
        let lock = waiting.join().unwrap().unwrap();
        drop((lock, copy));
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(matches!(Lock::take(pid), Err(QemuError::Process { .. })));
        assert!(Lock::take_if_seen(Some(pid)).unwrap().is_none());
    }
}
