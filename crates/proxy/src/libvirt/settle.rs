//! A Finish whose answer did not come: the source's daemon keeps its libvirt waiting, and asks the
//! other host's daemon until it has the word.
//!
//! If the source's libvirt saw its connection fail now, it would resume its guest, which may run at
//! the destination.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmferry_handover::{FinishAnswer, FinishWord, OperatorWord, SessionId, SourceAction};
use vmferry_libvirt_rpc::{
    FinishCall, HEADER_BYTES, KEEPALIVE_PROGRAM, PacketHeader, PacketKind, PacketStatus,
    finish_reply,
};
use vmferry_wire::Token;

use super::ledger::{LedgerError, SourceLedger};
use crate::event::{ProxyEvent, Side};
use crate::outgoing::dialer;
use crate::proxy::Shared;
use crate::records::{self, Answer, Target};

/// How often the other daemon is asked.
pub(super) const ASK_PERIOD: Duration = Duration::from_millis(500);

/// How late an answer of another thread may be noticed.
const SLICE: Duration = Duration::from_millis(20);

/// The longest pause between two questions whose answer no libvirt waits for.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How long libvirt may take to close its connection after the reply.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The most bytes of a call that libvirt makes after its Finish.
const MAX_CALL_BYTES: usize = 64 << 10;

/// A Finish that was sent and not answered.
pub(crate) struct Unanswered {
    pub session: SessionId,
    /// Shared with the thread that writes to it.
    pub ledger: Arc<Mutex<SourceLedger>>,
    pub call: FinishCall,
    pub peer: String,
    /// The connection of the source's libvirt; `None` if it has ended.
    pub socket: Option<UnixStream>,
    /// What libvirt has sent on the connection.
    pub heard: Heard,
}

/// What moves a ledger on.
#[derive(Clone, Copy, Debug)]
enum Heeded {
    Operator(OperatorWord),
    Peer(FinishAnswer),
}

/// An operator's decision for an unanswered Finish.
#[derive(Debug, Default)]
pub(crate) struct Decision(Mutex<Option<OperatorWord>>);

impl Decision {
    pub fn set(&self, word: OperatorWord) {
        *self.0.lock() = Some(word);
    }
}

/// Does this in a thread of its own. The process may be out of threads. Nothing better can be done
/// then than to do it here, because libvirt's connection must not close.
pub(super) fn in_a_thread<T: Send + 'static>(name: &str, value: T, run: fn(T)) {
    let value = Arc::new(Mutex::new(Some(value)));
    let of_thread = Arc::clone(&value);
    let spawned = std::thread::Builder::new().name(name.into()).spawn(move || {
        if let Some(value) = of_thread.lock().take() {
            run(value);
        }
    });
    if spawned.is_err()
        && let Some(value) = value.lock().take()
    {
        run(value);
    }
}

impl Unanswered {
    /// Settles it in a thread of its own.
    pub fn settle(self, shared: &Arc<Shared>) {
        let decision = shared.migrations.in_doubt(self.session, &self.call.guest, &self.peer);
        shared.tell(ProxyEvent::InDoubt {
            session: self.session.to_string(),
            guest: self.call.guest.name.clone(),
            peer: self.peer.clone(),
        });
        let shared = Arc::downgrade(shared);
        in_a_thread("settle", (self, shared, decision), |(this, shared, decision)| {
            this.run(&shared, &decision);
        });
    }

    fn run(mut self, shared: &Weak<Shared>, decision: &Decision) {
        let Some(word) = self.await_word(shared, decision) else { return };
        let lost = "the destination's libvirt did not start the guest (its reply was lost with the \
                    link)";
        let result = if word == FinishWord::Runs { Ok(()) } else { Err(lost) };
        if let Some(socket) = &mut self.socket {
            // A libvirt that has gone takes its guest up by its own journal.
            let _ = socket.write_all(&finish_reply(&self.call, result));
        }
        let Some(shared) = shared.upgrade() else { return };
        shared.migrations.settled(self.session);
        shared.tell(self.event(result.err().map(str::to_owned)));
        shared.release_from_keeper(self.session);
        drop(shared);
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        while Instant::now() < deadline && self.attend(ASK_PERIOD) {}
    }

