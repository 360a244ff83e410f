//! The source's side of a migration, sans-IO.
//!
//! Inputs are events (a message arrived, a round was sent, the VMM is paused), outputs are actions,
//! and time is passed in. The driver in `driver::source` carries the actions out with threads,
//! sockets and a VMM; a simulation needs none of them.
//!
//! ```text
//!  Announced -> Joining -> Sending <-> Harvesting
//!                                                     | the rest fits the downtime limit
//!                                                  Pausing -> LastHarvest -> LastRound -> AwaitReady
//!                                                                                            |
//!                           handover (see vmferry_handover)  <-  [Verifying]  <--------------+
//! ```
//! With `--verify` both sides hash their memory while the source waits for READY, the destination
//! before it loads the state. `Verifying` follows if this side's hash takes longer than that, or if
//! the destination's release hashes after the load only.
//!
//! Before COMMIT is journaled every failure leads to `Kept`: the guest resumes at the source.

pub mod change;
pub mod io;

mod accepted;
mod clock;
mod comparison;
#[cfg(test)]
mod fixture;
mod handing_over;
mod holding;
mod links;
mod passes;
mod rounds;

use std::collections::VecDeque;
use std::time::Duration;

use vmferry_memory::{GuestBytes, WholeHash};
use vmferry_wire::{AlgorithmSet, ControlMessage, Release, SessionWord};

use self::accepted::from_release;
use self::comparison::Comparison;
use self::holding::Hold;
use self::io::{Action, Ending, Input};
use self::links::Links;
use super::peer::{SourceSide, UnknownFields};
use crate::config::{SourceConfig, Timeouts};
use crate::error::MigrateError;
use crate::rounds::convergence::{Predictor, Throttle};
use crate::rounds::tracker::RoundTracker;
use crate::stats::SourceStats;
use crate::vmm::{GuestDescription, StateEstimate};
use vmferry_handover::journal::{Record, recover_source};
use vmferry_handover::{SourceEvent, SourceState};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Announced,
    Joining,
    Sending,
    Harvesting,
    Pausing,
    LastHarvest,
    LastRound,
    AwaitReady,
    Verifying,
    HandingOver,
    Asking,
    Done,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Announced | Self::Joining => "the negotiation",
            Self::Sending | Self::Harvesting => "pre-copy",
            Self::Pausing | Self::LastHarvest => "the pause",
            Self::LastRound => "the last round",
            Self::AwaitReady => "the wait for READY",
            Self::Verifying => "the comparison of both memories",
            Self::HandingOver | Self::Asking => "the handover",
            Self::Done => "the end",
        }
    }
}

/// The source's state machine.
#[derive(Debug)]
pub struct Source {
    config: SourceConfig,
    phase: Phase,
    our_side: SourceSide,
    handover: SourceState,
    predictor: Predictor,
    rounds: RoundTracker,
    links: Links,
    stats: SourceStats,
    /// Bytes on the data channels.
    wire_bytes: u64,
    actions: VecDeque<Action>,
    failure: Option<MigrateError>,
    by_operator: bool,
    /// When the present wait began.
    waiting_since: Duration,
    /// When the phase began or the destination last placed a frame, whichever is later.
    last_news: Duration,
    last_heard: Duration,
    /// Number of pings sent so far, which is the number of the last one.
    pings: u64,
    /// The ping that is not answered yet, and when it was sent.
    ping: Option<(u64, Duration)>,
    next_ping: Duration,
    /// The ping sent after WITHDRAW, until it is answered or the control channel is reestablished.
    /// No round begins before that.
    withdrawn: Option<u64>,
    /// The shortest round trip so far.
    round_trip: Option<Duration>,
    log_started: Duration,
    /// Pages of the first round and the time for finding them, once the log is running.
    first_pages: Option<(u64, Duration)>,
    /// Whether the destination has accepted the guest.
    accepted: bool,
    last_harvest: Duration,
    /// For how long the guest was paused for the last harvest.
    stood_still: Duration,
    /// Since when the guest is paused for the handover.
    stopped_at: Option<Duration>,
    throttle: Throttle,
    hold: Hold,
    last_sent: Duration,
    comparison: Comparison,
    state: Option<GuestBytes>,
    digest: Option<u64>,
    /// The guest was paused by another client.
    guest_is_paused: bool,
    unknown_fields: UnknownFields,
}

/// Multiple of the stall timeout for which a destination may report arriving frames without placing
/// one. A lane of 4 KB/s, which is one of 16 lanes under the lowest cap, takes a minute for a
/// frame.
const STALLS_WITHOUT_NEWS: u32 = 10;

