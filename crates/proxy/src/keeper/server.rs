//! The keeper itself.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use vmferry_handover::SessionId;
use vmferry_libvirt_rpc::{CallGate, Passed};

use super::{CHECK, DONE, DROP, HELD, HOLD, Message, TAKE, receive, send};

/// A keeper without connections and without a daemon ends after this time.
const IDLE: Duration = Duration::from_secs(10);

/// The most connections: those of guests whose Finish is under way at the same time.
const MAX_HELD: usize = 1024;

/// A connection that is held.
struct Held {
    serial: u32,
    socket: UnixStream,
    /// Finds keep-alive messages.
    gate: CallGate,
}

/// Listens at `path` and holds connections, until it has neither a connection nor a daemon. Calls
/// `ready` once daemons can connect.
///
/// # Errors
/// The path can't be used, such as [`io::ErrorKind::AddrInUse`] if another keeper listens there.
pub fn serve(path: &Path, ready: impl FnOnce()) -> io::Result<()> {
    let listener =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    listen(&listener, 4)?;
    ready();
    let mut keeper = Server { listener, daemon: None, held: HashMap::new() };
    while keeper.turn()? {}
    // Another keeper can't have bound it meanwhile: the file was there.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

struct Server {
    listener: OwnedFd,
    daemon: Option<OwnedFd>,
    held: HashMap<SessionId, Held>,
}

impl Server {
    /// Waits for something and handles it. Returns false at the end.
    fn turn(&mut self) -> io::Result<bool> {
        let sessions: Vec<SessionId> = self.held.keys().copied().collect();
        let mut polled = vec![PollFd::new(&self.listener, PollFlags::IN)];
        let limit = match &self.daemon {
            // The daemon answers on the connections itself.
            Some(daemon) => {
                polled.push(PollFd::new(daemon, PollFlags::IN));
                None
            }
            None => {
                let sockets = sessions.iter().map(|session| &self.held[session].socket);
                polled.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
                sessions.is_empty().then_some(IDLE)
            }
        };
        let limit = limit.map(Timespec::try_from).transpose();
        let limit = limit.map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut polled, limit.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
        let ready: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        drop(polled);
        if ready[0] {
            // A new daemon replaces one whose end was not noticed yet.
            self.daemon = accept_with(&self.listener, SocketFlags::CLOEXEC).ok();
            return Ok(true);
        }
        if let Some(daemon) = self.daemon.take() {
            if !ready[1] || self.obey(&daemon).is_ok_and(|connected| connected) {
                self.daemon = Some(daemon);
            }
            return Ok(true);
        }
        for (session, _) in sessions.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            self.tend(*session);
        }
        Ok(true)
    }

    /// Does what the daemon wants. Returns whether it is still connected.
    fn obey(&mut self, daemon: &OwnedFd) -> io::Result<bool> {
        let Some((message, descriptor)) = receive(daemon)? else { return Ok(false) };
        match (message.kind, descriptor) {
            (HOLD, Some(descriptor)) if self.held.len() < MAX_HELD => {
                let refuse = |_: &vmferry_libvirt_rpc::Asking<'_>| Err("no daemon runs".into());
                let gate = CallGate::new(Box::new(refuse));
                let held = Held { serial: message.serial, socket: descriptor.into(), gate };
                self.held.insert(message.session, held);
            }
            (DROP, _) => drop(self.held.remove(&message.session)),
            (CHECK, _) => {}
            (TAKE, _) => {
                for (&session, held) in &self.held {
                    let message = Message { kind: HELD, session, serial: held.serial };
                    send(daemon, message, Some(held.socket.as_fd()))?;
                }
            }
            // The daemon must not send its Finish, so it gets no answer.
            _ => return Ok(false),
        }
        send(daemon, Message::of(DONE), None)?;
        Ok(true)
    }

    /// Answers libvirt's keep-alive messages on a connection.
    fn tend(&mut self, session: SessionId) {
        let Some(held) = self.held.get_mut(&session) else { return };
        let (mut bytes, mut passed) = ([0; 4096], Passed::default());
        let goes_on = match held.socket.read(&mut bytes) {
            Ok(0) => false,
            Ok(read) => {
                // libvirt makes no other call while it waits for its Finish.
                let understood = held.gate.push(&bytes[..read], &mut passed).is_ok();
                understood && held.socket.write_all(&passed.pongs).is_ok()
            }
            Err(error) => error.kind() == io::ErrorKind::Interrupted,
        };
        if !goes_on {
            // libvirt has gone, and takes its guest up again as after any restart of its own.
            self.held.remove(&session);
        }
    }
}
