//! Shared test fixture: a guest of one page, sent over one lane.

use std::time::Duration;

use vmferry_memory::{SlotId, SlotLayout};
use vmferry_wire::{ControlMessage, GuestIdentity, Token};

use super::Source;
use super::io::{Input, Saved};
use crate::config::WhenStuck;
use crate::config::{ChannelCount, RoundLimit, SourceConfig};
use crate::machine::peer::SourceSide;
use crate::rounds::tracker::LaneTotals;
use crate::vmm::GuestDescription;

/// Asserts the variant of the source's phase.
macro_rules! assert_phase {
    ($source:expr, $phase:ident $(, $($why:tt)+)?) => {{
        let phase = &$source.phase;
        let expected = matches!(phase, $crate::machine::source::phase::Phase::$phase { .. });
        assert!(expected, "{phase:?} {}", concat!($($($why)+)?));
    }};
}
pub(super) use assert_phase;

/// The lane has sent all of a round.
pub fn sent(end_sequence: u64) -> Input {
    Input::LaneSent { lane: 0, end_sequence, totals: LaneTotals::default() }
}

/// The destination has placed frames up to this number.
pub fn placed(sequence: u64) -> Input {
    Input::Control(ControlMessage::Placed { lane: 0, sequence })
}

/// A harvest has found this number of pages.
pub fn harvested(pages: u64) -> Input {
    Input::Harvested { pages, took: Duration::ZERO, stood_still: Duration::ZERO }
}

/// The digest of everything that was sent.
pub const DIGEST: u64 = 7;

/// A machine that has sent FINAL, at time 0. `verifies_placed` is what the destination announces.
pub fn awaiting_ready(mut config: SourceConfig, verifies_placed: bool) -> Source {
    config.max_rounds = RoundLimit::new(1).unwrap();
    (config.downtime_limit, config.when_stuck) = (Duration::ZERO, WhenStuck::SwitchOver);
    let mut source = after_one_round_to(config, verifies_placed);
    let (took, stood_still) = (Duration::ZERO, Duration::ZERO);
    for input in [
        harvested(1),
        Input::Paused { stood_still },
        Input::LastHarvest { pages: 1, took },
        sent(2),
        Input::Saved(Saved { took, ..Saved::default() }),
        Input::Digest(DIGEST),
    ] {
        source.handle(Duration::ZERO, input);
    }
    assert_phase!(source, AwaitReady);
    source
}

/// A machine whose first round is placed, at time 0. It is harvesting.
pub fn after_one_round(config: SourceConfig) -> Source {
    after_one_round_to(config, false)
}

fn after_one_round_to(config: SourceConfig, verifies_placed: bool) -> Source {
    let mut source = announced(config);
    for input in [log_started(), accepted(verifies_placed), Input::LanesJoined, sent(1), placed(1)]
    {
        source.handle(Duration::ZERO, input);
    }
    source
}

/// A machine that has announced its guest, at time 0.
pub fn announced(mut config: SourceConfig) -> Source {
    config.channels = ChannelCount::new(1).unwrap();
    let guest = GuestDescription {
        identity: GuestIdentity { uuid: uuid::Uuid::nil(), name: String::new() },
        vmm: String::new(),
        config: Vec::new(),
        layout: vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: 1 }],
    };
    Source::new(config, guest, SourceSide::new("none"), Duration::ZERO)
}

/// The dirty log is running.
pub fn log_started() -> Input {
    Input::LogStarted { populated_pages: 1, stood_still: Duration::ZERO }
}

/// The destination has accepted the guest.
pub fn accepted(verifies_placed: bool) -> Input {
    Input::Control(ControlMessage::Accept {
        token: Token([1; 16]),
        release: None,
        algorithms: None,
        verifies_placed,
        compares_storage: false,
        post_copy: Some(Ok(())),
    })
}
