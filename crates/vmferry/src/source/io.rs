//! What goes into the source's machine, and what comes out.

use std::time::Duration;

use vmferry_memory::WholeHash;
use vmferry_wire::{ControlMessage, Token};

use super::rounds::LaneTotals;
use crate::error::MigrateError;
use crate::handover::OperatorWord;

/// What happened.
#[derive(Debug)]
pub enum Input {
    /// A message on the control channel, or on the channel that asks for the session's word.
    Control(ControlMessage),
    /// The control channel is gone, or a data channel whose loss nothing has explained.
    LinkLost(MigrateError),
    /// A data channel is gone. The driver waits a moment for the control channel to say why, then
    /// makes it [`LinkLost`](Self::LinkLost).
    LaneLost(MigrateError),
    /// All data channels are open and greeted.
    LanesJoined,
    /// The dirty log runs, and so many pages are populated.
    LogStarted {
        /// Pages of the first round.
        populated_pages: u64,
        /// For how long the guest stood still for it.
        stood_still: Duration,
    },
    /// A lane has handed every frame of the round to its channel.
    LaneSent {
        /// The lane.
        lane: u8,
        /// Sequence number of its end-of-round frame.
        end_sequence: u64,
        /// What it sent.
        totals: LaneTotals,
    },
    /// The guest runs and the log was harvested.
    Harvested {
        /// Pages written since the last harvest.
        pages: u64,
        /// How long it took.
        took: Duration,
        /// For how long the guest stood still for it.
        stood_still: Duration,
    },
    /// The guest is paused.
    Paused {
        /// For how long it has stood still.
        stood_still: Duration,
    },
    /// The guest is paused and the log was harvested for the last time.
    LastHarvest {
        /// All pages of the last round.
        pages: u64,
        /// How long it took.
        took: Duration,
    },
    /// The state is saved.
    Saved {
        /// The VMM's state.
        state: Vec<u8>,
        /// How long it took.
        took: Duration,
    },
    /// The digest of everything that was sent; asked for when all lanes have sent.
    Digest(u64),
    /// This side's whole-memory hash.
    Hashed(WholeHash),
    /// The COMMIT record is on disk, or is not.
    CommitWritten(Result<(), MigrateError>),
    /// An action failed.
    Failed(MigrateError),
    /// The user wants to end the migration.
    Cancel,
    /// The user caps the data channels anew, in bytes per second.
    MaxBandwidth(Option<u64>),
    /// The operator decides a hand-over in doubt.
    Operator(OperatorWord),
    /// Time has passed.
    Tick,
}

/// What to do. Each action that yields a result is answered by the input named.
#[derive(Debug)]
pub enum Action {
    /// Send a message on the control channel.
    Send(ControlMessage),
    /// Open the data channels with this token: `LanesJoined`.
    OpenLanes(Token),
    /// Start the dirty log and find the populated pages: `LogStarted`.
    StartLog,
    /// Send the harvested pages: one `LaneSent` for each lane. `rearm`: the guest runs, so
    /// the log must be re-armed before each run of pages is read.
    SendRound {
        /// Number of the round, from 1.
        round: u32,
        /// Whether the guest runs.
        rearm: bool,
    },
    /// Harvest with the guest running: `Harvested`.
    Harvest,
    /// Cap the data channels, in bytes per second.
    Cap(Option<u64>),
    /// Leave the vCPUs so much less of their time.
    Throttle {
        /// Per cent of it.
        percent: u8,
    },
    /// Pause the guest: `Paused`.
    Pause,
    /// Harvest what was written before the pause and add it to what is pending: `LastHarvest`.
    HarvestLast,
    /// Save the state: `Saved`.
    Save,
    /// Sum up the hashes of all pages as last sent: `Digest`.
    SumDigest,
    /// Hash the paused memory whole, beside everything else: `Hashed`.
    Hash,
    /// Append COMMIT to the journal: `CommitWritten`.
    WriteCommit,
    /// Append KEPT or GIVEN to the journal, as far as it can be done.
    WriteOutcome {
        /// Whether the guest stays here.
        kept: bool,
        /// Whether an operator said so.
        by_operator: bool,
    },
    /// Let the guest run here.
    Resume,
    /// Give the guest up.
    Release,
    /// Ask the destination on a new channel for the session's word, not before `delay`.
    Ask {
        /// How long to wait first.
        delay: Duration,
    },
    /// Tell whoever watches.
    Report(Report),
}

/// What whoever watches is told.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Report {
    /// The destination has accepted the guest and all channels are open.
    Connected {
        /// Round trip in milliseconds.
        round_trip_ms: f64,
    },
    /// A round begins.
    RoundStarted {
        /// Its number, from 1.
        round: u32,
        /// Pages to be sent.
        pages: u64,
        /// Whether the guest is paused.
        paused: bool,
    },
    /// A round is placed at the destination.
    RoundDone(crate::stats::RoundStats),
    /// The guest's vCPUs lose a part of their time from now on.
    Throttled {
        /// Per cent of it.
        percent: u8,
    },
    /// The guest is paused.
    Paused {
        /// The downtime that is expected, in milliseconds.
        predicted_downtime_ms: f64,
    },
    /// The destination is ready.
    Ready,
    /// COMMIT is journalled: there is no way back on this side's own account.
    Committed,
    /// The destination can't be reached after COMMIT. The guest stays paused.
    InDoubt {
        /// Why, in words.
        reason: String,
    },
    /// The user's wish came too late.
    TooLateToCancel,
    /// The guest runs here again.
    Resumed,
}

/// How it ended.
#[derive(Debug)]
pub enum Ending {
    /// The source has the guest, and it runs; why it was not migrated.
    Kept(MigrateError),
    /// The destination has it.
    Given,
}
