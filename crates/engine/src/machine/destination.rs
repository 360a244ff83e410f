//! The destination's side of a migration, sans-IO.
//!
//! ```text
//!  AwaitBegin -> Preparing -> Opening -> Receiving -> Placing -> [Hashing] -> Loading -> Deciding
//!                                                                                           |
//!                                                           handover (see vmferry_handover) +
//! ```
//! `Hashing` occurs if the source requested `--verify` before FINAL: the memory is hashed as it was
//! placed. A guest that is refused while preparing leaves no trace. From `Opening` on the session
//! is in the journal, so that this host can always answer for it.

pub mod io;

mod announcement;
mod clock;
mod handing_over;
mod hashing;
mod links;

use std::collections::VecDeque;
use std::time::Duration;

use vmferry_memory::{GuestBytes, SlotLayout};
use vmferry_wire::{ControlMessage, Reason, ReasonCode, SessionId, Token};

use self::announcement::check_layout;
use self::hashing::Hashing;
use self::io::{Action, Ending, Input, LinkId};
use self::links::Losses;
use super::peer::{DestinationSide, UnknownFields};
use crate::config::Timeouts;
use crate::error::MigrateError;
use crate::stats::DestinationStats;
use crate::vmm::GuestDescription;
use vmferry_handover::{DestinationEvent, DestinationState};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    AwaitBegin,
    Preparing,
    Opening,
    Receiving,
    Placing,
    Hashing,
    Loading,
    Deciding,
    Refused,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::AwaitBegin => "the wait for the guest's announcement",
            Self::Preparing | Self::Opening => "the preparation of the machine",
            Self::Receiving => "pre-copy",
            Self::Placing => "the placing of the last pages",
            Self::Hashing => "the hash of the memory",
            Self::Loading => "the loading of the state",
            Self::Deciding => "the handover",
            Self::Refused => "the end",
        }
    }
}

/// The content of the announcement.
#[derive(Debug)]
struct Announced {
    session: SessionId,
    name: String,
    lanes: u8,
    layout: Vec<SlotLayout>,
}

/// The content of FINAL.
#[derive(Debug)]
struct Final {
    lane_sequences: Vec<u64>,
    digest: u64,
    state: GuestBytes,
    paused: bool,
}

/// The destination's state machine.
#[derive(Debug)]
pub struct Destination {
    timeouts: Timeouts,
    token: Token,
    our_side: DestinationSide,
    unknown_fields: UnknownFields,
    phase: Phase,
    handover: DestinationState,
    actions: VecDeque<Action>,
    announced: Option<Announced>,
    last: Option<Final>,
    lane_ends: Vec<u64>,
    digest: u64,
    hashing: Hashing,
    /// The guest was paused at the source before the migration, and stays paused.
    paused: bool,
    load: Duration,
    failure: Option<MigrateError>,
    waiting_since: Duration,
    last_heard: Duration,
    /// How long the source may be disconnected.
    reconnect: Duration,
    losses: Losses,
    link_up: bool,
    committed_at: Duration,
    verification: Verification,
    stats: DestinationStats,
}

/// Whether both memories are compared. The time for it counts from READY, whenever VERIFY arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verification {
    None,
    /// VERIFY may be sent once.
    Announced,
    Asked,
}

impl Destination {
    /// A destination with a greeted control channel on which nothing was received yet. `token` is
    /// what the data channels must present.
    #[must_use]
    pub fn new(timeouts: Timeouts, token: Token, our_side: DestinationSide, now: Duration) -> Self {
        Self {
            timeouts,
            token,
            unknown_fields: UnknownFields::default(),
            phase: Phase::AwaitBegin,
            handover: DestinationState::Receiving,
            actions: VecDeque::new(),
            announced: None,
            last: None,
            lane_ends: Vec::new(),
            digest: 0,
            hashing: Hashing::default(),
            paused: false,
            load: Duration::ZERO,
            failure: None,
            waiting_since: now,
            last_heard: now,
            reconnect: Duration::ZERO,
            losses: Losses::default(),
            link_up: true,
            committed_at: now,
            verification: Verification::None,
            stats: DestinationStats { protocol: our_side.protocol, ..DestinationStats::default() },
            our_side,
        }
    }

