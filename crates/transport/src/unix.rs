//! Unix sockets: the file of a listener, and connecting with a time limit.

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

/// The file of a listening socket. Dropping this removes it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // The file may have been removed, and another process may listen there now.
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Listens on `path`, accessible only to its owner. Replaces the socket of a listener that died,
/// but never a file that is not a socket.
///
/// # Errors
/// [`io::ErrorKind::AddrInUse`] if the path is taken, or the operating system's error.
pub fn listen(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    // A socket between `bind` and `listen` looks like one whose listener died, so a lock serializes
    // this.
    let _lock = lock(directory)?;
    let socket = stream_socket(SocketFlags::CLOEXEC)?;
    // The file gets the socket's mode, so it is never accessible to other users.
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

/// How long to wait for another process that creates a socket in the directory, which takes
/// microseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Locks a directory. The process that holds the lock may be stopped, so the wait is limited.
fn lock(directory: &Path) -> io::Result<File> {
    let lock = File::open(directory)?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(lock),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {
                // `flock` has no timeout.
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(Errno::WOULDBLOCK) => {
                let text = format!(
                    "another process has locked {} for {} s to create a socket there; it may be \
                    stopped",
                    directory.display(),
                    LOCK_TIMEOUT.as_secs()
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Number of connections that may wait to be accepted: all channels of several sources.
const BACKLOG: i32 = 128;

/// Whether a socket's listener is gone. Connecting to a regular file also returns `ECONNREFUSED`.
fn is_stale(path: &Path, address: &SocketAddrUnix) -> bool {
    let is_socket =
        std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    is_socket
        && stream_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
            .is_ok_and(|probe| rustix::net::connect(probe, address) == Err(Errno::CONNREFUSED))
}

/// Connects within `timeout`. A listener that does not accept connections has a full queue.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`], or the operating system's error.
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
    fn socket_file_is_private_and_removed_with_the_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (socket, file) = listen(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop((socket, file));
        assert!(!path.exists());
    }

    #[test]
    fn listen_keeps_a_file_that_is_not_a_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notes");
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn drop_keeps_the_file_of_a_successor() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = listen(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _second = listen(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[test]
    fn listen_names_a_directory_that_stays_locked() {
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
    fn full_queue_is_a_timeout_for_connect_and_in_use_for_listen() {
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
