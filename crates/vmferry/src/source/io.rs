//! What goes into the source's machine, and what comes out.

use std::time::Duration;

use vmferry_memory::{GuestBytes, WholeHash};
use vmferry_wire::{AlgorithmSet, ControlMessage, Release, Token};

use super::change::Change;
use super::rounds::LaneTotals;
use crate::error::MigrateError;
use crate::forecast::Forecast;
use crate::handover::OperatorWord;
use crate::streamed::StreamEvent;

/// What happened.
#[derive(Debug)]
pub enum Input {
    /// A message on the control channel, or on the channel that asks for the session's word.
    Control(ControlMessage),
    /// Fields that came with the message that comes next, and were left out.
    UnknownFields {
        /// The message's name.
        message: &'static str,
        /// Their numbers.
        fields: Vec<u16>,
    },
    /// The control channel is gone.
    LinkLost(MigrateError),
    /// It was made again.
    Resumed,
    /// It could not be made again, this time.
    NotResumed(MigrateError),
    /// A data channel is gone.
    LaneLost {
        /// Its lane.
        lane: u8,
        /// Which of the lane's channels it was: how often it had been dialled before. The driver passes on
        /// the loss of the present one only.
        attempt: u64,
        /// Why.
        error: MigrateError,
    },
    /// It was made again.
    LaneRejoined {
        /// The lane.
        lane: u8,
        /// The destination has placed all frames of the lane up to this one.
        placed: u64,
    },
    /// It could not be made again, this time.
    LaneNotRejoined {
        /// The lane.
        lane: u8,
        /// Why.
        error: MigrateError,
    },
    /// A lane has sent again what was not placed when its channel was lost.
    Resent {
        /// The lane.
        lane: u8,
        /// Frames.
        frames: u64,
        /// Their bytes.
        bytes: u64,
    },
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
    /// A VMM that streams its guest says something: for the driver, which makes one of the next two of it.
    Vmm(StreamEvent),
    /// A VMM that streams its guest begins another pass over its memory.
    Pass {
        /// The pass's number, from 1.
        round: u32,
        /// Pages that it is to send.
        pages: u64,
        /// What the guest writes, in pages per second.
        dirty_pages_per_s: f64,
        /// What was sent since the pass before began.
        totals: LaneTotals,
    },
    /// A VMM that streams its guest has stopped it, and waits.
    Stopped {
        /// For how long the guest has stood still.
        stood_still: Duration,
        /// The downtime that the VMM expects.
        expected: Duration,
        /// What was sent since the last pass began.
        totals: LaneTotals,
    },
    /// The state is saved, or a VMM that streams its guest has sent the last byte.
    Saved {
        /// The VMM's state.
        state: GuestBytes,
        /// How long it took.
        took: Duration,
        /// Whether somebody else has paused the guest.
        paused: bool,
    },
    /// The digest of everything that was sent; asked for when all lanes have sent.
    Digest(u64),
    /// This side's whole-memory hash.
    Hashed {
        /// The action's.
        attempt: u32,
        /// The hash.
        hash: WholeHash,
    },
    /// The COMMIT record is on disk, or is not.
    CommitWritten(Result<(), MigrateError>),
    /// The driver's thread has carried out an action and heard nobody for so long: inside the VMM,
    /// or the disk.
    Away {
        /// For how long.
        took: Duration,
    },
    /// Data channels have taken frames since the last time: the destination reads, whatever it has
    /// placed.
    Flowing,
    /// An action failed.
    Failed(MigrateError),
    /// The user wants to end the migration.
    Cancel,
    /// The user wants other limits.
    Change(Change),
    /// The user lets a held migration switch over.
    SwitchOver,
    /// The operator decides a handover in doubt.
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
    /// Make the control channel again, not before `delay`: `Resumed` or `NotResumed`.
    ResumeControl {
        /// The session's token.
        token: Token,
        /// How often it was dialled before.
        attempt: u64,
        /// How long to wait first.
        delay: Duration,
    },
    /// Close a lane's channel if it is still open, and make it again, not before `delay`: `LaneRejoined`, then
    /// `Resent`, or `LaneNotRejoined`.
    RejoinLane {
        /// The lane.
        lane: u8,
        /// The session's token.
        token: Token,
        /// How often it was dialled before.
        attempt: u64,
        /// How long to wait first.
        delay: Duration,
    },
    /// Let the guest run on after the last harvest. What that round sends is to be in the next harvest again.
    Recall,
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
    /// Let as many frames be out as a link with this round trip needs.
    FitWindows {
        /// The shortest so far.
        round_trip: Duration,
    },
    /// Pack frames with these algorithms only. Before the first frame.
    PackWith(AlgorithmSet),
    /// Cap the data channels, in bytes per second.
    Cap(Option<u64>),
    /// Have a VMM that streams its guest keep to another downtime.
    LimitDowntime(Duration),
    /// Leave the vCPUs so much less of their time.
    Throttle {
        /// Per cent of it.
        percent: u8,
    },
    /// Have a VMM that streams its guest stop it as soon as it can, whatever is left: `Stopped`.
    SwitchOver,
    /// Pause the guest: `Paused`.
    Pause,
    /// Harvest what was written before the pause and add it to what is pending: `LastHarvest`.
    HarvestLast,
    /// Save the state, or let a VMM that streams its guest send what is left: `Saved`.
    Save,
    /// Sum up the hashes of all pages as last sent: `Digest`.
    SumDigest,
    /// Send [`ControlMessage::Free`] for the pages that the destination need not have as they are here.
    TellFree,
    /// Hash the paused memory whole but for those pages, beside everything else: `Hashed`.
    Hash {
        /// Which hash it is: one of a pause that was withdrawn counts for nothing.
        attempt: u32,
    },
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
        /// The version of the protocol.
        protocol: u16,
        /// What the destination is, if it has said so.
        destination: Option<Release>,
    },
    /// The destination says what only a newer release knows, and need not be known. Once for each kind of message.
    UnknownFields {
        /// The message's name.
        message: &'static str,
        /// Numbers of its fields.
        fields: Vec<u16>,
    },
    /// A channel is gone, and is being made again.
    LinkLost {
        /// `control` or `lane N`.
        channel: String,
        /// Why, in words.
        reason: String,
    },
    /// It was made again.
    LinkRestored {
        /// `control` or `lane N`.
        channel: String,
        /// For how long it was gone, in milliseconds.
        after_ms: f64,
    },
    /// A lane has sent again what was not placed when its channel was lost.
    Resent {
        /// The lane.
        lane: u8,
        /// Frames.
        frames: u64,
        /// Their bytes.
        bytes: u64,
    },
    /// The link was lost while the guest was paused: it runs on at the source, and is paused again later.
    Recalled,
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
    /// What a harvest says of how it will go on.
    Forecast(Forecast),
    /// The rest fits the downtime limit, and the user is waited for: the guest runs on and is kept in step.
    Held {
        /// The downtime that a switchover now would cost, in milliseconds.
        predicted_downtime_ms: f64,
    },
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