    /// Processes an event at time `now`.
    pub fn handle(&mut self, now: Duration, input: Input) {
        if self.phase == Phase::Refused {
            return;
        }
        if input.answers_action() {
            // Messages were not read while the action was carried out.
            self.last_heard = now;
        }
        match input {
            Input::Control { link, message } => {
                if link == LinkId::CONTROL {
                    self.last_heard = now;
                }
                self.on_message(now, link, message);
            }
            Input::UnknownFields { message, fields } => self.on_unknown_fields(message, fields),
            Input::LinkLost(error) => self.on_control_lost(now, error),
            Input::Resumed => self.on_resumed(now),
            Input::LaneLost { lane, error, .. } => self.on_lane_lost(now, lane, error),
            Input::LaneJoined { lane } => self.on_lane_joined(now, lane),
            Input::Superseded => self.on_superseded(now),
            Input::Failed(error) => self.fail(now, error),
            Input::Cancel => {
                self.fail(now, MigrateError::Cancelled { during: self.phase.name() });
            }
            Input::Prepared(result) => self.on_prepared(result),
            Input::Opened(result) => self.on_opened(result),
            Input::LaneEnded { lane, sequence } => {
                if let Some(end) = self.lane_ends.get_mut(usize::from(lane)) {
                    // Of the threads that place frames, the one that completed a round may report
                    // it after the next round has ended.
                    *end = sequence.max(*end);
                }
                self.check_placed(now);
            }
            Input::Digest(digest) => self.on_digest(now, digest),
            Input::Loaded(result) => self.on_loaded(now, result),
            Input::Hashed(hash, took) => self.on_hashed(now, hash, took),
            Input::IntentWritten(result) => {
                self.on_journal(now, result, DestinationEvent::IntentWritten)
            }
            Input::AbortWritten(result) => {
                self.on_journal(now, result, DestinationEvent::AbortWritten)
            }
            Input::Started(result) => {
                self.stats.start_ms = now.saturating_sub(self.committed_at).as_secs_f64() * 1e3;
                if let Err(error) = result {
                    self.failure = Some(error);
                }
            }
            // The last frames are arriving, however slowly.
            Input::Arriving if self.phase == Phase::Placing => self.waiting_since = now,
            Input::Arriving | Input::StreamRefused | Input::Tick => {}
        }
        self.watch_the_clock(now);
    }

    /// The next action.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`Input::Tick`] is due if nothing happens before.
    #[must_use]
    pub fn next_tick(&self) -> Option<Duration> {
        let silence = self.expects_life().then(|| self.last_heard + self.timeouts.silence);
        let deadline = self.deadline().map(|(at, ..)| at);
        [silence, deadline, self.losses.deadline(self.patience())].into_iter().flatten().min()
    }

    /// How the session ended, once it has ended and all its actions were taken.
    pub fn ending(&mut self) -> Option<Ending> {
        if !self.actions.is_empty() {
            return None;
        }
        let phase = self.phase.name();
        let failure = |error: Option<MigrateError>| {
            error.unwrap_or(MigrateError::Cancelled { during: phase })
        };
        if self.phase == Phase::Refused {
            return Some(Ending::Refused(failure(self.failure.take())));
        }
        match self.handover {
            DestinationState::Owns => Some(Ending::Owns(self.failure.take())),
            DestinationState::Aborted => Some(Ending::Aborted(failure(self.failure.take()))),
            DestinationState::Stuck => Some(Ending::Stuck(failure(self.failure.take()))),
            _ => None,
        }
    }

    /// The state of the handover.
    #[must_use]
    pub fn handover(&self) -> DestinationState {
        self.handover
    }

    /// Whether the guest stays paused because it was paused at the source before the migration.
    #[must_use]
    pub fn stays_paused(&self) -> bool {
        self.paused
    }

    /// The session, once it was announced.
    #[must_use]
    pub fn session(&self) -> Option<SessionId> {
        self.announced.as_ref().map(|announced| announced.session)
    }

    /// The statistics that this machine keeps. The lanes keep the others.
    #[must_use]
    pub fn stats(&self) -> &DestinationStats {
        &self.stats
    }

