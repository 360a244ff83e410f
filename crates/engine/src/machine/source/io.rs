//! Events and actions of the source's machine.

use std::time::Duration;

use vmferry_memory::{GuestBytes, WholeHash};
use vmferry_wire::{AlgorithmSet, ControlMessage, LaneOffer, Release, Token};

use super::change::Change;
use crate::error::MigrateError;
use crate::rounds::tracker::LaneTotals;
use crate::stats::forecast::Forecast;
use crate::vmm::streamed::StreamEvent;
use vmferry_handover::journal::Record;
use vmferry_handover::{OperatorWord, Register, SessionKind, VmError, WitnessRequest};

/// An event.
#[derive(Debug)]
pub enum Input {
    /// A message on the control channel, or on a channel on which a source in doubt asks.
    Control(ControlMessage),
    /// Unknown fields of the message that comes next. They were ignored.
    UnknownFields {
        /// The message's name.
        message: &'static str,
        /// Their numbers.
        fields: Vec<u16>,
    },
    /// The control channel was lost.
    LinkLost(MigrateError),
    /// The control channel was reestablished.
    Resumed,
    /// This attempt to reestablish the control channel failed.
    NotResumed(MigrateError),
    /// A data channel was lost.
    LaneLost {
        /// Its lane.
        lane: u8,
        /// Identifies the lane's channel: how often it had been dialed before. The driver only
        /// forwards the loss of the present channel.
        attempt: u64,
        /// The cause.
        error: MigrateError,
    },
    /// A data channel was reestablished.
    LaneRejoined {
        /// The lane.
        lane: u8,
        /// The destination has placed all frames of the lane up to this one.
        placed: u64,
    },
    /// This attempt to reestablish a data channel failed.
    LaneNotRejoined {
        /// The lane.
        lane: u8,
        /// The cause.
        error: MigrateError,
    },
    /// A lane has sent again what was not placed when its channel was lost.
    Resent {
        /// The lane.
        lane: u8,
        /// Number of frames.
        frames: u64,
        /// Their bytes.
        bytes: u64,
    },
    /// All data channels are open and greeted.
    LanesJoined,
    /// All fetch lanes are open and greeted.
    FetchLanesJoined,
    /// The dirty log is running, and the populated pages are known.
    LogStarted {
        /// Pages of the first round.
        populated_pages: u64,
        /// For how long the guest was paused for it.
        stood_still: Duration,
    },
    /// A lane has passed every frame of the round to its channel.
    LaneSent {
        /// The lane.
        lane: u8,
        /// Sequence number of the lane's end-of-round frame.
        end_sequence: u64,
        /// Totals of what it sent.
        totals: LaneTotals,
    },
    /// The log was harvested with the guest running.
    Harvested {
        /// Pages written since the last harvest.
        pages: u64,
        /// Duration of the harvest.
        took: Duration,
        /// For how long the guest was paused for it.
        stood_still: Duration,
    },
    /// The guest is paused.
    Paused {
        /// For how long it has been paused.
        stood_still: Duration,
    },
    /// The log was harvested for the last time, with the guest paused.
    LastHarvest {
        /// All pages of the last round.
        pages: u64,
        /// Duration of the harvest.
        took: Duration,
    },
    /// An event of a carried guest's VMM. Handled by the driver, which turns it into one of the
    /// next two.
    Vmm(StreamEvent),
    /// A carried guest's VMM begins another pass over its memory.
    Pass {
        /// The pass's number, from 1.
        round: u32,
        /// Pages to send in the pass.
        pages: u64,
        /// The rate at which the guest dirties pages, in pages per second.
        dirty_pages_per_s: f64,
        /// Totals since the previous pass began.
        totals: LaneTotals,
    },
    /// A carried guest's VMM has stopped it, and waits.
    Stopped {
        /// For how long the guest has been paused.
        stood_still: Duration,
        /// The downtime that the VMM expects.
        expected: Duration,
        /// Pages that were not sent yet.
        pages: u64,
        /// Totals since the last pass began.
        totals: LaneTotals,
    },
    /// The state is saved, or a carried guest's VMM has sent the last byte.
    Saved(Saved),
    /// The digest of everything that was sent. Requested when all lanes have sent everything.
    Digest(u64),
    /// This side's whole-memory hash.
    Hashed {
        /// The `attempt` of the action.
        attempt: u32,
        /// The hash.
        hash: WholeHash,
    },
    /// The COMMIT record is on disk, or is not.
    CommitWritten(Result<(), MigrateError>),
    /// The session's register at the witness, or why it is not known.
    Register(Result<Register, VmError>),
    /// The driver's thread has carried out an action and did not read messages meanwhile: it was in
    /// the VMM, or wrote to disk.
    Away {
        /// Duration of the action.
        took: Duration,
    },
    /// Data channels have accepted frames since the last time: the destination reads, whether or
    /// not it has placed anything.
    Flowing,
    /// An action failed.
    Failed(MigrateError),
    /// The VMM of a carried guest, told to begin its post-copy, had stopped the guest by itself:
    /// `Stopped` follows.
    TooLateForPostCopy,
    /// The VMM of a carried guest could not be connected to new streams, or these have failed.
    NotReconnected(MigrateError),
    /// The VMM of a carried guest has ended, and the guest's memory here with it.
    VmmEnded(VmError),
    /// The user cancels the migration.
    Cancel,
    /// The user changes settings.
    Change(Change),
    /// The user releases a held migration to switch over.
    SwitchOver,
    /// The operator resolves a handover in doubt.
    Operator(OperatorWord),
    /// The operator gives up a guest whose destination is lost permanently and still lacks pages.
    GiveUp,
    /// Time has passed.
    Tick,
}