    /// The word, once it is in the journal. `None` if there is nothing to wait for, or the daemon
    /// ends: the keeper has the connection then.
    fn await_word(&mut self, shared: &Weak<Shared>, decision: &Decision) -> Option<FinishWord> {
        let resumed = self.ledger.lock().resumed();
        match resumed {
            SourceAction::Reply(word) => return Some(word),
            // The Finish was never sent, so libvirt may see its connection fail.
            SourceAction::Nothing => {
                let shared = shared.upgrade()?;
                shared.migrations.settled(self.session);
                shared.release_from_keeper(self.session);
                return None;
            }
            SourceAction::Ask | SourceAction::Send => {}
        }
        let mut next_question = Instant::now();
        let (mut pause, mut is_open) = (ASK_PERIOD, true);
        loop {
            let shared = shared.upgrade().filter(|shared| !shared.is_ending())?;
            // A restarted libvirt leaves its guest paused. An operator needs the word, and the
            // guest stays in doubt until it comes.
            if is_open {
                is_open = self.attend(ASK_PERIOD);
            } else {
                std::thread::sleep(ASK_PERIOD);
            }
            let decided = *decision.0.lock();
            let stepped = match decided {
                Some(word) => self.step(&mut is_open, Heeded::Operator(word)),
                None if Instant::now() < next_question => continue,
                None => {
                    let (of, peer, session) =
                        (Arc::clone(&shared), self.peer.clone(), self.session);
                    let asking = move || ask(&of, &peer, session);
                    let heard = &mut self.heard;
                    match attend_during(&mut self.socket, &mut is_open, heard, asking) {
                        Some(answer) => self.step(&mut is_open, Heeded::Peer(answer)),
                        None => Ok(SourceAction::Ask),
                    }
                }
            };
            // While libvirt waits, its guest does.
            if !is_open {
                next_question = Instant::now() + pause;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            match stepped {
                Ok(SourceAction::Reply(word)) => return Some(word),
                // The operator's decision is kept until it is written.
                Err(LedgerError::Journal(error)) => {
                    let (session, guest) = (self.session.to_string(), self.call.guest.name.clone());
                    let reason = vmferry::chain(&error);
                    shared.tell(ProxyEvent::Unjournaled { session, guest, reason });
                }
                // One that was made while the other host was asked is kept, too.
                Ok(_) | Err(LedgerError::Finish(_)) if decided.is_some() => {
                    *decision.0.lock() = None;
                }
                Ok(_) | Err(_) => {}
            }
        }
    }

    /// Takes a step of the ledger in another thread, and answers libvirt until its record is on
    /// disk. A slow disk may take longer than libvirt waits for an answer.
    fn step(&mut self, is_open: &mut bool, heeded: Heeded) -> Result<SourceAction, LedgerError> {
        let (tell, told) = channel();
        let ledger = Arc::clone(&self.ledger);
        in_a_thread("journal", (ledger, heeded, tell), |(ledger, heeded, tell)| {
            let mut ledger = ledger.lock();
            let stepped = match heeded {
                Heeded::Operator(word) => ledger.operator(word),
                Heeded::Peer(answer) => ledger.hear(answer),
            };
            // The other end waits for it.
            let _ = tell.send(stepped);
        });
        let stepped = attend_until(&told, &mut self.socket, is_open, &mut self.heard);
        stepped.unwrap_or(Err(LedgerError::TooEarly))
    }

    fn event(&self, error: Option<String>) -> ProxyEvent {
        let (guest, peer) = (self.call.guest.name.clone(), self.peer.clone());
        ProxyEvent::Finished { guest, peer, side: Side::Opener, error }
    }

    /// As [`attend`]; false without a connection.
    fn attend(&mut self, period: Duration) -> bool {
        let Self { socket, heard, .. } = self;
        socket.as_mut().is_some_and(|socket| attend(socket, heard, period))
    }
}

/// Answers libvirt for this long. Returns whether its connection is still open.
pub(super) fn attend(socket: &mut UnixStream, heard: &mut Heard, period: Duration) -> bool {
    let deadline = Instant::now() + period;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&*socket, PollFlags::IN)], Some(&left)) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return false,
        }
        let mut bytes = [0; 4096];
        match socket.read(&mut bytes) {
            Ok(0) => return false,
            Ok(read) => {
                let Some(replies) = heard.answer(&bytes[..read]) else { return false };
                if socket.write_all(&replies).is_err() {
                    return false;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
}

/// Answers libvirt while another thread works. libvirt resumes its guest after 30 s without an
/// answer, and the lookup of a name alone can take longer. Sets `is_open` to whether the connection
/// is still open. `None` if there is no thread.
pub(super) fn attend_during<T: Send + 'static>(
    socket: &mut Option<UnixStream>,
    is_open: &mut bool,
    heard: &mut Heard,
    work: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<T> {
    let (tell, told) = channel();
    let spawned = std::thread::Builder::new().name("word".into()).spawn(move || {
        // The other end waits for it.
        let _ = tell.send(work());
    });
    spawned.ok()?;
    attend_until(&told, socket, is_open, heard)?
}

/// Answers libvirt until another thread says that its work is done. `None` if the thread has ended
/// without it.
fn attend_until<T>(
    told: &Receiver<T>,
    socket: &mut Option<UnixStream>,
    is_open: &mut bool,
    heard: &mut Heard,
) -> Option<T> {
    loop {
        match (socket.as_mut().filter(|_| *is_open), told.try_recv()) {
            (_, Ok(done)) => return Some(done),
            (_, Err(TryRecvError::Disconnected)) => return None,
            (Some(socket), Err(TryRecvError::Empty)) => *is_open = attend(socket, heard, SLICE),
            (None, Err(TryRecvError::Empty)) => return told.recv().ok(),
        }
    }
}

/// Packets of libvirt that are answered without the other host.
#[derive(Debug, Default)]
pub(super) struct Heard {
    bytes: Vec<u8>,
}

impl Heard {
    /// Takes bytes, and returns the answers to the packets that end in them: a pong to each ping,
    /// and an empty reply to each call. After its Finish libvirt only takes back its callback and
    /// closes the connection. `None` if the bytes are not libvirt's protocol.
    fn answer(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        self.bytes.extend_from_slice(bytes);
        let mut replies = Vec::new();
        while let Some(head) = self.bytes.first_chunk::<HEADER_BYTES>() {
            let header = PacketHeader::parse(head).ok()?;
            let length = header.bytes as usize;
            if length > MAX_CALL_BYTES {
                return None;
            }
            if self.bytes.len() < length {
                break;
            }
            self.bytes.drain(..length);
            let reply = PacketHeader { bytes: HEADER_BYTES as u32, ..header };
            match header.kind {
                PacketKind::Message
                    if header.program == KEEPALIVE_PROGRAM && header.procedure == 1 =>
                {
                    replies.extend(PacketHeader { procedure: 2, ..reply }.encode());
                }
                PacketKind::Call => {
                    let (kind, status) = (PacketKind::Reply, PacketStatus::Ok);
                    replies.extend(PacketHeader { kind, status, ..reply }.encode());
                }
                _ => {}
            }
        }
        Some(replies)
    }
}

/// Asks the other daemon for the word; `None` if it can't be reached.
fn ask(shared: &Shared, peer: &str, session: SessionId) -> Option<FinishAnswer> {
    let config = shared.config();
    let channel = dialer(shared, &config, peer).ok()?.connect().ok()?;
    let (mut reader, mut writer) = channel.split();
    let limit = Some(config.timings.connect);
    reader.set_timeout(limit).ok()?;
    writer.set_timeout(limit).ok()?;
    records::ask(&mut writer, Token([0; 16]), Target::Word { session }).ok()?;
    match Answer::read(&mut reader).ok()? {
        Answer::Word(answer) => Some(answer),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