    /// Whether FINAL may arrive: the guest is accepted and nothing is decided. A FINAL that was
    /// received may be withdrawn.
    #[must_use]
    pub fn wants_final(&self) -> bool {
        matches!(self.phase, Phase::Receiving | Phase::Placing)
            && self.handover == DestinationState::Receiving
    }

    /// The phase in words.
    #[must_use]
    pub fn phase_name(&self) -> &'static str {
        self.phase.name()
    }

    fn on_message(&mut self, now: Duration, link: LinkId, message: ControlMessage) {
        let ours = self.session();
        match (message, self.phase) {
            (
                ControlMessage::Begin {
                    session,
                    guest,
                    vmm,
                    config,
                    layout,
                    lanes,
                    verify,
                    reconnect_ms,
                    release,
                    streams,
                    used_bytes,
                },
                Phase::AwaitBegin,
            ) => {
                self.stats.source = release;
                self.reconnect =
                    Duration::from_millis(reconnect_ms.into()).min(self.timeouts.reconnect);
                if let Err(reason) = check_layout(&layout) {
                    return self.refuse(Reason::new(ReasonCode::LayoutMismatch, &reason));
                }
                self.announced = Some(Announced {
                    session,
                    name: guest.name.clone(),
                    lanes,
                    layout: layout.clone(),
                });
                if verify {
                    self.verification = Verification::Announced;
                }
                self.phase = Phase::Preparing;
                let streams = (self.our_side.protocol > 1).then_some(streams);
                let guest = GuestDescription { identity: guest, vmm, config, layout };
                self.actions.push_back(Action::Prepare { guest, streams, used_bytes });
            }
            (ControlMessage::Final { lane_sequences, digest, state, paused }, Phase::Receiving) => {
                if lane_sequences.len() != self.lane_ends.len() {
                    let reason = format!(
                        "the last message names {} lanes of {}",
                        lane_sequences.len(),
                        self.lane_ends.len()
                    );
                    return self.fail(now, protocol(reason));
                }
                self.last = Some(Final { lane_sequences, digest, state, paused });
                self.phase = Phase::Placing;
                self.waiting_since = now;
                self.check_placed(now);
            }
            (ControlMessage::Withdraw {}, Phase::Receiving | Phase::Placing | Phase::Hashing) => {
                self.withdraw()
            }
            (ControlMessage::Verify {}, _) if self.takes_verify() => self.on_verify(),
            (ControlMessage::Free { slot, runs }, _) if self.takes_verify() => {
                if let Err(reason) = self.leave_out(slot, &runs) {
                    self.fail(now, protocol(reason));
                }
            }
            // The guest is not complete here, and a source that follows the protocol knows that.
            (ControlMessage::Commit { session }, phase)
                if Some(session) == ours && self.handover == DestinationState::Receiving =>
            {
                let reason = format!("COMMIT does not belong in {}", phase.name());
                self.fail(now, protocol(reason));
            }
            (ControlMessage::Commit { session }, _) if Some(session) == ours => {
                self.committed_at = now;
                self.hand_over(now, link, DestinationEvent::Commit);
            }
            (ControlMessage::Query { session }, _) if Some(session) == ours => {
                self.hand_over(now, link, DestinationEvent::Query);
            }
            (ControlMessage::Abort { reason }, _) => {
                self.fail(now, MigrateError::EndedByPeer { peer: "source", reason });
            }
            (ControlMessage::Ping { nonce }, _) => {
                self.actions
                    .push_back(Action::Send { link, message: ControlMessage::Pong { nonce } });
            }
            (ControlMessage::Pong { .. }, _) => {}
            (message, phase) => {
                let reason = format!("{} does not belong in {}", message.name(), phase.name());
                self.fail(now, protocol(reason));
            }
        }
    }

    fn layout(&self) -> &[SlotLayout] {
        self.announced.as_ref().map_or(&[], |announced| &announced.layout)
    }

    fn check_placed(&mut self, now: Duration) {
        let Some(last) = &self.last else { return };
        if self.is_waiting_for_source() {
            // The source may have resumed its guest, and sends FINAL again after it has
            // reconnected.
            return;
        }
        if self.phase == Phase::Placing && self.lane_ends == last.lane_sequences {
            self.phase = Phase::Loading;
            self.waiting_since = now;
            self.actions.push_back(Action::SumDigest);
        }
    }

    fn on_digest(&mut self, now: Duration, placed: u64) {
        if self.phase != Phase::Loading {
            return;
        }
        let Some(last) = &self.last else { return };
        self.digest = placed;
        if placed != last.digest {
            let sent = last.digest;
            return self.fail(now, MigrateError::DigestMismatch { sent, placed });
        }
        if self.hashing.is_asked() { self.hash_placed() } else { self.load() }
    }

    /// Lets the VMM load the state. From here on nothing can be withdrawn.
    fn load(&mut self) {
        if let Some(last) = self.last.take() {
            self.phase = Phase::Loading;
            self.paused = last.paused;
            self.actions.push_back(Action::Load { state: last.state, paused: last.paused });
        }
    }

    fn on_loaded(&mut self, now: Duration, result: Result<Duration, MigrateError>) {
        match result {
            Ok(took) if self.phase == Phase::Loading => {
                self.load = took;
                self.stats.load_ms = took.as_secs_f64() * 1e3;
                self.phase = Phase::Deciding;
                self.waiting_since = now;
                self.hand_over(now, LinkId::CONTROL, DestinationEvent::Loaded);
            }
            Ok(_) => {}
            Err(error) => self.fail(now, error),
        }
    }
}