impl Source {
    /// A source that will announce its guest on a greeted control channel.
    #[must_use]
    pub fn new(
        config: SourceConfig,
        guest: GuestDescription,
        our_side: SourceSide,
        now: Duration,
    ) -> Self {
        let release = Some(Release::of_this(&our_side.vmm));
        let (streams, used_bytes) = (our_side.streams, our_side.used_bytes.clone());
        let mut machine = Self::at_rest(config, &guest, our_side, now);
        machine.act(Action::Send(ControlMessage::Begin {
            session: machine.config.session,
            guest: guest.identity,
            vmm: guest.vmm,
            config: guest.config,
            layout: guest.layout,
            lanes: machine.config.channels,
            verify: machine.config.verify,
            reconnect_ms: machine
                .config
                .timeouts
                .reconnect
                .as_millis()
                .try_into()
                .unwrap_or(u32::MAX),
            release,
            streams,
            used_bytes,
        }));
        // The log starts while the destination prepares and data channels are opened, so that the
        // guest can hint its free pages meanwhile.
        machine.act(Action::StartLog);
        machine
    }

    /// A source that was restarted after its process died while the guest lived on. It continues
    /// from the state in the journal: it resumes the guest, gives it up, or asks the destination,
    /// and never sends COMMIT.
    #[must_use]
    pub fn recovered(
        config: SourceConfig,
        guest: &GuestDescription,
        records: &[Record],
        now: Duration,
    ) -> Self {
        let mut machine = Self::at_rest(config, guest, SourceSide::new("none"), now);
        let (state, effects) = recover_source(records);
        machine.follow(now, state, effects);
        machine
    }

    fn at_rest(
        config: SourceConfig,
        guest: &GuestDescription,
        our_side: SourceSide,
        now: Duration,
    ) -> Self {
        let memory_pages: u64 = guest.layout.iter().map(|slot| slot.pages).sum();
        Self {
            phase: Phase::Announced,
            handover: SourceState::Holding,
            predictor: Predictor::new(config.limits(), config.max_bandwidth),
            rounds: RoundTracker::new(config.channels),
            links: Links::new(config.channels),
            stats: SourceStats {
                memory_bytes: memory_pages * vmferry_memory::PAGE_SIZE as u64,
                dirty_log: our_side.log.to_owned(),
                protocol: our_side.protocol,
                channels: config.channels,
                compression: config.compression.way.to_string(),
                ..SourceStats::default()
            },
            wire_bytes: 0,
            actions: VecDeque::new(),
            failure: None,
            by_operator: false,
            waiting_since: now,
            last_news: now,
            last_heard: now,
            pings: 0,
            ping: None,
            next_ping: now + clock::PING_INTERVAL,
            withdrawn: None,
            round_trip: None,
            log_started: now,
            first_pages: None,
            accepted: false,
            last_harvest: now,
            stood_still: Duration::ZERO,
            stopped_at: None,
            throttle: Throttle::new(config.throttle),
            hold: Hold::new(config.pause_before_switchover),
            last_sent: now,
            comparison: Comparison::default(),
            state: None,
            digest: None,
            guest_is_paused: false,
            unknown_fields: UnknownFields::default(),
            our_side,
            config,
        }
    }

    /// Sets the VMM's estimate of its state, for the prediction of the downtime.
    pub fn expect_state(&mut self, state: StateEstimate) {
        self.predictor.expect_state(state);
    }

