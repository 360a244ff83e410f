//! Directories that vmferry processes left behind when they were killed.
//!
//! A process holds a lock on its directory for as long as it lives, and the kernel releases the
//! lock when the process ends, however it ends. So a directory without a lock has no owner. A
//! process number would not tell: it may be another process's by now, or of another PID namespace.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use super::open_directory;

/// How the names of these directories begin.
const PREFIX: &str = "vmferry-qemu-";

/// How often a new directory is made again because another process removed it as a leftover.
const ATTEMPTS: usize = 16;

/// Makes a directory below `parent` with the lock that marks it as used, and opens it.
pub fn make_directory(
    parent: &Path,
    permissions: &std::fs::Permissions,
) -> io::Result<(TempDir, OwnedFd)> {
    for _ in 0..ATTEMPTS {
        let mut builder = tempfile::Builder::new();
        builder.prefix(PREFIX).permissions(permissions.clone());
        let directory = builder.tempdir_in(parent)?;
        let Some(opened) = lock(directory.path())? else { continue };
        return Ok((directory, opened));
    }
    Err(io::Error::other(format!(
        "other vmferry processes removed each new directory in `{}`",
        parent.display()
    )))
}

/// Locks a new directory. `None` if another process has removed it before.
fn lock(directory: &Path) -> io::Result<Option<OwnedFd>> {
    let opened = match open_directory(rustix::fs::CWD, directory) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match flock(&opened, FlockOperation::NonBlockingLockExclusive) {
        // The other process may have removed it between the two calls.
        Ok(()) => Ok(std::fs::symlink_metadata(directory).is_ok().then_some(opened)),
        // The other process is about to remove it.
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        // A file system that can't lock a directory: nobody removes it, then.
        Err(_) => Ok(Some(opened)),
    }
}

/// Removes the directories below `parent` that belong to this user and to no process. Failures are
/// ignored: the next process tries again.
pub fn remove_leftovers(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    let is_ours = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(PREFIX);
    for entry in entries.flatten().filter(|entry| is_ours(&entry.file_name())) {
        let _ = remove_if_left(&entry.path());
    }
}

fn remove_if_left(directory: &Path) -> io::Result<()> {
    let opened = open_directory(rustix::fs::CWD, directory)?;
    // Other users could give a directory such a name to have files of theirs removed by root.
    if rustix::fs::fstat(&opened)?.st_uid != rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    flock(&opened, FlockOperation::NonBlockingLockExclusive)?;
    std::fs::remove_dir_all(directory)
}
