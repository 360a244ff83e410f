//! A Finish that libvirt of this host has not answered when its stream failed: the destination's
//! daemon keeps libvirt waiting for nothing but its own answer.
//!
//! libvirt destroys a guest that waits for Finish when the connection of its Prepare closes, and
//! its answer would be lost. So the connection stays open until the answer is in the journal, where
//! the source's daemon asks for it.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmferry_handover::{FinishWord, SessionId};
use vmferry_libvirt_rpc::{Heard, Reply, ReplyWatch};

use super::ledger::LedgerError;
use super::session::event_of;
use super::settle::in_a_thread;
use crate::event::ProxyEvent;
use crate::proxy::Shared;

/// The most connections whose stream has failed and whose Finish is not answered. Each is of a
/// guest that waits on this host.
pub(super) const MAX_AWAITED: usize = 512;

/// How often it is checked whether the daemon ends.
const CHECK_PERIOD: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

/// A connection on which libvirt's answer is awaited.
pub(super) struct Awaited {
    /// Distinguishes connections.
    pub number: u64,
    pub session: SessionId,
    pub watch: ReplyWatch,
    /// libvirt's socket.
    pub socket: UnixStream,
}

impl Awaited {
    /// Keeps it in a thread of its own.
    pub fn keep(self, shared: &Arc<Shared>) {
        shared.migrations.awaits(self.number);
        shared.tell(ProxyEvent::Awaiting {
            session: self.session.to_string(),
            guest: shared.migrations.guest_of(self.number),
        });
        let shared = Arc::downgrade(shared);
        in_a_thread("await", (self, shared), |(this, shared)| this.run(&shared));
    }

    fn run(mut self, shared: &Weak<Shared>) {
        let mut bytes = vec![0; 64 << 10];
        let mut is_answered = false;
        while !is_answered {
            // When the daemon ends, libvirt sees its connection fail.
            if shared.upgrade().is_none_or(|shared| shared.is_ending()) {
                break;
            }
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&CHECK_PERIOD)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(_) => break,
            }
            let read = match self.socket.read(&mut bytes) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            let Some(shared) = shared.upgrade() else { break };
            match self.hear(&shared, &bytes[..read]) {
                Some(answered) => is_answered = answered,
                None => break,
            }
        }
        let Some(shared) = shared.upgrade() else { return };
        shared.migrations.awaits_no_more(self.number);
        shared.migrations.arrivals.disconnected(self.session);
        for migration in shared.migrations.ended(self.number) {
            shared.tell(event_of(migration));
        }
    }

    /// Returns whether libvirt has answered; `None` if the connection is of no more use.
    fn hear(&mut self, shared: &Shared, bytes: &[u8]) -> Option<bool> {
        let mut heard = Heard::default();
        self.watch.push(bytes, &mut heard).ok()?;
        let mut is_answered = false;
        for reply in &heard.replies {
            if let Reply::Finish(finish) = reply {
                is_answered = true;
                let word = match finish.result {
                    Ok(()) => FinishWord::Runs,
                    Err(_) => FinishWord::DoesNotRun,
                };
                let noted = shared.migrations.arrivals.reply(self.session, word);
                if let Err(LedgerError::Journal(error)) = noted {
                    shared.tell(ProxyEvent::Unjournaled {
                        session: self.session.to_string(),
                        guest: shared.migrations.guest_of(self.number),
                        reason: vmferry::chain(&error),
                    });
                }
            }
            for migration in shared.migrations.replied(self.number, reply) {
                shared.tell(event_of(migration));
            }
        }
        // Nothing follows the Finish, so libvirt is between two packets.
        self.socket.write_all(&heard.pongs).ok()?;
        Some(is_answered)
    }
}

/// Whether the other end of a socket is closed, or this one is shut down.
pub(super) fn has_ended(socket: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
    let ended = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    let polled_at = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled_at.is_ok() && polled[0].revents().intersects(ended)
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use super::*;

    #[test]
    fn has_ended_is_true_once_either_end_is_closed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(!has_ended(&ours));
        (&theirs).write_all(b"unread").unwrap();
        assert!(!has_ended(&ours));
        drop(theirs);
        assert!(has_ended(&ours));
        let (ours, _theirs) = UnixStream::pair().unwrap();
        ours.try_clone().unwrap().shutdown(Shutdown::Both).unwrap();
        assert!(has_ended(&ours));
    }
}
