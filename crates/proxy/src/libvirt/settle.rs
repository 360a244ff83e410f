//! A Finish whose answer did not come: the source's daemon keeps its libvirt waiting, and asks the
//! other host's daemon until it has the word.
//!
//! If the source's libvirt saw its connection fail now, it would resume its guest, which may run at
//! the destination.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmferry_handover::{FinishAnswer, FinishWord, OperatorWord, SessionId, SourceAction};
use vmferry_libvirt_rpc::{
    FinishCall, HEADER_BYTES, KEEPALIVE_PROGRAM, PacketHeader, PacketKind, PacketStatus,
    finish_reply,
};
use vmferry_wire::{Hello, Role, Token};

use super::ledger::{LedgerError, SourceLedger};
use crate::event::{ProxyEvent, Side};
use crate::outgoing::dialer;
use crate::proxy::Shared;
use crate::records::{Answer, Opening, PROXY_VERSION, Target};

/// How often the other daemon is asked.
const ASK_PERIOD: Duration = Duration::from_millis(500);

/// How long libvirt may take to close its connection after the reply.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The most bytes of a call that libvirt makes after its Finish.
const MAX_CALL_BYTES: usize = 64 << 10;

/// A Finish that was sent and not answered.
pub(crate) struct Unanswered {
    pub session: SessionId,
    pub ledger: SourceLedger,
    pub call: FinishCall,
    pub peer: String,
    /// The connection of the source's libvirt.
    pub socket: UnixStream,
}

/// An operator's decision for an unanswered Finish.
#[derive(Debug, Default)]
pub(crate) struct Decision(Mutex<Option<OperatorWord>>);

impl Decision {
    pub fn set(&self, word: OperatorWord) {
        *self.0.lock() = Some(word);
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
        let spawned = std::thread::Builder::new().name("settle".into());
        // Without a thread the connection would close. The process is out of threads, so nothing
        // better can be done than to wait here.
        let this = Arc::new(Mutex::new(Some(self)));
        let of_thread = Arc::clone(&this);
        let (of_shared, of_decision) = (Weak::clone(&shared), Arc::clone(&decision));
        let spawned = spawned.spawn(move || {
            if let Some(unanswered) = of_thread.lock().take() {
                unanswered.run(&of_shared, &of_decision);
            }
        });
        if spawned.is_err()
            && let Some(unanswered) = this.lock().take()
        {
            unanswered.run(&shared, &decision);
        }
    }

    fn run(mut self, shared: &Weak<Shared>, decision: &Decision) {
        let mut heard = Heard::default();
        let mut answer = match self.ledger.resumed() {
            SourceAction::Reply(word) => Some(word),
            // The Finish was never sent, so libvirt may see its connection fail.
            SourceAction::Nothing => {
                let Some(shared) = shared.upgrade() else { return };
                shared.migrations.settled(self.session);
                return shared.release_from_keeper(self.session);
            }
            _ => None,
        };
        let (mut is_open, mut is_told) = (true, false);
        while answer.is_none() {
            // When the daemon ends, the keeper has the connection.
            let Some(shared) = shared.upgrade() else { return };
            if !is_open {
                std::thread::sleep(ASK_PERIOD);
            } else if !self.attend(&mut heard, ASK_PERIOD) {
                // A restarted libvirt leaves its guest paused. An operator needs the word, and the
                // guest stays in doubt until it comes.
                is_open = false;
            }
            let decided = decision.0.lock().take();
            let stepped = match decided {
                Some(word) => self.ledger.operator(word),
                None => match ask(&shared, &self.peer, self.session) {
                    Some(answer) => self.ledger.hear(answer),
                    None => continue,
                },
            };
            match stepped {
                Ok(SourceAction::Reply(word)) => answer = Some(word),
                Ok(_) | Err(LedgerError::Finish(_)) => {}
                // The record may be on disk. The next daemon reads it.
                Err(LedgerError::Journal(error)) => {
                    if !std::mem::replace(&mut is_told, true) {
                        let wanted = format!("journal the word about session {}", self.session);
                        let (peer, reason) = ("this daemon".into(), vmferry::chain(&error));
                        shared.tell(ProxyEvent::Refused { peer, wanted, reason });
                    }
                    std::thread::sleep(ASK_PERIOD);
                }
            }
        }
        let word = answer.unwrap_or(FinishWord::DoesNotRun);
        let lost = "the destination's libvirt did not start the guest (its reply was lost with the \
                    link)";
        let result = if word == FinishWord::Runs { Ok(()) } else { Err(lost) };
        // A libvirt that has gone takes its guest up by its own journal.
        let _ = self.socket.write_all(&finish_reply(&self.call, result));
        let Some(shared) = shared.upgrade() else { return };
        shared.migrations.settled(self.session);
        shared.tell(self.event(result.err().map(str::to_owned)));
        shared.release_from_keeper(self.session);
        drop(shared);
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        while Instant::now() < deadline && self.attend(&mut heard, ASK_PERIOD) {}
    }

    fn event(&self, error: Option<String>) -> ProxyEvent {
        let (guest, peer) = (self.call.guest.name.clone(), self.peer.clone());
        ProxyEvent::Finished { guest, peer, side: Side::Opener, error }
    }

    /// Answers libvirt for this long. Returns whether its connection is still open.
    fn attend(&mut self, heard: &mut Heard, period: Duration) -> bool {
        let deadline = Instant::now() + period;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left =
                Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return false,
            }
            let mut bytes = [0; 4096];
            match self.socket.read(&mut bytes) {
                Ok(0) => return false,
                Ok(read) => {
                    let Some(replies) = heard.answer(&bytes[..read]) else { return false };
                    if self.socket.write_all(&replies).is_err() {
                        return false;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }
}

/// Packets of libvirt that are answered without the other host.
#[derive(Default)]
struct Heard {
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
    let hello = Hello {
        version_min: PROXY_VERSION,
        version_max: PROXY_VERSION,
        role: Role::Stream,
        lane: 0,
        token: Token([0; 16]),
        attempt: 0,
    };
    writer.write_all(&hello.encode()).ok()?;
    let opening = Opening { target: Target::Word { session }, is_known: false, received: 0 };
    opening.write(&mut writer).ok()?;
    match Answer::read(&mut reader).ok()? {
        Answer::Word(answer) => Some(answer),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(program: u32, procedure: u32, kind: u32, payload: u32) -> Vec<u8> {
        let words = [28 + payload, program, 1, procedure, kind, 5, 0];
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_be_bytes).collect();
        bytes.resize(bytes.len() + payload as usize, 0);
        bytes
    }

    #[test]
    fn pings_and_last_calls_are_answered_in_any_pieces() {
        let sent = [
            packet(KEEPALIVE_PROGRAM, 1, 2, 0),
            packet(0x2000_8086, 361, 0, 8),
            packet(KEEPALIVE_PROGRAM, 2, 2, 0),
            packet(0x2000_8086, 2, 0, 0),
        ]
        .concat();
        let expected = [
            packet(KEEPALIVE_PROGRAM, 2, 2, 0),
            packet(0x2000_8086, 361, 1, 0),
            packet(0x2000_8086, 2, 1, 0),
        ]
        .concat();
        for size in [1, 7, 28, sent.len()] {
            let mut heard = Heard::default();
            let answers: Vec<u8> =
                sent.chunks(size).flat_map(|piece| heard.answer(piece).unwrap()).collect();
            assert_eq!(answers, expected);
        }
        assert_eq!(Heard::default().answer(b"GET / HTTP/1.1\r\nHost: of a program\r\n"), None);
    }
}
