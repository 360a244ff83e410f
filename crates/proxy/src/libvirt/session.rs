//! One RPC connection, on either host.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmferry_handover::{FinishAnswer, FinishWord, SessionId};
use vmferry_libvirt_rpc::{Call, CallGate, FinishCall, Guest, Passed, Reply, ReplyWatch};
use vmferry_transport::PeerIdentity;

use super::ledger::{LedgerError, SourceLedger};
use super::settle::{Heard, Unanswered};
use super::shelter::{Awaited, MAX_AWAITED, has_ended};
use super::{MigrationStatus, Phase};
use crate::arrival_directories::UsedDirectory;
use crate::event::{ProxyEvent, Side};
use crate::opened::OpenedStreams;
use crate::proxy::Shared;

/// How long a Finish waits for streams that the peer has not connected to its QEMU yet. When a
/// post-copy is resumed, libvirt calls Finish at once, and it fails if QEMU has no connection.
/// Short enough that libvirt does not miss the answers to its pings.
const FINISH_DELAY: Duration = Duration::from_secs(10);

/// What both directions of a connection share. The migration's connection has ended when the last
/// of them is dropped.
pub(super) struct Session {
    shared: Weak<Shared>,
    number: u64,
    peer: String,
    side: Side,
    /// The number by which both hosts' journals know the migration.
    session: SessionId,
    part: Mutex<Part>,
    /// Set while libvirt of this host must not see its connection fail: from a Finish to its reply.
    shelter: Arc<AtomicBool>,
    pub replies: Mutex<Replies>,
}

/// What this host does in the migration.
pub(super) enum Part {
    /// Its libvirt calls.
    Source {
        /// What was promised, from Prepare on.
        ledger: Option<SourceLedger>,
        /// The Finish that was sent and not answered.
        finish: Option<FinishCall>,
        /// The migration's streams.
        opened: Arc<OpenedStreams>,
    },
    /// Its libvirt is called.
    Destination {
        /// The source.
        source: PeerIdentity,
        /// Whether a Finish that is not canceled was passed and not answered.
        finishing: bool,
        /// Where its QEMU makes sockets.
        _directory: UsedDirectory,
    },
}

impl Part {
    pub fn source(opened: Arc<OpenedStreams>) -> Self {
        Self::Source { ledger: None, finish: None, opened }
    }

    pub fn destination(source: PeerIdentity, directory: UsedDirectory) -> Self {
        Self::Destination { source, finishing: false, _directory: directory }
    }
}

/// The direction from libvirt to its client.
pub(super) struct Replies {
    pub watch: ReplyWatch,
    /// Refusals, and at the source answers to the client's pings, that wait for the end of the
    /// packet that libvirt is sending.
    pub pending: Vec<u8>,
    /// The local socket: the client's at the source, libvirt's at the destination.
    pub socket: UnixStream,
}

impl Session {
    pub fn new(
        shared: &Arc<Shared>,
        peer: String,
        session: SessionId,
        part: Part,
        socket: UnixStream,
    ) -> Arc<Self> {
        let side = match part {
            Part::Source { .. } => Side::Opener,
            Part::Destination { .. } => Side::Acceptor,
        };
        let replies = Replies { watch: ReplyWatch::new(), pending: Vec::new(), socket };
        Arc::new(Self {
            number: shared.next_session(),
            shared: Arc::downgrade(shared),
            peer,
            side,
            session,
            part: Mutex::new(part),
            shelter: Arc::default(),
            replies: Mutex::new(replies),
        })
    }

    /// Begins the journal of a guest whose Prepare is about to pass.
    ///
    /// # Errors
    /// Why the migration can't begin.
    pub fn begin(&self, guest: &Guest) -> Result<(), String> {
        let Some(shared) = self.shared.upgrade() else { return Err("the daemon ends".into()) };
        let journals = &shared.config().journals;
        if self.side == Side::Opener
            && let Some(keeper) = &shared.keeper
        {
            // The Finish could not be sent without it, after all memory had been copied.
            keeper.check().map_err(|error| {
                format!(
                    "the process that keeps connections does not answer and can't be started \
                     again: {error}"
                )
            })?;
        }
        let begun = match &mut *self.part.lock() {
            Part::Source { ledger: Some(_), .. } => {
                return Err("one connection moves one guest: connect again".into());
            }
            Part::Source { ledger, .. } => {
                SourceLedger::begin(journals, self.session, guest, &self.peer)
                    .map(|begun| *ledger = Some(begun))
            }
            Part::Destination { source, .. } => {
                shared.migrations.arrivals.begin(journals, self.session, guest, source)
            }
        };
        begun.map_err(|error| vmferry::chain(&error))
    }

