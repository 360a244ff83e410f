//! The daemon's side.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use vmferry_handover::SessionId;

use super::{CHECK, DONE, DROP, HELD, HOLD, Message, TAKE, receive, send};

/// A connection to the keeper.
#[derive(Debug)]
pub struct Keeper {
    path: PathBuf,
    socket: Mutex<OwnedFd>,
}

/// A connection of libvirt that the keeper has held.
#[derive(Debug)]
pub struct HeldConnection {
    /// The session of its Finish.
    pub session: SessionId,
    /// The serial number of the Finish.
    pub serial: u32,
    /// The connection.
    pub socket: UnixStream,
}

impl Keeper {
    /// Connects to the keeper that listens at `path`.
    ///
    /// # Errors
    /// The system's.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = Mutex::new(connect_to(path)?);
        Ok(Self { path: path.to_owned(), socket })
    }

    /// Checks that the keeper answers.
    ///
    /// # Errors
    /// The keeper has gone.
    pub fn check(&self) -> io::Result<()> {
        self.call(Message::of(CHECK), None).map(drop)
    }

    /// Gives the keeper a duplicate of a connection. On return it has it.
    ///
    /// # Errors
    /// The keeper has gone.
    pub fn hold(&self, session: SessionId, serial: u32, socket: &UnixStream) -> io::Result<()> {
        let message = Message { kind: HOLD, session, serial };
        self.call(message, Some(socket)).map(drop)
    }

    /// The keeper need not hold the session's connection any more.
    ///
    /// # Errors
    /// The keeper has gone.
    pub fn drop_session(&self, session: SessionId) -> io::Result<()> {
        self.call(Message { kind: DROP, session, serial: 0 }, None).map(drop)
    }

    /// Duplicates of all connections that the keeper holds. It answers nothing on them any more,
    /// as long as this daemon is connected.
    ///
    /// # Errors
    /// The keeper has gone.
    pub fn take(&self) -> io::Result<Vec<HeldConnection>> {
        self.call(Message::of(TAKE), None)
    }

    fn call(
        &self,
        message: Message,
        socket: Option<&UnixStream>,
    ) -> io::Result<Vec<HeldConnection>> {
        let mut keeper = self.socket.lock();
        // The keeper serves the daemon that has connected last. One that was started by mistake
        // beside this one takes its place for a moment.
        call(&keeper, message, socket).or_else(|_| {
            *keeper = connect_to(&self.path)?;
            call(&keeper, message, socket)
        })
    }
}

fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn call(
    keeper: &OwnedFd,
    message: Message,
    socket: Option<&UnixStream>,
) -> io::Result<Vec<HeldConnection>> {
    send(keeper, message, socket.map(AsFd::as_fd))?;
    let mut held = Vec::new();
    loop {
        match receive(keeper)? {
            Some((Message { kind: DONE, .. }, _)) => return Ok(held),
            Some((Message { kind: HELD, session, serial }, Some(descriptor))) => {
                held.push(HeldConnection { session, serial, socket: descriptor.into() });
            }
            Some(_) => return Err(io::Error::other("the keeper's answer is not understood")),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
