//! Messages of a peer that violates the protocol.

use vmferry_memory::{SlotId, SlotLayout};
use vmferry_wire::{
    ControlMessage, GuestIdentity, Reason, ReasonCode, SessionId, SessionKind, SessionWord, Token,
    number,
};

use crate::host::Host;

/// The numbers of all messages that a host may receive in a wrong phase. The messages that end a
/// handover are excluded: a source that sends COMMIT without its journal, or a destination that
/// sends ABORTED or RUNNING without its own, gives its guest to two hosts or to none, and the other
/// side cannot prevent that.
#[must_use]
pub fn forgeries(to: Host) -> Vec<u16> {
    (number::BEGIN..=number::LACKING)
        .filter(|message| match to {
            Host::Source => !matches!(*message, number::RUNNING | number::ABORTED | number::ANSWER),
            // COMMIT counts where the destination is not READY.
            Host::Destination => true,
        })
        .collect()
}

/// A message of a session with a false content.
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
            fetch_lanes: None,
            witness: None,
        },
        number::ACCEPT => ControlMessage::Accept {
            token: Token([9; 16]),
            release: None,
            algorithms: None,
            verifies_placed: false,
            post_copy: None,
            compares_storage: false,
        },
        number::REFUSE => ControlMessage::Refuse { reason, release: None },
        number::PLACED => ControlMessage::Placed { lane: 0, sequence: u64::MAX },
        number::FINAL => ControlMessage::Final {
            lane_sequences: vec![1],
            digest: 1,
            state: [1].into(),
            paused: false,
            kind: SessionKind::PreCopy,
            storage_sample: Vec::new(),
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
        number::QUERY => ControlMessage::Query { session, offer: None },
        number::ANSWER => {
            ControlMessage::Answer { session, word: SessionWord::Pending, token: None }
        }
        number::WITHDRAW => ControlMessage::Withdraw {},
        number::LACKING => ControlMessage::Lacking { slot: SlotId(0), first: 0, bits: vec![1] },
        _ => ControlMessage::Free { slot: SlotId(0), runs: vec![(0, 1)] },
    }
}