    /// Distinguishes connections.
    pub fn number(&self) -> u64 {
        self.number
    }

    pub fn shelter(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shelter)
    }

    /// A Finish is about to pass. It may on return.
    fn finish(&self, shared: &Shared, call: &FinishCall) -> Result<(), String> {
        if call.cancelled {
            return Ok(());
        }
        let opened = match &*self.part.lock() {
            Part::Source { opened, .. } => Some(Arc::clone(opened)),
            Part::Destination { .. } => None,
        };
        if let Some(opened) = opened {
            opened.await_first_links(Instant::now() + FINISH_DELAY);
        }
        // `replies` is never locked after `part`.
        let socket = self.socket().map_err(|error| error.to_string())?;
        let passed = match &mut *self.part.lock() {
            Part::Source { ledger: Some(ledger), finish, .. } => {
                if let Some(keeper) = &shared.keeper
                    && let Err(error) = keeper.hold(self.session, call.serial, &socket)
                {
                    // It may have the connection nevertheless, and would keep it open.
                    shared.release_from_keeper(self.session);
                    return Err(format!("the keeper does not answer: {error}"));
                }
                ledger.send().map(|()| {
                    self.shelter.store(true, Ordering::Release);
                    *finish = Some(call.clone());
                    true
                })
            }
            Part::Source { ledger: None, .. } => return Err("a Finish without a Prepare".into()),
            Part::Destination { finishing, .. } => {
                if shared.migrations.awaited() >= MAX_AWAITED {
                    return Err(format!(
                        "this host still awaits libvirt's answers about {MAX_AWAITED} guests"
                    ));
                }
                self.shelter.store(true, Ordering::Release);
                // A stream that has failed before has closed the connection.
                if has_ended(&socket) {
                    return Err("the connection to libvirt has ended".into());
                }
                shared.migrations.arrivals.pass(self.session).inspect(|passed| *finishing = *passed)
            }
        };
        match passed {
            // The keeper or the disk has taken longer than libvirt waits, and libvirt has resumed
            // its guest. The other host is asked, and bars the Finish that never came there.
            Ok(true) if self.side == Side::Opener && has_ended(&socket) => {
                Err("libvirt has closed its connection, so its Finish is not sent".into())
            }
            Ok(true) => Ok(()),
            Ok(false) => {
                self.shelter.store(false, Ordering::Release);
                Err("this host has said that the guest will not run here".into())
            }
            Err(error) => {
                self.shelter.store(false, Ordering::Release);
                shared.release_from_keeper(self.session);
                Err(vmferry::chain(&error))
            }
        }
    }

    /// The Finish was not written to this host's libvirt, which has closed its connection.
    pub fn not_written(&self) {
        let Part::Destination { finishing, .. } = &mut *self.part.lock() else { return };
        if let (true, Some(shared)) = (std::mem::take(finishing), self.shared.upgrade()) {
            let noted = shared.migrations.arrivals.reply(self.session, FinishWord::DoesNotRun);
            self.tell_unwritten(&shared, noted.as_ref().err());
        }
    }

    /// Whether libvirt of this host has closed its connection while it must not see it fail.
    pub fn is_deserted(&self) -> bool {
        let socket = || self.socket().is_ok_and(|socket| has_ended(&socket));
        self.shelter.load(Ordering::Acquire) && socket()
    }

    fn tell_unwritten(&self, shared: &Shared, error: Option<&LedgerError>) {
        if let Some(LedgerError::Journal(error)) = error {
            shared.tell(ProxyEvent::Unjournaled {
                session: self.session.to_string(),
                guest: shared.migrations.guest_of(self.number),
                reason: vmferry::chain(error),
            });
        }
    }

    /// Replies have come. They may be passed on on return.
    ///
    /// # Errors
    /// Why not.
    pub fn hear(&self, replies: &[Reply]) -> Result<(), String> {
        let Some(shared) = self.shared.upgrade() else { return Err("the daemon ends".into()) };
        for reply in replies {
            if let Reply::Finish(reply) = reply {
                let word = match reply.result {
                    Ok(()) => FinishWord::Runs,
                    Err(_) => FinishWord::DoesNotRun,
                };
                let noted = match &mut *self.part.lock() {
                    Part::Source { ledger: Some(ledger), finish: Some(_), .. } => {
                        ledger.hear(FinishAnswer::Word(word)).map(drop)
                    }
                    Part::Destination { finishing, .. } if *finishing => {
                        *finishing = false;
                        shared.migrations.arrivals.reply(self.session, word)
                    }
                    _ => Ok(()),
                };
                self.tell_unwritten(&shared, noted.as_ref().err());
                noted.map_err(|error| vmferry::chain(&error))?;
            }
            for migration in shared.migrations.replied(self.number, reply) {
                shared.tell(event_of(migration));
            }
        }
        Ok(())
    }

    /// The source's libvirt has got these replies, or they are in the destination's journal.
    pub fn replied(&self, replies: &[Reply]) {
        if !replies.iter().any(|reply| matches!(reply, Reply::Finish(_))) {
            return;
        }
        if let Part::Source { finish, .. } = &mut *self.part.lock() {
            *finish = None;
        }
        self.shelter.store(false, Ordering::Release);
        if let Some(shared) = self.shared.upgrade() {
            shared.release_from_keeper(self.session);
        }
    }

    pub fn socket(&self) -> io::Result<UnixStream> {
        self.replies.lock().socket.try_clone()
    }

    /// Reads calls, which may be passed on on return.
    ///
    /// # Errors
    /// Why not.
    pub fn read_calls(&self, gate: &mut CallGate, bytes: &[u8]) -> Result<ReadCalls, String> {
        let mut passed = Passed::default();
        let read = gate.push(bytes, &mut passed);
        let shared = self.shared.upgrade();
        let (mut refusals, mut finishing) = (Vec::new(), Vec::new());
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
            let Some(shared) = &shared else { return Err("the daemon ends".into()) };
            if let Call::Finish(call) = call {
                self.finish(shared, call)?;
                if !call.cancelled {
                    let (guest, peer) = (call.guest.name.clone(), self.peer.clone());
                    finishing.push(ProxyEvent::Finishing { guest, peer, side: self.side });
                }
            }
            shared.migrations.called(self.number, &self.peer, self.side, call);
        }
        read.map_err(|error| vmferry::chain(&error))?;
        Ok(ReadCalls { bytes: passed.bytes, refusals, pongs: passed.pongs, finishing })
    }

    pub fn tell(&self, events: Vec<ProxyEvent>) {
        if let Some(shared) = self.shared.upgrade() {
            events.into_iter().for_each(|event| shared.tell(event));
        }
    }

    fn caller(&self) -> String {
        match self.side {
            Side::Opener => "libvirt of this host".into(),
            Side::Acceptor => self.peer.clone(),
        }
    }
}

