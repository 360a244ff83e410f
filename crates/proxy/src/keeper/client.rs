//! The daemon's side.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::net::socket_with;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_socket,
};
use rustix::process::Pid;
use vmferry_handover::SessionId;

use super::{CHECK, DONE, DROP, HELD, HOLD, Message, TAKE, receive, send};

/// The keeper's process.
pub trait KeeperProgram: fmt::Debug + Send + Sync {
    /// Connects to the keeper, and starts it first unless one serves. See [`connect`].
    ///
    /// # Errors
    /// Why it can't be started or does not serve.
    fn connect(&self) -> io::Result<OwnedFd>;
}

/// Connects to the keeper that listens at a path.
///
/// # Errors
/// The system's.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    connect_socket(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// A connection to the keeper.
#[derive(Debug)]
pub struct Keeper {
    program: Arc<dyn KeeperProgram>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    socket: OwnedFd,
    process: Option<Pid>,
    /// What the keeper has, to be given to one that was started again.
    held: HashMap<SessionId, (u32, UnixStream)>,
    /// How often another process has taken the keeper's place.
    restarts: u64,
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
    /// Connects to the keeper, and starts it unless one serves.
    ///
    /// # Errors
    /// The program's.
    pub fn start(program: Arc<dyn KeeperProgram>) -> io::Result<Self> {
        let socket = program.connect()?;
        let process = process_of(&socket);
        let state = Mutex::new(State { socket, process, held: HashMap::new(), restarts: 0 });
        Ok(Self { program, state })
    }

    /// Checks that the keeper answers. One that has ended is started again.
    ///
    /// # Errors
    /// It can't be started.
    pub fn check(&self) -> io::Result<()> {
        self.call(&mut self.state.lock(), Message::of(CHECK), None).map(drop)
    }

    /// How often a keeper that had ended was started again.
    pub fn restarts(&self) -> u64 {
        self.state.lock().restarts
    }

    /// The number of connections that the keeper has.
    pub fn connections(&self) -> usize {
        self.state.lock().held.len()
    }

    /// Gives the keeper a duplicate of a connection. On return it has it.
    ///
    /// # Errors
    /// The keeper has gone.
    pub fn hold(&self, session: SessionId, serial: u32, socket: &UnixStream) -> io::Result<()> {
        let message = Message { kind: HOLD, session, serial };
        let duplicate = socket.try_clone()?;
        let mut state = self.state.lock();
        self.call(&mut state, message, Some(socket))?;
        state.held.insert(session, (serial, duplicate));
        Ok(())
    }

    /// The keeper need not hold the session's connection any more.
    ///
    /// # Errors
    /// The keeper has gone.
    pub fn drop_session(&self, session: SessionId) -> io::Result<()> {
        let mut state = self.state.lock();
        state.held.remove(&session);
        self.call(&mut state, Message { kind: DROP, session, serial: 0 }, None).map(drop)
    }

    /// Duplicates of all connections that the keeper holds. It answers nothing on them any more,
    /// as long as this daemon is connected.
    ///
    /// # Errors
    /// The keeper has gone.
    pub fn take(&self) -> io::Result<Vec<HeldConnection>> {
        let mut state = self.state.lock();
        let taken = self.call(&mut state, Message::of(TAKE), None)?;
        for HeldConnection { session, serial, socket } in &taken {
            state.held.insert(*session, (*serial, socket.try_clone()?));
        }
        Ok(taken)
    }

    fn call(
        &self,
        state: &mut State,
        message: Message,
        socket: Option<&UnixStream>,
    ) -> io::Result<Vec<HeldConnection>> {
        // The keeper serves the daemon that has connected last. One that was started by mistake
        // beside this one takes its place for a moment.
        call(&state.socket, message, socket).or_else(|_| {
            self.reconnect(state)?;
            call(&state.socket, message, socket)
        })
    }

    fn reconnect(&self, state: &mut State) -> io::Result<()> {
        let keeper = self.program.connect()?;
        let process = process_of(&keeper);
        for (&session, (serial, socket)) in &state.held {
            let message = Message { kind: HOLD, session, serial: *serial };
            call(&keeper, message, Some(socket))?;
        }
        state.restarts += u64::from(process != state.process);
        (state.socket, state.process) = (keeper, process);
        Ok(())
    }
}

/// The process that listens at the other end.
fn process_of(keeper: &OwnedFd) -> Option<Pid> {
    socket_peercred(keeper).ok().map(|peer| peer.pid)
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