    /// Processes an event at time `now`.
    pub fn handle(&mut self, now: Duration, input: Input) {
        if self.phase == Phase::Done {
            return;
        }
        match input {
            Input::Control(message) => {
                self.last_heard = now;
                self.on_message(now, message);
            }
            Input::UnknownFields { message, fields } => self.on_unknown_fields(message, fields),
            Input::LinkLost(error) => self.on_control_lost(now, error),
            Input::Resumed => self.on_resumed(now),
            Input::NotResumed(error) => self.on_not_restored(now, None, error),
            Input::LaneLost { lane, error, .. } => self.on_lane_lost(now, lane, error),
            Input::LaneRejoined { lane, placed } => self.on_lane_rejoined(now, lane, placed),
            Input::LaneNotRejoined { lane, error } => {
                self.on_not_restored(now, Some(lane), error);
            }
            Input::Resent { lane, frames, bytes } => self.on_resent(lane, frames, bytes),
            Input::Failed(error) => self.fail(now, error),
            Input::Cancel => self.on_cancel(now),
            Input::Change(change) => self.on_change(change),
            Input::SwitchOver => self.on_switch_over(now),
            Input::Operator(word) => {
                self.by_operator = true;
                self.hand_over(now, SourceEvent::Operator(word));
                self.by_operator = self.handover.is_final();
            }
            Input::Away { took } => self.on_away(now, took),
            Input::Flowing => self.on_flow(now),
            Input::Tick => {}
            Input::CommitWritten(result) => self.on_commit_written(now, result),
            other if self.handover == SourceState::Holding => self.on_progress(now, other),
            _ => {}
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
        if self.phase == Phase::Done {
            return None;
        }
        let deadline = self.deadline().map(|(at, _, _)| at);
        let silence = self.listens().then(|| self.last_heard + self.timeouts().silence);
        let ping = self.listens().then_some(self.next_ping);
        let loss = self.links.deadline(self.patience());
        [deadline, silence, ping, loss, self.rests_until(), self.pause_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// How the migration ended, once it has. Takes the error out.
    pub fn ending(&mut self) -> Option<Ending> {
        match self.handover {
            SourceState::Given => Some(Ending::Given),
            SourceState::Kept => Some(Ending::Kept(
                self.failure
                    .take()
                    .unwrap_or(MigrateError::Cancelled { during: self.phase.name() }),
            )),
            _ => None,
        }
    }

    /// The state of the handover.
    #[must_use]
    pub fn handover(&self) -> SourceState {
        self.handover
    }

    /// The statistics so far.
    #[must_use]
    pub fn stats(&self) -> &SourceStats {
        &self.stats
    }

    /// The shortest round trip on the control channel so far; 0 if none was measured.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        self.round_trip.unwrap_or_default()
    }

    /// The negotiated protocol version.
    #[must_use]
    pub fn protocol(&self) -> u16 {
        self.our_side.protocol
    }

    /// The phase in words.
    #[must_use]
    pub fn phase_name(&self) -> &'static str {
        self.phase.name()
    }

    fn timeouts(&self) -> &Timeouts {
        &self.config.timeouts
    }

    fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    fn enter(&mut self, now: Duration, phase: Phase) {
        self.phase = phase;
        self.waiting_since = now;
        self.last_news = now;
    }

    fn on_message(&mut self, now: Duration, message: ControlMessage) {
        match (message, self.phase) {
            (
                ControlMessage::Accept { token, release, algorithms, verifies_placed },
                Phase::Announced,
            ) => {
                self.stats.destination = release;
                self.comparison.expect(verifies_placed);
                self.on_accept(now, token, algorithms.unwrap_or(AlgorithmSet::VERSION_1));
            }
            (ControlMessage::Refuse { reason, release }, Phase::Announced | Phase::Joining) => {
                let reason = from_release(reason, release.as_ref());
                self.stats.destination = release.or(self.stats.destination.take());
                self.fail(now, MigrateError::Refused { peer: "destination", reason });
            }
            (ControlMessage::Placed { lane, sequence }, _) => {
                if self.rounds.placed(lane, sequence) {
                    self.last_news = now;
                }
                // Without progress the message only says that frames are arriving, if slowly. A
                // peer that only does that must not keep the guest waiting forever.
                if now < self.last_news + self.timeouts().stall * STALLS_WITHOUT_NEWS {
                    self.on_flow(now);
                }
                self.finish_round(now);
            }
            (ControlMessage::Ready { digest, .. }, Phase::AwaitReady) => self.on_ready(now, digest),
            (
                ControlMessage::Verified { hash, pages, elapsed_us },
                Phase::AwaitReady | Phase::Verifying,
            ) if self.comparison.is_asked() => {
                let took = Duration::from_micros(elapsed_us);
                self.on_verified(now, WholeHash { hash, pages }, took);
            }
            // The message crossed WITHDRAW.
            (ControlMessage::Verified { .. }, Phase::Sending) if self.withdrawn.is_some() => {}
            (ControlMessage::Abort { reason }, _) => {
                self.fail(now, MigrateError::EndedByPeer { peer: "destination", reason });
            }
            (ControlMessage::Running { session, .. }, _) if session == self.config.session => {
                self.hand_over(now, SourceEvent::Running);
            }
            (ControlMessage::Aborted { session, reason }, _) if session == self.config.session => {
                if self.handover == SourceState::Holding {
                    self.fail(now, MigrateError::EndedByPeer { peer: "destination", reason });
                } else {
                    self.on_word(now, SessionWord::Aborted, Some(reason));
                }
            }
            (ControlMessage::Answer { session, word }, _) if session == self.config.session => {
                self.on_word(now, word, None);
            }
            (ControlMessage::Ping { nonce }, _) => {
                self.act(Action::Send(ControlMessage::Pong { nonce }));
            }
            (ControlMessage::Pong { nonce }, _) => self.on_pong(now, nonce),
            (ControlMessage::Ready { .. }, Phase::Sending | Phase::Harvesting)
                if self.stats.recalls > 0 =>
            {
                let error = MigrateError::LinkLost {
                    channel: "data".into(),
                    during: "the wait for READY",
                    detail: "the destination had loaded the state already".into(),
                };
                self.fail(now, error);
            }
            // An answer that crossed a change of phase, or a hostile peer. Before COMMIT the guest
            // is safe here; after it only the messages above count.
            (message, phase) if self.handover == SourceState::Holding => {
                let error = MigrateError::Protocol {
                    channel: "control".into(),
                    offset: 0,
                    reason: format!("{} does not belong in {}", message.name(), phase.name()),
                };
                self.fail(now, error);
            }
            _ => {}
        }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