/// What has happened to a migration.
pub(super) fn event_of(migration: MigrationStatus) -> ProxyEvent {
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

impl Drop for Session {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let socket = self.replies.get_mut().socket.try_clone();
        let ended = match (self.part.get_mut(), &socket) {
            // Its migration goes on.
            (Part::Destination { finishing: true, .. }, Ok(_)) => Vec::new(),
            _ => shared.migrations.ended(self.number),
        };
        match self.part.get_mut() {
            Part::Source { ledger, finish, .. } => {
                if let (Some(ledger), Some(call), Ok(socket)) =
                    (ledger.take(), finish.take(), socket)
                {
                    let (session, peer) = (self.session, self.peer.clone());
                    let (ledger, socket) = (Arc::new(Mutex::new(ledger)), Some(socket));
                    let heard = Heard::default();
                    Unanswered { session, ledger, call, peer, socket, heard }.settle(&shared);
                    return;
                }
            }
            Part::Destination { finishing, .. } => match socket {
                Ok(socket) if *finishing => {
                    let watch = std::mem::take(&mut self.replies.get_mut().watch);
                    Awaited { number: self.number, session: self.session, watch, socket }
                        .keep(&shared);
                }
                _ => shared.migrations.arrivals.disconnected(self.session),
            },
        }
        for migration in ended {
            shared.tell(event_of(migration));
        }
    }
}

/// What was read of the calls.
pub(super) struct ReadCalls {
    /// Bytes to pass on.
    pub bytes: Vec<u8>,
    /// The replies to refused calls.
    pub refusals: Vec<u8>,
    /// The answers to the client's pings.
    pub pongs: Vec<u8>,
    /// The Finish that is among the bytes, to be told once they are passed on.
    pub finishing: Vec<ProxyEvent>,
}

#[cfg(test)]
mod tests;
