//! Shared test fixture: a guest of ten pages, received over one lane at time 0.

use std::time::Duration;

use vmferry_handover::{SessionKind, WitnessId};
use vmferry_memory::{SlotId, SlotLayout};
use vmferry_wire::{ControlMessage, FetchLanes, GuestIdentity, SessionId, Token};

use super::Destination;
use super::io::{Input, LinkId, Prepared};
use crate::config::Timeouts;
use crate::machine::peer::DestinationSide;

/// Asserts the variant of the destination's phase.
macro_rules! assert_phase {
    ($destination:expr, $phase:ident $(, $why:literal)?) => {{
        let phase = &$destination.phase;
        let expected = matches!(phase, $crate::machine::destination::phase::Phase::$phase { .. });
        assert!(expected, "{phase:?} {}", concat!($($why)?));
    }};
}
pub(super) use assert_phase;

/// The digest of everything that was sent.
pub const DIGEST: u64 = 7;

/// A message on the control channel.
pub fn heard(destination: &mut Destination, message: ControlMessage) {
    let input = Input::Control { link: LinkId::CONTROL, message };
    destination.handle(Duration::ZERO, input);
}

/// FINAL, for one frame.
pub fn finish(destination: &mut Destination) {
    let (lane_sequences, state) = (vec![1], [5].into());
    heard(
        destination,
        ControlMessage::Final {
            lane_sequences,
            digest: DIGEST,
            state,
            paused: false,
            kind: SessionKind::PreCopy,
            storage_sample: Vec::new(),
        },
    );
}

/// BEGIN of a guest of ten pages.
pub fn begin(verify: bool, witness: Option<WitnessId>) -> ControlMessage {
    ControlMessage::Begin {
        session: SessionId([1; 16]),
        guest: GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() },
        vmm: String::new(),
        config: Vec::new(),
        layout: vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: 10 }],
        lanes: 1,
        verify,
        reconnect_ms: 30_000,
        release: None,
        streams: false,
        used_bytes: Vec::new(),
        fetch_lanes: Some(FetchLanes { faults: 1, background: 1 }),
        witness,
    }
}

/// A machine with this witness on whose control channel nothing was received.
pub fn greeted(witness: Option<WitnessId>) -> Destination {
    let side = DestinationSide { witness, ..DestinationSide::default() };
    Destination::new(Timeouts::default(), Token([1; 16]), side, Duration::ZERO)
}

/// A machine that has accepted a guest, and whose actions so far were taken.
pub fn receiving(verify: bool) -> Destination {
    receiving_with(verify, None)
}

/// The same with a witness.
pub fn receiving_with(verify: bool, witness: Option<WitnessId>) -> Destination {
    let now = Duration::ZERO;
    let mut destination = greeted(witness.clone());
    heard(&mut destination, begin(verify, witness));
    destination
        .handle(now, Input::Prepared(Ok(Prepared { post_copy: Ok(()), compares_storage: false })));
    destination.handle(now, Input::Opened(Ok(())));
    while destination.next_action().is_some() {}
    assert_phase!(destination, Receiving);
    destination
}
