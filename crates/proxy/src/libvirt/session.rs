//! One RPC connection, on either host.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use vmferry_libvirt_rpc::{Admit, CallGate, Passed, Reply, ReplyWatch};

use super::{MigrationStatus, Phase};
use crate::event::{ProxyEvent, Side};
use crate::proxy::{Ends, Shared};
use crate::stream::{Output, OutputError, Tap, Waker};

/// What both directions of a connection share. The migration's connection has ended when the last
/// of them is dropped.
pub(super) struct Session {
    shared: Weak<Shared>,
    number: u64,
    peer: String,
    side: Side,
    replies: Mutex<Replies>,
}

/// The direction from libvirt to its client.
struct Replies {
    watch: ReplyWatch,
    /// Refusals that wait for the end of the packet that libvirt is sending.
    pending: Vec<u8>,
    /// The local socket: the client's at the source, libvirt's at the destination.
    socket: UnixStream,
}

impl Session {
    pub fn new(shared: &Arc<Shared>, peer: String, side: Side, socket: UnixStream) -> Arc<Self> {
        let replies = Replies { watch: ReplyWatch::new(), pending: Vec::new(), socket };
        Arc::new(Self {
            number: shared.next_session(),
            shared: Arc::downgrade(shared),
            peer,
            side,
            replies: Mutex::new(replies),
        })
    }

    /// The ends of a stream whose local program is the client.
    pub fn source_ends(self: Arc<Self>, admit: Admit) -> io::Result<Ends> {
        let socket = self.socket()?;
        let calls = SourceCalls { session: Arc::clone(&self), gate: CallGate::new(admit) };
        let waker = Arc::new(Waker::new()?);
        let (tap, output) = (Some(Box::new(calls) as _), Box::new(SourceReplies(self)));
        Ok(Ends { socket, tap, output, waker, compress: false })
    }

    /// The ends of a stream whose local program is libvirt.
    pub fn destination_ends(self: Arc<Self>, admit: Admit) -> io::Result<Ends> {
        let (socket, waker) = (self.socket()?, Arc::new(Waker::new()?));
        let calls = DestinationCalls {
            session: Arc::clone(&self),
            gate: CallGate::new(admit),
            socket: self.socket()?,
            waker: Arc::clone(&waker),
        };
        let (tap, output) = (Some(Box::new(DestinationReplies(self)) as _), Box::new(calls));
        Ok(Ends { socket, tap, output, waker, compress: false })
    }

    fn socket(&self) -> io::Result<UnixStream> {
        self.replies.lock().socket.try_clone()
    }

    /// Reads calls. Returns the bytes to pass on, and the replies to refused calls.
    fn read_calls(&self, gate: &mut CallGate, bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>), String> {
        let mut passed = Passed::default();
        let read = gate.push(bytes, &mut passed);
        let shared = self.shared.upgrade();
        let mut refusals = Vec::new();
        for refused in passed.refused {
            if let Some(shared) = &shared {
                let wanted = format!("call procedure {} of libvirt", refused.header.procedure);
                let (peer, reason) = (self.caller(), refused.message);
                shared.tell(ProxyEvent::Refused { peer, wanted, reason });
            }
            refusals.extend(refused.reply);
        }
        for call in &passed.calls {
            let expected = self.replies.lock().watch.expect(call);
            expected.map_err(|error| vmferry::chain(&error))?;
            if let Some(shared) = &shared {
                shared.migrations.called(self.number, &self.peer, self.side, call);
            }
        }
        read.map_err(|error| vmferry::chain(&error))?;
        Ok((passed.bytes, refusals))
    }

    fn caller(&self) -> String {
        match self.side {
            Side::Opener => "libvirt of this host".into(),
            Side::Acceptor => self.peer.clone(),
        }
    }

    fn hear(&self, replies: &[Reply]) {
        let Some(shared) = self.shared.upgrade() else { return };
        for reply in replies {
            for migration in shared.migrations.replied(self.number, reply) {
                shared.tell(self.event(migration));
            }
        }
    }

    fn event(&self, migration: MigrationStatus) -> ProxyEvent {
        let MigrationStatus { guest, uuid, peer, side, phase, .. } = migration;
        let error = match phase {
            Phase::Copying | Phase::Preparing | Phase::Finishing => {
                return ProxyEvent::Prepared { guest, uuid: uuid.to_string(), peer, side };
            }
            Phase::Moved => None,
            Phase::Failed(error) => Some(error),
            Phase::Unanswered => Some(
                "the connection ended before the destination's libvirt said whether the guest runs \
                 there"
                    .into(),
            ),
        };
        ProxyEvent::Finished { guest, peer, side, error }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        for migration in shared.migrations.ended(self.number) {
            shared.tell(self.event(migration));
        }
    }
}

/// Calls that the source's libvirt makes.
struct SourceCalls {
    session: Arc<Session>,
    gate: CallGate,
}

impl Tap for SourceCalls {
    fn pass(&mut self, bytes: &[u8], into: &mut Vec<u8>) -> Result<(), String> {
        let (passed, refusals) = self.session.read_calls(&mut self.gate, bytes)?;
        into.extend(passed);
        if refusals.is_empty() {
            return Ok(());
        }
        let mut replies = self.session.replies.lock();
        replies.pending.extend(refusals);
        // A client that has gone is noticed by its reader.
        let _ = replies.write_pending();
        Ok(())
    }
}

/// Replies for the source's libvirt.
struct SourceReplies(Arc<Session>);

impl Output for SourceReplies {
    fn write(&mut self, bytes: &[u8]) -> Result<(), OutputError> {
        let mut heard = Vec::new();
        let mut replies = self.0.replies.lock();
        let read = replies.watch.push(bytes, &mut heard);
        read.map_err(|error| OutputError::Wrong { problem: vmferry::chain(&error) })?;
        // libvirt acts on a reply as soon as it has it, so it is noted before.
        self.0.hear(&heard);
        replies.socket.write_all(bytes)?;
        Ok(replies.write_pending()?)
    }
}

impl Replies {
    /// Writes the refusals if the client is between two packets.
    fn write_pending(&mut self) -> io::Result<()> {
        if self.watch.is_between_packets() {
            self.socket.write_all(&std::mem::take(&mut self.pending))?;
        }
        Ok(())
    }
}

/// Calls for the destination's libvirt.
struct DestinationCalls {
    session: Arc<Session>,
    gate: CallGate,
    socket: UnixStream,
    waker: Arc<Waker>,
}

impl Output for DestinationCalls {
    fn write(&mut self, bytes: &[u8]) -> Result<(), OutputError> {
        let read = self.session.read_calls(&mut self.gate, bytes);
        let (passed, refusals) = read.map_err(|problem| OutputError::Wrong { problem })?;
        if !refusals.is_empty() {
            self.session.replies.lock().pending.extend(refusals);
            self.waker.wake();
        }
        Ok(self.socket.write_all(&passed)?)
    }
}

/// Replies of the destination's libvirt.
struct DestinationReplies(Arc<Session>);

impl Tap for DestinationReplies {
    fn pass(&mut self, bytes: &[u8], into: &mut Vec<u8>) -> Result<(), String> {
        let mut heard = Vec::new();
        let mut replies = self.0.replies.lock();
        let read = replies.watch.push(bytes, &mut heard);
        read.map_err(|error| vmferry::chain(&error))?;
        into.extend_from_slice(bytes);
        if replies.watch.is_between_packets() {
            into.append(&mut replies.pending);
        }
        drop(replies);
        self.0.hear(&heard);
        Ok(())
    }
}
