//! A directory for the sockets between vmferry and a QEMU that may run as another user.
//!
//! vmferry may be root, and QEMU's user is not trusted. Two rules keep that user from redirecting
//! root to another file:
//!
//! * vmferry creates and changes names only in the outer directory, which it keeps as owner, and
//!   only relative to the descriptor that it holds of it. QEMU's user may only traverse this
//!   directory.
//! * QEMU listens in an inner directory, which QEMU's user owns. vmferry opens the socket there
//!   without following links, connects to what it has opened, and checks which user the peer has.

mod leftovers;

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use tempfile::TempDir;

use crate::error::QemuError;
use crate::qmp::{Qmp, QmpError, credentials};

/// The directory in which QEMU listens, within the outer one.
const INNER: &str = "qemu";

/// The socket's name, in either directory.
const SOCKET: &str = "stream";

/// A directory for one socket at a time, which only QEMU's user may reach.
#[derive(Debug)]
pub struct Place {
    directory: TempDir,
    outer: OwnedFd,
    inner: OwnedFd,
    /// QEMU's user, if it differs from vmferry's.
    user: Option<Uid>,
}

impl Place {
    /// Creates one for a QEMU, below `$TMPDIR`, where QEMU's user can reach it: vmferry's runtime
    /// directory is for vmferry's user only. Removes those that killed processes have left there.
    ///
    /// # Errors
    /// System call errors.
    pub fn new(qmp: &Qmp) -> Result<Self, QemuError> {
        let theirs = Uid::from_raw(effective_user(qmp)?);
        Self::for_user((theirs != rustix::process::geteuid()).then_some(theirs))
    }

    /// The given one, or a new one that is kept in `made`.
    ///
    /// # Errors
    /// System call errors.
    pub fn given_or_new<'a>(
        given: Option<&'a Self>,
        made: &'a mut Option<Self>,
        qmp: &Qmp,
    ) -> Result<&'a Self, QemuError> {
        match given {
            Some(place) => Ok(place),
            None => Ok(made.insert(Self::new(qmp)?)),
        }
    }

    /// The same as [`new`](Self::new) for a QEMU whose process is visible.
    ///
    /// # Errors
    /// System call errors.
    pub fn of_process(pid: u32) -> Result<Self, QemuError> {
        let failed = |source| QemuError::Process { action: "find the user", pid, source };
        let theirs = user_of(pid).map_err(failed)?;
        Self::for_user(
            Some(Uid::from_raw(theirs)).filter(|user| *user != rustix::process::geteuid()),
        )
    }

    fn for_user(user: Option<Uid>) -> Result<Self, QemuError> {
        let failed = |source| QemuError::Local { action: "make a directory", source };
        let parent = std::env::temp_dir();
        leftovers::remove_leftovers(&parent);
        let mode = Permissions::from_mode(if user.is_some() { 0o711 } else { 0o700 });
        let (directory, outer) = leftovers::make_directory(&parent, &mode).map_err(failed)?;
        rustix::fs::mkdirat(&outer, INNER, Mode::RWXU).map_err(|errno| failed(errno.into()))?;
        let inner = open_directory(outer.as_fd(), Path::new(INNER)).map_err(failed)?;
        if user.is_some() {
            rustix::fs::fchown(&inner, user, None::<Gid>).map_err(not_given)?;
        }
        Ok(Self { directory, outer, inner, user })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The URI that QEMU must connect to once vmferry [listens](Self::listen).
    pub fn our_uri(&self) -> String {
        uri(&self.path().join(SOCKET))
    }

    /// The URI that QEMU must listen on, so that vmferry can [connect](Self::connect).
    pub fn their_uri(&self) -> String {
        uri(&self.path().join(INNER).join(SOCKET))
    }

    /// Listens on a socket that only QEMU's user and root may connect to.
    ///
    /// # Errors
    /// System call errors.
    pub fn listen(&self) -> Result<UnixListener, QemuError> {
        let failed = |source| QemuError::Local { action: "listen for QEMU", source };
        remove(&self.outer);
        let listener = UnixListener::bind(below(self.outer.as_fd(), SOCKET)).map_err(failed)?;
        if self.user.is_some() {
            // No other user can have created anything here. A link would not be followed either.
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::chownat(&self.outer, SOCKET, self.user, None::<Gid>, flags)
                .map_err(not_given)?;
        }
        Ok(listener)
    }

    /// Connects to the socket that QEMU listens on.
    ///
    /// # Errors
    /// System call errors, or that the peer is not QEMU's user.
    pub fn connect(&self) -> io::Result<UnixStream> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = rustix::fs::openat(&self.inner, SOCKET, flags, Mode::empty())?;
        let found = rustix::fs::fstat(&socket)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
            return Err(io::Error::other(format!("`{SOCKET}` there is no socket")));
        }
        let stream = UnixStream::connect(format!("/proc/self/fd/{}", socket.as_raw_fd()))?;
        let peer = credentials(&stream)?.uid;
        match self.user.map(Uid::as_raw) {
            Some(user) if peer != user => Err(io::Error::other(format!(
                "user {peer} listens there, and not QEMU's user {user}"
            ))),
            _ => Ok(stream),
        }
    }

    /// Removes the socket that a QEMU has listened on.
    pub fn clear(&self) {
        remove(&self.inner);
    }
}

fn uri(path: &Path) -> String {
    format!("unix:{}", path.display())
}

/// A name in a directory that is held open, independent of the directory's own name.
fn below(directory: BorrowedFd<'_>, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd()))
}

/// Removes the socket from a directory, if there is one. If it is a symbolic link, the link is
/// removed.
fn remove(directory: &OwnedFd) {
    let _ = rustix::fs::unlinkat(directory, SOCKET, AtFlags::empty());
}

fn open_directory(at: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, path, flags, Mode::empty())?)
}

fn not_given(errno: rustix::io::Errno) -> QemuError {
    QemuError::Local {
        action: "give QEMU's user a socket: run vmferry as root or as that user, or without \
                 further channels",
        source: errno.into(),
    }
}

/// The user that QEMU runs as: from `/proc/PID/status`, which is world-readable, or from the QMP
/// socket if the process is not visible.
fn effective_user(qmp: &Qmp) -> Result<u32, QmpError> {
    qmp.pid().and_then(|pid| user_of(pid).ok()).map_or_else(|| qmp.user(), Ok)
}

fn user_of(pid: u32) -> io::Result<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    // Real, effective, saved and file system UID.
    let effective = line.and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok());
    effective.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests;
