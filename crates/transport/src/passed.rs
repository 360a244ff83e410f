//! Sockets that another process of this host has accepted and passes on, over a Unix socket.
//!
//! That process connects to the Unix socket of the receiver, sends one byte with the descriptor,
//! and closes the connection.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};

use crate::given::connected;
use crate::stream::Stream;
use crate::unix::{self, SocketFile};

/// How long a process that has connected may take to send a descriptor.
const PASS_TIMEOUT: Duration = Duration::from_secs(1);

/// Passes a connected socket to the process that listens at `path`, within `timeout`.
///
/// # Errors
/// The operating system's error: [`io::ErrorKind::NotFound`] or
/// [`io::ErrorKind::ConnectionRefused`] if no process listens there.
pub fn pass_socket(path: &Path, socket: impl AsFd, timeout: Duration) -> io::Result<()> {
    let stream = unix::connect(path, timeout)?;
    stream.set_write_timeout(Some(timeout))?;
    let descriptors = [socket.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(&stream, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The receiver's end.
#[derive(Debug)]
pub(crate) struct PassedSockets {
    /// Removed before the socket stops listening.
    _file: SocketFile,
    listener: UnixListener,
}

impl PassedSockets {
    /// Listens at `path`. Only this user's processes and root's can connect.
    ///
    /// # Errors
    /// As [`unix::listen`].
    pub fn listen(path: &Path) -> io::Result<Self> {
        let (listener, file) = unix::listen(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { _file: file, listener })
    }

    /// The next socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is none, or if a process passes none. The operating
    /// system's error.
    pub fn accept(&self) -> io::Result<Stream> {
        let (connection, _) = self.listener.accept()?;
        // What is wrong with one connection says nothing about the next one.
        receive(&connection).map_err(|_| io::ErrorKind::WouldBlock.into())
    }
}

impl AsFd for PassedSockets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

fn receive(connection: &UnixStream) -> io::Result<Stream> {
    connection.set_nonblocking(false)?;
    connection.set_read_timeout(Some(PASS_TIMEOUT))?;
    let peer = sockopt::socket_peercred(connection)?.uid;
    if !peer.is_root() && peer != rustix::process::geteuid() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let slices = &mut [IoSliceMut::new(&mut byte)];
    recvmsg(connection, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let descriptor: Option<OwnedFd> = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let descriptor = descriptor.ok_or(io::ErrorKind::InvalidData)?;
    connected(descriptor).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::{Address, Listener};

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn passed_socket_is_accepted_as_its_peer_sees_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("in");
        let address = Address::Passed(path.clone());
        let listener = Listener::bind(&address, None).unwrap();
        assert_eq!(listener.local_address().to_string(), format!("passed:{}", path.display()));
        let shared = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut source = TcpStream::connect(shared.local_addr().unwrap()).unwrap();
        let (accepted, _) = shared.accept().unwrap();
        // A connection without a descriptor changes nothing.
        drop(UnixStream::connect(&path).unwrap());
        let mut without = UnixStream::connect(&path).unwrap();
        without.write_all(b"x").unwrap();
        pass_socket(&path, &accepted, LIMIT).unwrap();
        drop(accepted);
        let pending = listener.accept().unwrap().unwrap();
        assert_eq!(pending.peer_address(), source.local_addr().unwrap().to_string());
        let (mut reader, mut writer) = pending.handshake(LIMIT).unwrap().split();
        source.write_all(b"to").unwrap();
        let mut bytes = [0; 2];
        reader.read_exact(&mut bytes).unwrap();
        writer.write_all(b"fro").unwrap();
        let mut bytes = [0; 3];
        source.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"fro");
        drop(listener);
        let gone = pass_socket(&path, &source, LIMIT).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn closer_ends_the_wait() {
        let directory = tempfile::tempdir().unwrap();
        let address = Address::Passed(directory.path().join("in"));
        let listener = Listener::bind(&address, None).unwrap();
        listener.closer().close();
        assert!(listener.accept().unwrap().is_none());
    }
}
