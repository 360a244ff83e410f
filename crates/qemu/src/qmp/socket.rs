//! The socket of a QEMU that may not accept connections.

use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

/// Connects, waiting for this time for a place in the listener's queue, which a QEMU does not empty
/// while it is stopped or serves another client. Returns `None` if there was no place. Later writes
/// have the same timeout.
pub fn connect(path: &Path, after: Duration) -> io::Result<Option<UnixStream>> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(after))?;
    let address = SocketAddrUnix::new(path)?;
    let deadline = Instant::now() + after;
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(Some(socket.into())),
            Err(rustix::io::Errno::INTR) if Instant::now() < deadline => {}
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Writes a command, optionally with a descriptor.
pub fn write(
    mut stream: &UnixStream,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let Some(descriptor) = descriptor else { return stream.write_all(bytes) };
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    // The descriptor is sent with the first byte; a command is far shorter than a socket's buffer.
    let sent =
        rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(&bytes[sent..])
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn connect_to_a_full_queue_times_out() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        // The same backlog as QEMU's.
        rustix::net::listen(&listener, 1).unwrap();
        let after = Duration::from_millis(20);
        let mut waiting = Vec::new();
        // As many as the kernel lets wait, and not one more.
        while let Some(stream) = connect(&path, after).unwrap() {
            waiting.push(stream);
            assert!(waiting.len() < 10, "the queue has no end");
        }
        assert!(!waiting.is_empty());
        let nobody = directory.path().join("nobody");
        let error = connect(&nobody, after).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
