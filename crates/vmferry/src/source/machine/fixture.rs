//! What the tests of the machine's parts have in common: a guest of one page, sent over one lane.

use std::time::Duration;

use vmferry_memory::{SlotId, SlotLayout};
use vmferry_wire::{ControlMessage, GuestIdentity, Token};

use super::Source;
use crate::config::SourceConfig;
use crate::peer::SourceSide;
use crate::source::io::Input;
use crate::source::rounds::LaneTotals;
use crate::vm::GuestDescription;

/// The lane has sent everything of a round.
pub fn sent(end_sequence: u64) -> Input {
    Input::LaneSent { lane: 0, end_sequence, totals: LaneTotals::default() }
}

/// The destination has placed it.
pub fn placed(sequence: u64) -> Input {
    Input::Control(ControlMessage::Placed { lane: 0, sequence })
}

/// A harvest has found so many pages.
pub fn harvested(pages: u64) -> Input {
    Input::Harvested { pages, took: Duration::ZERO, stood_still: Duration::ZERO }
}

/// A machine whose first round is placed, at 0: it harvests.
pub fn after_one_round(mut config: SourceConfig) -> Source {
    config.channels = 1;
    let guest = GuestDescription {
        identity: GuestIdentity { uuid: uuid::Uuid::nil(), name: String::new() },
        vmm: String::new(),
        config: Vec::new(),
        layout: vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: 1 }],
    };
    let mut source = Source::new(config, guest, SourceSide::new("none"), Duration::ZERO);
    for input in [
        Input::LogStarted { populated_pages: 1, stood_still: Duration::ZERO },
        Input::Control(ControlMessage::Accept {
            token: Token([1; 16]),
            release: None,
            algorithms: None,
        }),
        Input::LanesJoined,
        sent(1),
        placed(1),
    ] {
        source.handle(Duration::ZERO, input);
    }
    source
}
