//! The daemon's side.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::socket_with;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_socket,
};
use rustix::process::Pid;
use vmferry_handover::SessionId;

use super::{CHECK, DONE, DROP, HELD, HOLD, Message, TAKE, receive, send};

/// How long the keeper may take to accept a connection, and for each message. It does nothing that
/// takes long. A call that finds it stopped takes three times as long, to make another connection
/// and to ask again there: less than the 30 s after which libvirt gives up.
const TIMEOUT: Duration = Duration::from_secs(8);

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
/// The system's, or [`io::ErrorKind::TimedOut`].
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    connect_within(path, TIMEOUT)
}

fn connect_within(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    limit(&socket, timeout)?;
    connect_socket(&socket, &SocketAddrUnix::new(path)?)
        .map_err(|errno| in_words(errno.into(), timeout))?;
    Ok(socket)
}

/// Limits the time of each call on a socket, and of connecting it.
fn limit(socket: &OwnedFd, timeout: Duration) -> io::Result<()> {
    for which in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(socket, which, Some(timeout))?;
    }
    Ok(())
}

/// A time-out is no more than "Resource temporarily unavailable" in the system's words.
fn in_words(error: io::Error, timeout: Duration) -> io::Error {
    if error.kind() != io::ErrorKind::WouldBlock {
        return error;
    }
    let text = format!(
        "the process that keeps connections (`vmferry keep-connections`) has not answered for {} \
         s: it may be stopped (`kill -CONT`)",
        timeout.as_secs_f64()
    );
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// A connection to the keeper.
#[derive(Debug)]
pub struct Keeper {
    program: Arc<dyn KeeperProgram>,
    timeout: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` after a failure: a late answer would be taken for that of the next message.
    socket: Option<OwnedFd>,
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
        Self::start_within(program, TIMEOUT)
    }

    fn start_within(program: Arc<dyn KeeperProgram>, timeout: Duration) -> io::Result<Self> {
        let socket = program.connect()?;
        limit(&socket, timeout)?;
        let (process, socket) = (process_of(&socket), Some(socket));
        let state = Mutex::new(State { socket, process, held: HashMap::new(), restarts: 0 });
        Ok(Self { program, timeout, state })
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
        let duplicate = |held: &HeldConnection| {
            let HeldConnection { session, serial, socket } = held;
            Ok((*session, (*serial, socket.try_clone()?)))
        };
        let duplicates: Vec<_> = taken.iter().map(duplicate).collect::<io::Result<_>>()?;
        state.held.extend(duplicates);
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
        if let Some(keeper) = state.socket.take()
            && let Ok(answer) = call(&keeper, message, socket)
        {
            state.socket = Some(keeper);
            return Ok(answer);
        }
        let words = |error| in_words(error, self.timeout);
        let keeper = self.reconnect(state).map_err(words)?;
        let answer = call(&keeper, message, socket).map_err(words)?;
        state.socket = Some(keeper);
        Ok(answer)
    }

    /// A connection on which the keeper has been given all that it must have.
    fn reconnect(&self, state: &mut State) -> io::Result<OwnedFd> {
        let keeper = self.program.connect()?;
        limit(&keeper, self.timeout)?;
        for (&session, (serial, socket)) in &state.held {
            let message = Message { kind: HOLD, session, serial: *serial };
            call(&keeper, message, Some(socket))?;
        }
        let process = process_of(&keeper);
        state.restarts += u64::from(process != state.process);
        state.process = process;
        Ok(keeper)
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Instant;

    use rustix::net::{accept, bind, listen};

    use super::*;

    /// Long enough for an answer, and short enough for a test.
    const SHORT: Duration = Duration::from_millis(300);

    /// A socket at which nobody accepts a connection.
    #[derive(Debug)]
    struct Stopped(PathBuf);

    impl KeeperProgram for Stopped {
        fn connect(&self) -> io::Result<OwnedFd> {
            connect_within(&self.0, SHORT)
        }
    }

    fn stopped(backlog: i32) -> (tempfile::TempDir, PathBuf, OwnedFd) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keeper");
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let listener = listener.unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, backlog).unwrap();
        (directory, path, listener)
    }

    fn is_timeout(error: &io::Error) {
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        assert!(error.to_string().contains("vmferry keep-connections"), "{error}");
    }

    #[test]
    fn keeper_that_is_stopped_fails_and_is_asked_again() {
        let (_directory, path, listener) = stopped(64);
        let keeper = Keeper::start_within(Arc::new(Stopped(path)), SHORT).unwrap();
        is_timeout(&keeper.check().unwrap_err());
        let (_libvirt, ours) = UnixStream::pair().unwrap();
        is_timeout(&keeper.hold(SessionId([1; 16]), 1, &ours).unwrap_err());
        assert_eq!(keeper.connections(), 0);
        // It goes on. Some connections are those that were given up.
        std::thread::spawn(move || {
            while let Ok(daemon) = accept(&listener) {
                if let Ok(Some(_)) = receive(&daemon) {
                    let _ = send(&daemon, Message::of(DONE), None);
                }
            }
        });
        // On a busy machine, an answer may be late once more.
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = keeper.check() {
            is_timeout(&error);
            assert!(Instant::now() < deadline, "{error}");
        }
    }

    /// The answer to a message that was given up is not that to the next one.
    #[test]
    fn late_answer_is_not_taken_for_the_next() {
        let (_directory, path, listener) = stopped(64);
        let keeper = Keeper::start_within(Arc::new(Stopped(path)), SHORT).unwrap();
        is_timeout(&keeper.check().unwrap_err());
        let first = accept(&listener).unwrap();
        assert_eq!(receive(&first).unwrap().unwrap().0.kind, CHECK);
        // The daemon has closed it.
        send(&first, Message::of(DONE), None).unwrap_err();
        let (_libvirt, ours) = UnixStream::pair().unwrap();
        is_timeout(&keeper.hold(SessionId([1; 16]), 1, &ours).unwrap_err());
    }

    #[test]
    fn connecting_to_a_full_queue_has_a_time_limit() {
        let (_directory, path, _listener) = stopped(0);
        let mut connected = Vec::new();
        let error = loop {
            match connect_within(&path, SHORT) {
                Ok(socket) => connected.push(socket),
                Err(error) => break error,
            }
        };
        is_timeout(&error);
    }
}