/// What is known when a guest's state is saved.
#[derive(Debug, Default)]
pub struct Saved {
    /// The VMM's state.
    pub state: GuestBytes,
    /// Duration of saving.
    pub took: Duration,
    /// Whether another client has paused the guest.
    pub paused: bool,
    /// A sample of the guest's storage, if the destination compares it.
    pub sample: Option<StorageSample>,
}

/// A sample of a guest's storage.
#[derive(Debug, Default)]
pub struct StorageSample {
    /// In the VMM's own format.
    pub bytes: Vec<u8>,
    /// Duration of reading it.
    pub took: Duration,
}

/// An action. The input named after the colon reports its result.
#[derive(Debug)]
pub enum Action {
    /// Have a carried guest's VMM stop the guest and go on with its own post-copy: `Stopped`.
    BeginCarriedPostCopy,
    /// End the streams of a carried guest here, and keep the rest for the fetch lanes: `LaneSent`.
    CutStreams {
        /// Pages that were not sent yet.
        pages: u64,
    },
    /// Send a message on the control channel.
    Send(ControlMessage),
    /// Open the data channels with this token: `LanesJoined`.
    OpenLanes(Token),
    /// Open all fetch lanes, and close those that are open: `FetchLanesJoined`.
    OpenFetchLanes {
        /// The session's token.
        token: Token,
        /// How often each was dialed before.
        attempts: Vec<u64>,
    },
    /// Reestablish the control channel, not before `delay`: `Resumed` or `NotResumed`.
    ResumeControl {
        /// The session's token.
        token: Token,
        /// How often it was dialed before.
        attempt: u64,
        /// How long to wait first.
        delay: Duration,
    },
    /// Close a lane's channel if it is still open, and reestablish it, not before `delay`:
    /// `LaneRejoined`, then `Resent`, or `LaneNotRejoined`.
    RejoinLane {
        /// The lane.
        lane: u8,
        /// The session's token.
        token: Token,
        /// How often it was dialed before.
        attempt: u64,
        /// How long to wait first.
        delay: Duration,
    },
    /// Resume the guest after the last harvest. The pages of that round must be in the next harvest
    /// again.
    Recall,
    /// Start the dirty log and find the populated pages: `LogStarted`.
    StartLog,
    /// Send the harvested pages: one `LaneSent` for each lane. `rearm` means that the guest runs,
    /// so the log must be re-armed before each run of pages is read.
    SendRound {
        /// Number of the round, from 1.
        round: u32,
        /// Whether the guest runs.
        rearm: bool,
    },
    /// Harvest with the guest running: `Harvested`.
    Harvest,
    /// The same, and add the pages found to the pending ones, which were not sent: `Harvested` with
    /// the number of all of them.
    HarvestMore,
    /// From now on, `Save` also reads a sample of the guest's storage.
    PrepareStorageSample,
    /// Set the windows for a link with this round trip.
    FitWindows {
        /// The shortest round trip so far.
        round_trip: Duration,
    },
    /// Use only these compression algorithms. Precedes the first frame.
    PackWith(AlgorithmSet),
    /// Cap the data channels, in bytes per second.
    Cap(Option<u64>),
    /// Change the downtime limit of a carried guest's VMM.
    LimitDowntime(Duration),
    /// Throttle the vCPUs.
    Throttle {
        /// Throttling in percent.
        percent: u8,
    },
    /// Let a carried guest's VMM stop it as soon as possible, whatever is left to send: `Stopped`.
    SwitchOver,
    /// Pause the guest: `Paused`.
    Pause,
    /// Harvest what was written before the pause and add it to the pending pages: `LastHarvest`.
    HarvestLast,
    /// Save the state, or let a carried guest's VMM send the remaining data: `Saved`.
    Save,
    /// Sum up the hashes of all pages as last sent: `Digest`.
    SumDigest,
    /// Ask the witness: `Register`.
    AskWitness(Option<WitnessRequest>),
    /// Send [`ControlMessage::Lacking`] for all pending pages that were not named since the last
    /// round, and forget their hashes.
    TellLacking,
    /// Connect a carried guest's VMM, whose streams to the destination have ended, to new ones.
    /// Its tunnels begin at 0, with the next channels of their lanes: `NotReconnected` if that
    /// fails.
    ReconnectVmm,
    /// Answer requests on fetch lanes from now on.
    ServePages {
        /// The number of the round that these pages count as.
        round: u32,
    },
    /// Send [`ControlMessage::Free`] for the pages whose content the destination need not have.
    TellFree,
    /// Hash the whole paused memory without those pages, concurrently: `Hashed`.
    Hash {
        /// Identifies the hash. The result for a pause that was withdrawn is ignored.
        attempt: u32,
    },
    /// Append COMMIT of a session of this kind to the journal: `CommitWritten`.
    WriteCommit(SessionKind),
    /// Append KEPT, GIVEN or SERVING to the journal, if possible.
    WriteOutcome(Record),
    /// Resume the guest here.
    Resume,
    /// Give the guest up.
    Release,
    /// Ask the destination about the session on a new channel, not before `delay`.
    Ask {
        /// How long to wait first.
        delay: Duration,
        /// Fetch lanes to offer.
        offer: Option<LaneOffer>,
    },
    /// Notify the observer.
    Report(Report),
}

