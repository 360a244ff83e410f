//! Unix sockets: a listener's file, and connecting within a time.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The file of a listening socket, removed when this is dropped.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have removed it, and somebody else listen there by now.
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Listens at `path`, for the file's owner only. The socket of a listener that died is replaced;
/// a file that is no socket never is.
///
/// # Errors
/// [`io::ErrorKind::AddrInUse`] if the path is taken, or what the system says.
pub fn listen(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    // A socket that is bound and does not listen yet looks like one whose listener died: one at a
    // time.
    let _lock = lock(directory)?;
    let socket = stream_socket(SocketFlags::CLOEXEC)?;
    // The file gets the socket's mode: there is no moment at which others may connect.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    let address = SocketAddrUnix::new(path)?;
    match rustix::net::bind(&socket, &address) {
        Err(Errno::ADDRINUSE) if is_stale(path, &address) => {
            std::fs::remove_file(path)?;
            rustix::net::bind(&socket, &address)?;
        }
        other => other?,
    }
    let file = SocketFile { path: path.to_owned(), identity: identity(path)? };
    rustix::net::listen(&socket, BACKLOG)?;
    Ok((UnixListener::from(socket), file))
}

/// How long a directory may be somebody else's who makes a socket there, which takes microseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Locks a directory. Whoever has locked it may have been stopped.
fn lock(directory: &Path) -> io::Result<File> {
    let lock = File::open(directory)?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(lock),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {
                // A lock with a bound can only be tried.
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(Errno::WOULDBLOCK) => {
                let text = format!(
                    "another process has locked {} for {} s to make a socket there: it may be stopped",
                    directory.display(),
                    LOCK_TIMEOUT.as_secs()
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Connections that may wait to be accepted: all channels of several sources.
const BACKLOG: i32 = 128;

/// Whether a socket's listener is gone. Connecting to a regular file is refused as well.
fn is_stale(path: &Path, address: &SocketAddrUnix) -> bool {
    let is_socket =
        std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    is_socket
        && stream_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
            .is_ok_and(|probe| rustix::net::connect(probe, address) == Err(Errno::CONNREFUSED))
}

/// Connects within `timeout`: a listener that accepts nobody has a full queue.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`], or what the system says.
pub fn connect(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket = stream_socket(SocketFlags::CLOEXEC)?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
        other => other?,
    }
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(UnixStream::from(socket))
}

fn stream_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_file_is_for_its_owner_and_goes_with_the_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (socket, file) = listen(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop((socket, file));
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notes");
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn the_file_of_a_successor_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = listen(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _second = listen(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[test]
    fn a_directory_that_stays_locked_is_an_error_that_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let held = lock(directory.path()).unwrap();
        let path = directory.path().join("s");
        let error = listen(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains(directory.path().to_str().unwrap()), "{error}");
        drop(held);
        listen(&path).unwrap();
    }

    #[test]
    fn a_listener_that_accepts_nobody_does_not_hold_a_dialler_or_a_rival_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (_socket, _file) = listen(&path).unwrap();
        let timeout = Duration::from_millis(20);
        let mut waiting = Vec::new();
        let error = loop {
            match connect(&path, timeout) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            assert!(waiting.len() < 10_000, "the queue is never full");
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
