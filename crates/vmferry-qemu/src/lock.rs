//! One vmferry at a time works on a QEMU, whichever of its QMP sockets it came by.
//!
//! The lock is one of `flock(2)` on a file of the process in `/proc`, so it belongs to that very
//! process, is the same from each runtime directory, and is released when the process that holds it
//! ends. Only processes that may trace QEMU can open the file, so no other user can keep a guest
//! from being moved. A lock on a pidfd would hold in each mount of `/proc`, which this one does
//! not, but any user could take it.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use crate::error::QemuError;

/// How often is tried whether it is free. The kernel tells nobody who does not wait for ever.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// The right to work on a QEMU. Given back when dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough: a process that another thread has forked, and that has not started
        // its program yet, has the same open file. That it fails means that there is no lock.
        let _ = self.file.unlock();
    }
}

impl Lock {
    /// Takes the lock if it is free.
    ///
    /// # Errors
    /// Who has it; or that this process may not look into QEMU.
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

    /// The same, if somebody who is about to end has it no longer within this time.
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

    /// The lock of a QEMU that may not be seen: there is none then, and nothing is done in that
    /// process.
    ///
    /// # Errors
    /// Who has it.
    pub fn take_if_seen(pid: Option<u32>) -> Result<Option<Self>, QemuError> {
        match pid.map(Self::take) {
            Some(Err(QemuError::Process { .. })) | None => Ok(None),
            Some(taken) => taken.map(Some),
        }
    }
}

/// Who has a file locked, as the kernel lists it.
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
    fn a_process_is_locked_once_and_the_holder_is_named() {
        let mut process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = process.id();
        let lock = Lock::take(pid).unwrap();
        let error = Lock::take(pid).unwrap_err();
        let own = std::process::id();
        assert!(matches!(error, QemuError::Locked { by: Some(by), .. } if by == own), "{error:?}");
        // Another process is another lock.
        Lock::take(own).unwrap();
        // As a forked process has it.
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
