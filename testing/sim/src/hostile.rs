//! What a peer says that does not keep the protocol.

use vmferry_memory::{SlotId, SlotLayout};
use vmferry_wire::{
    ControlMessage, GuestIdentity, Reason, ReasonCode, SessionId, SessionWord, Token, number,
};

use crate::plan::Host;

/// Every message that a host may hear out of turn, by its number, but the words that end a
/// handover: a source that says COMMIT without its journal, or a destination that says ABORTED or
/// RUNNING without its own, gives its guest to two hosts or to none, and nobody else can help that.
#[must_use]
pub fn forgeries(to: Host) -> Vec<u16> {
    (number::BEGIN..=number::FREE)
        .filter(|message| match to {
            Host::Source => !matches!(*message, number::RUNNING | number::ABORTED | number::ANSWER),
            // COMMIT is one where the destination is not READY.
            Host::Destination => true,
        })
        .collect()
}

/// A message of a session, with something in it that is not so.
pub fn forge(message: u16, session: SessionId) -> ControlMessage {
    let reason = Reason::new(ReasonCode::Internal, "a lie");
    match message {
        number::BEGIN => ControlMessage::Begin {
            session,
            guest: GuestIdentity { uuid: uuid::Uuid::nil(), name: "another".into() },
            vmm: "forged".into(),
            config: Vec::new(),
            layout: vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: 1 }],
            lanes: 1,
            verify: true,
            reconnect_ms: 0,
            release: None,
            streams: false,
            used_bytes: Vec::new(),
        },
        number::ACCEPT => ControlMessage::Accept {
            token: Token([9; 16]),
            release: None,
            algorithms: None,
            verifies_placed: false,
        },
        number::REFUSE => ControlMessage::Refuse { reason, release: None },
        number::PLACED => ControlMessage::Placed { lane: 0, sequence: u64::MAX },
        number::FINAL => ControlMessage::Final {
            lane_sequences: vec![1],
            digest: 1,
            state: [1].into(),
            paused: false,
        },
        number::READY => ControlMessage::Ready { digest: 1, load_us: 0 },
        number::VERIFY => ControlMessage::Verify {},
        number::VERIFIED => ControlMessage::Verified { hash: 1, pages: 1, elapsed_us: 0 },
        number::COMMIT => ControlMessage::Commit { session },
        number::RUNNING => ControlMessage::Running { session, start_us: 0 },
        number::ABORTED => ControlMessage::Aborted { session, reason },
        number::ABORT => ControlMessage::Abort { reason },
        number::PING => ControlMessage::Ping { nonce: u64::MAX },
        number::PONG => ControlMessage::Pong { nonce: u64::MAX },
        number::QUERY => ControlMessage::Query { session },
        number::ANSWER => ControlMessage::Answer { session, word: SessionWord::Pending },
        number::WITHDRAW => ControlMessage::Withdraw {},
        _ => ControlMessage::Free { slot: SlotId(0), runs: vec![(0, 1)] },
    }
}