/// A notification for the observer.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Report {
    /// The destination has accepted the guest, all channels are open, and it answers. Reported once
    /// in a session, and before READY.
    Connected {
        /// The shortest round trip so far, in milliseconds.
        round_trip_ms: f64,
        /// The protocol version.
        protocol: u16,
        /// The destination's release, if it has announced it.
        destination: Option<Release>,
    },
    /// The destination sent fields of a newer release that may be ignored. Reported once for each
    /// type of message.
    UnknownFields {
        /// The message's name.
        message: &'static str,
        /// The field numbers.
        fields: Vec<u16>,
    },
    /// A channel was lost, and is being reestablished.
    LinkLost {
        /// `control` or `lane N`.
        channel: String,
        /// The cause, in words.
        reason: String,
    },
    /// The channel was reestablished.
    LinkRestored {
        /// `control` or `lane N`.
        channel: String,
        /// For how long it was missing, in milliseconds.
        after_ms: f64,
    },
    /// A lane has sent again what was not placed when its channel was lost.
    Resent {
        /// The lane.
        lane: u8,
        /// Number of frames.
        frames: u64,
        /// Their bytes.
        bytes: u64,
    },
    /// The link was lost while the guest was paused. The guest runs on at the source, and is paused
    /// again later.
    Recalled,
    /// A round begins.
    RoundStarted {
        /// Its number, from 1.
        round: u32,
        /// Pages to send.
        pages: u64,
        /// Whether the guest is paused.
        paused: bool,
    },
    /// A round is placed at the destination.
    RoundDone(crate::stats::RoundStats),
    /// The forecast after a harvest.
    Forecast(Forecast),
    /// The rest fits the downtime limit, and the migration is held until the user releases it. The
    /// guest runs on, and its writes are still sent.
    Held {
        /// The predicted downtime of a switchover now, in milliseconds.
        predicted_downtime_ms: f64,
    },
    /// The throttling of the vCPUs has changed.
    Throttled {
        /// Throttling in percent.
        percent: u8,
    },
    /// The guest is paused.
    Paused {
        /// The predicted downtime, in milliseconds.
        predicted_downtime_ms: f64,
    },
    /// The guest is paused for a switchover with post-copy.
    PostCopy {
        /// The number of the round that the missing pages count as.
        round: u32,
        /// Pages that the destination lacks, which its guest fetches while it runs.
        pages: u64,
    },
    /// The user wants post-copy, and it can't be used. The migration continues without it.
    PostCopyUnavailable {
        /// Why.
        why: String,
    },
    /// The destination is ready.
    Ready,
    /// COMMIT is journaled. This side can no longer resume the guest on its own.
    Committed,
    /// The destination runs the guest, and fetches pages of its memory from here.
    Serving {
        /// Pages that the destination lacked at the switchover.
        pages: u64,
    },
    /// The guest has crashed at the destination while it lacked pages. Its memory is kept here
    /// until an operator gives it up.
    GuestCrashed,
    /// Pages that the destination lacks can't be sent to it for now.
    ServingFailed {
        /// The cause, in words.
        reason: String,
    },
    /// The destination can't be reached after COMMIT. The guest stays paused.
    InDoubt {
        /// The cause, in words.
        reason: String,
    },
    /// The witness has decided a handover in doubt.
    WitnessDecided {
        /// What it has on record.
        register: Register,
    },
    /// The cancellation came too late.
    TooLateToCancel,
    /// The guest runs here again.
    Resumed,
}

/// How the migration ended.
#[derive(Debug)]
pub enum Ending {
    /// The source has the guest, and it runs. The error says why it was not migrated.
    Kept(MigrateError),
    /// The destination has the guest.
    Given,
    /// The destination had the guest, which has lost the pages that it had not fetched yet.
    Lost(MigrateError),
}