fn protocol(reason: String) -> MigrateError {
    MigrateError::Protocol { channel: "control".into(), offset: 0, reason }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use vmferry_memory::SlotId;
    use vmferry_wire::GuestIdentity;

    use super::*;

    /// Several threads place a lane's frames, and each reports its progress when it is scheduled.
    #[test]
    fn the_end_of_an_older_round_may_be_told_last() {
        let (now, side) = (Duration::ZERO, DestinationSide::default());
        let mut machine = Destination::new(Timeouts::default(), Token([1; 16]), side, now);
        (machine.phase, machine.lane_ends) = (Phase::Receiving, vec![0]);
        for sequence in [9, 7] {
            machine.handle(now, Input::LaneEnded { lane: 0, sequence });
        }
        let (lane_sequences, state) = (vec![9], GuestBytes::new());
        let message = ControlMessage::Final { lane_sequences, digest: 0, state, paused: false };
        machine.handle(now, Input::Control { link: LinkId::CONTROL, message });
        assert_eq!(machine.phase, Phase::Loading);
    }

    #[test]
    fn pages_to_leave_out_must_be_the_guests() {
        let mut machine = Destination::new(
            Timeouts::default(),
            Token([0; 16]),
            DestinationSide::default(),
            Duration::ZERO,
        );
        let layout = vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: 10 }];
        let begin = ControlMessage::Begin {
            session: SessionId([1; 16]),
            guest: GuestIdentity { uuid: uuid::Uuid::nil(), name: "web".into() },
            vmm: String::new(),
            config: Vec::new(),
            layout,
            lanes: 1,
            verify: true,
            reconnect_ms: 0,
            release: None,
            streams: false,
            used_bytes: Vec::new(),
        };
        machine.handle(Duration::ZERO, Input::Control { link: LinkId::CONTROL, message: begin });
        machine.leave_out(SlotId(0), &[(0, 2), (9, 1)]).unwrap();
        for (slot, run) in [(1, (0, 1)), (0, (9, 2)), (0, (u64::MAX, 2)), (0, (11, 0))] {
            let reason = machine.leave_out(SlotId(slot), &[run]).unwrap_err();
            assert!(reason.starts_with("FREE names"), "{reason}");
        }
        let left_out: Vec<_> = machine.hashing.free().as_ref().unwrap().runs().collect();
        assert_eq!(left_out.len(), 2, "{left_out:?}");
        // FREE is not valid before READY without VERIFY, because memories are not compared then.
        let free = ControlMessage::Free { slot: SlotId(0), runs: vec![(0, 1)] };
        machine.handle(Duration::ZERO, Input::Control { link: LinkId::CONTROL, message: free });
        let failure = machine.failure.as_ref().expect("a protocol error").to_string();
        assert!(failure.contains("FREE does not belong in"), "{failure}");
    }
}
