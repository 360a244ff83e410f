//! The source's side of a migration, sans-IO.
//!
//! Inputs are what happened (a message came, a round was sent, the VMM is paused), outputs are
//! what to do next, and time is passed in. The driver in [`super::driver`] carries the actions
//! out with threads, sockets and a VMM; a simulation can do it with none of them.
//!
//! ```text
//!  Announced -> Joining -> Starting -> Sending <-> Harvesting
//!                                                     | the rest fits the downtime limit
//!                                                  Pausing -> LastHarvest -> LastRound -> AwaitReady
//!                                                                                            |
//!                           hand-over (see crate::handover)  <-  [Verifying]  <--------------+
//! ```
//! Before COMMIT is journalled every failure leads to `Kept`: the guest resumes at the source.

use std::collections::VecDeque;
use std::time::Duration;

use vmferry_memory::WholeHash;
use vmferry_wire::{ControlMessage, Reason, SessionWord, Token};

use super::rounds::{LaneTotals, RoundTracker};
use crate::config::{SourceConfig, Timeouts};
use crate::convergence::{Decision, Harvest, Predictor};
use crate::error::MigrateError;
use crate::handover::{OperatorWord, SourceEffect, SourceEvent, SourceState};
use crate::stats::SourceStats;
use crate::vm::GuestDescription;

/// What happened.
#[derive(Debug)]
pub enum Input {
    /// A message on the control channel, or on the channel that asks for the session's word.
    Control(ControlMessage),
    /// A channel is gone.
    LinkLost(MigrateError),
    /// All data channels are open and greeted.
    LanesJoined,
    /// The dirty log runs, and so many pages are populated.
    LogStarted {
        /// Pages of the first round.
        populated_pages: u64,
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
    },
    /// The guest is paused.
    Paused {
        /// How long that took.
        took: Duration,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Announced,
    Joining,
    Starting,
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
            Self::Starting => "the start of the dirty log",
            Self::Sending | Self::Harvesting => "pre-copy",
            Self::Pausing | Self::LastHarvest => "the pause",
            Self::LastRound => "the last round",
            Self::AwaitReady => "the wait for READY",
            Self::Verifying => "the comparison of both memories",
            Self::HandingOver | Self::Asking => "the hand-over",
            Self::Done => "the end",
        }
    }
}

/// The machine.
#[derive(Debug)]
pub struct Source {
    config: SourceConfig,
    phase: Phase,
    handover: SourceState,
    predictor: Predictor,
    rounds: RoundTracker,
    stats: SourceStats,
    actions: VecDeque<Action>,
    failure: Option<MigrateError>,
    by_operator: bool,
    /// When the current wait began and what it is for.
    waiting_since: Duration,
    last_heard: Duration,
    ping: Option<(u64, Duration)>,
    next_ping: Duration,
    log_started: Duration,
    last_harvest: Duration,
    pause_ordered: Option<Duration>,
    last_sent: Duration,
    verify_since: Duration,
    state: Option<Vec<u8>>,
    digest: Option<u64>,
    our_hash: Option<WholeHash>,
    their_hash: Option<WholeHash>,
    log_name: &'static str,
}

impl Source {
    /// A source about to announce its guest on a greeted control channel.
    #[must_use]
    pub fn new(
        config: SourceConfig,
        guest: GuestDescription,
        log_name: &'static str,
        now: Duration,
    ) -> Self {
        let memory_pages: u64 = guest.layout.iter().map(|slot| slot.pages).sum();
        let mut machine = Self {
            phase: Phase::Announced,
            handover: SourceState::Holding,
            predictor: Predictor::new(config.limits(), config.max_bandwidth),
            rounds: RoundTracker::new(config.channels),
            stats: SourceStats {
                memory_bytes: memory_pages * vmferry_memory::PAGE_SIZE as u64,
                dirty_log: log_name.to_owned(),
                channels: config.channels,
                ..SourceStats::default()
            },
            actions: VecDeque::new(),
            failure: None,
            by_operator: false,
            waiting_since: now,
            last_heard: now,
            ping: None,
            next_ping: now + PING_INTERVAL,
            log_started: now,
            last_harvest: now,
            pause_ordered: None,
            last_sent: now,
            verify_since: now,
            state: None,
            digest: None,
            our_hash: None,
            their_hash: None,
            log_name,
            config,
        };
        machine.act(Action::Send(ControlMessage::Begin {
            session: machine.config.session,
            guest: guest.identity,
            vmm: guest.vmm,
            config: guest.config,
            layout: guest.layout,
            lanes: machine.config.channels,
            verify: machine.config.verify,
        }));
        machine
    }

    /// Takes what happened at `now`.
    pub fn handle(&mut self, now: Duration, input: Input) {
        if self.phase == Phase::Done {
            return;
        }
        match input {
            Input::Control(message) => {
                self.last_heard = now;
                self.on_message(now, message);
            }
            Input::LinkLost(error) => self.fail_by(now, SourceEvent::LinkLost, error),
            Input::Failed(error) => self.fail(now, error),
            Input::Cancel => self.on_cancel(now),
            Input::Operator(word) => {
                self.by_operator = true;
                self.hand_over(now, SourceEvent::Operator(word));
                self.by_operator = self.handover.is_final();
            }
            Input::Tick => {}
            Input::CommitWritten(result) => self.on_commit_written(now, result),
            other if self.handover == SourceState::Holding => self.on_progress(now, other),
            _ => {}
        }
        self.watch_the_clock(now);
    }

    /// The next thing to do.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`Input::Tick`] is due, if nothing happens before.
    #[must_use]
    pub fn next_tick(&self) -> Option<Duration> {
        if self.phase == Phase::Done {
            return None;
        }
        let deadline = self.deadline().map(|(at, _, _)| at);
        let silence = self.listens().then(|| self.last_heard + self.timeouts().silence);
        let ping = self.listens().then_some(self.next_ping);
        [deadline, silence, ping].into_iter().flatten().min()
    }

    /// How it ended, once it has. Takes the reason out.
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

    /// Where the hand-over stands.
    #[must_use]
    pub fn handover(&self) -> SourceState {
        self.handover
    }

    /// The statistics so far.
    #[must_use]
    pub fn stats(&self) -> &SourceStats {
        &self.stats
    }

    /// What the migration is doing, in words.
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
    }

    fn on_message(&mut self, now: Duration, message: ControlMessage) {
        match (message, self.phase) {
            (ControlMessage::Accept { token }, Phase::Announced) => {
                self.predictor.measured_round_trip(Duration::ZERO);
                self.enter(now, Phase::Joining);
                self.act(Action::OpenLanes(token));
            }
            (ControlMessage::Refuse { reason }, Phase::Announced | Phase::Joining) => {
                let error = MigrateError::Refused { peer: "destination", reason };
                self.fail(now, error);
            }
            (ControlMessage::Placed { lane, sequence }, _) => {
                if self.rounds.placed(lane, sequence) {
                    self.waiting_since = now;
                }
                self.finish_round(now);
            }
            (ControlMessage::Ready { digest, .. }, Phase::AwaitReady) => self.on_ready(now, digest),
            (ControlMessage::Verified { hash, pages, .. }, Phase::Verifying) => {
                self.their_hash = Some(WholeHash { hash, pages });
                self.compare_hashes(now);
            }
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
            // An answer that crossed a change of phase, or a peer of ill will: before COMMIT the
            // guest is safe here, after it only the words above count.
            (message, phase) if self.handover == SourceState::Holding => {
                let error = MigrateError::Protocol {
                    channel: "control".into(),
                    offset: 0,
                    reason: format!("{} does not belong into {}", message.name(), phase.name()),
                };
                self.fail(now, error);
            }
            _ => {}
        }
    }

    fn on_progress(&mut self, now: Duration, input: Input) {
        match (input, self.phase) {
            (Input::LanesJoined, Phase::Joining) => {
                self.send_ping(now);
                self.enter(now, Phase::Starting);
                self.log_started = now;
                self.last_harvest = now;
                self.act(Action::StartLog);
            }
            (Input::LogStarted { populated_pages }, Phase::Starting) => {
                self.last_harvest = now;
                self.start_round(now, populated_pages, now.saturating_sub(self.log_started), false);
            }
            (Input::LaneSent { lane, end_sequence, totals }, _) => {
                self.rounds.sent(lane, end_sequence, totals);
                if self.phase == Phase::LastRound && self.rounds.all_sent() {
                    self.act(Action::SumDigest);
                }
                self.finish_round(now);
            }
            (Input::Harvested { pages, took }, Phase::Harvesting) => {
                self.on_harvested(now, pages, took);
            }
            (Input::Paused { took }, Phase::Pausing) => {
                self.stats.downtime.pause_ms = ms(took);
                self.enter(now, Phase::LastHarvest);
                self.act(Action::HarvestLast);
            }
            (Input::LastHarvest { pages, took }, Phase::LastHarvest) => {
                self.stats.downtime.harvest_ms = ms(took);
                self.start_round(now, pages, took, true);
                self.act(Action::Save);
            }
            (Input::Saved { state, took }, Phase::LastRound) => {
                self.stats.downtime.save_ms = ms(took);
                self.stats.state_bytes = state.len() as u64;
                self.stats.sent_bytes += state.len() as u64;
                self.state = Some(state);
                self.send_final(now);
            }
            (Input::Digest(digest), Phase::LastRound) => {
                self.digest = Some(digest);
                self.send_final(now);
            }
            (Input::Hashed(hash), Phase::Verifying) => {
                self.our_hash = Some(hash);
                self.compare_hashes(now);
            }
            _ => {}
        }
    }

    fn start_round(&mut self, now: Duration, pages: u64, harvest: Duration, paused: bool) {
        let dirtied_in = now.saturating_sub(self.last_harvest).as_secs_f64();
        let first = self.rounds.round() == 0;
        let rate = if first || paused || dirtied_in <= 0.0 { 0.0 } else { pages as f64 / dirtied_in };
        let round = self.rounds.start(now, pages, harvest, rate, paused);
        self.enter(now, if paused { Phase::LastRound } else { Phase::Sending });
        self.act(Action::Report(Report::RoundStarted { round, pages, paused }));
        self.act(Action::SendRound { round, rearm: !paused });
    }

    fn finish_round(&mut self, now: Duration) {
        let Some(round) = self.rounds.finish(now) else { return };
        let content = (round.pages.saturating_sub(round.zero_pages))
            * vmferry_memory::PAGE_SIZE as u64;
        self.predictor
            .measured_round(content, Duration::from_secs_f64(round.ms / 1e3));
        self.stats.sent_bytes += round.bytes;
        self.stats.rounds.push(round.clone());
        self.act(Action::Report(Report::RoundDone(round)));
        if self.phase == Phase::Sending {
            self.enter(now, Phase::Harvesting);
            self.act(Action::Harvest);
        }
    }

    fn on_harvested(&mut self, now: Duration, pages: u64, took: Duration) {
        let harvest = Harvest {
            rounds: self.rounds.round(),
            elapsed: now.saturating_sub(self.log_started),
            pending_pages: pages,
            dirtied_in: now.saturating_sub(self.last_harvest),
        };
        match self.predictor.decide(harvest) {
            Decision::AnotherRound => {
                self.start_round(now, pages, took, false);
            }
            Decision::SwitchOver => {
                let predicted = ms(self.predictor.predict(pages));
                self.stats.predicted_downtime_ms = predicted;
                self.pause_ordered = Some(now);
                self.enter(now, Phase::Pausing);
                self.act(Action::Report(Report::Paused { predicted_downtime_ms: predicted }));
                self.act(Action::Pause);
            }
            Decision::GiveUp(why) => self.fail(now, MigrateError::NotConverging(why)),
        }
        self.last_harvest = now;
    }

    fn send_final(&mut self, now: Duration) {
        let (Some(digest), true) = (self.digest, self.state.is_some()) else { return };
        let Some(state) = self.state.take() else { return };
        self.act(Action::Send(ControlMessage::Final {
            lane_sequences: self.rounds.end_sequences(),
            digest,
            state,
        }));
        self.last_sent = now;
        self.stats.downtime.send_ms = ms(now.saturating_sub(self.rounds.started()));
        self.enter(now, Phase::AwaitReady);
    }

    fn on_ready(&mut self, now: Duration, placed: u64) {
        // READY is said after everything was placed; a lost Placed must not leave a round open.
        self.rounds.placed_everything();
        self.finish_round(now);
        self.stats.downtime.ready_ms = ms(now.saturating_sub(self.last_sent));
        let sent = self.digest.unwrap_or_default();
        self.stats.digest_match = Some(sent == placed);
        if sent != placed {
            return self.fail(now, MigrateError::DigestMismatch { sent, placed });
        }
        self.act(Action::Report(Report::Ready));
        if self.config.verify {
            self.verify_since = now;
            self.enter(now, Phase::Verifying);
            self.act(Action::Send(ControlMessage::Verify {}));
            self.act(Action::Hash);
        } else {
            self.commit(now);
        }
    }

    fn compare_hashes(&mut self, now: Duration) {
        let (Some(ours), Some(theirs)) = (self.our_hash, self.their_hash) else { return };
        self.stats.verify_ms = ms(now.saturating_sub(self.verify_since));
        self.stats.verify_match = Some(ours == theirs);
        if ours != theirs {
            let error = MigrateError::VerifyMismatch {
                source_pages: ours.pages,
                source_hash: ours.hash,
                destination_pages: theirs.pages,
                destination_hash: theirs.hash,
                log: self.log_name,
            };
            return self.fail(now, error);
        }
        self.commit(now);
    }

    fn commit(&mut self, now: Duration) {
        self.last_sent = now;
        self.enter(now, Phase::HandingOver);
        self.hand_over(now, SourceEvent::Ready);
    }

    fn on_commit_written(&mut self, now: Duration, result: Result<(), MigrateError>) {
        match result {
            Ok(()) => {
                self.act(Action::Report(Report::Committed));
                self.waiting_since = now;
                self.hand_over(now, SourceEvent::CommitWritten);
            }
            Err(error) => {
                self.failure = Some(error);
                self.hand_over(now, SourceEvent::CommitFailed);
            }
        }
    }

    fn on_word(&mut self, now: Duration, word: SessionWord, reason: Option<Reason>) {
        if word == SessionWord::Aborted && self.handover.is_committed() {
            let reason = reason.unwrap_or_else(|| {
                Reason::new(vmferry_wire::ReasonCode::Internal, "its journal says ABORTED")
            });
            self.failure = Some(MigrateError::EndedByPeer { peer: "destination", reason });
        }
        self.waiting_since = now;
        self.hand_over(now, SourceEvent::Word(word));
    }

    fn on_cancel(&mut self, now: Duration) {
        if self.handover == SourceState::Holding {
            self.fail(now, MigrateError::Cancelled { during: self.phase.name() });
        } else {
            self.act(Action::Report(Report::TooLateToCancel));
        }
    }

    fn fail(&mut self, now: Duration, error: MigrateError) {
        self.fail_by(now, SourceEvent::Failed, error);
    }

    fn fail_by(&mut self, now: Duration, event: SourceEvent, error: MigrateError) {
        if self.handover.is_final() {
            return;
        }
        let entering_doubt = self.handover == SourceState::Committed
            || matches!(self.handover, SourceState::Committing { .. });
        if entering_doubt {
            let reason = crate::error::chain(&error);
            self.act(Action::Report(Report::InDoubt { reason }));
        }
        if self.failure.is_none() {
            self.failure = Some(error);
        }
        self.hand_over(now, event);
    }

    fn hand_over(&mut self, now: Duration, event: SourceEvent) {
        let before = self.handover;
        let (next, effects) = before.step(event);
        self.handover = next;
        if next == SourceState::InDoubt {
            self.phase = Phase::Asking;
        }
        for effect in effects {
            match effect {
                SourceEffect::WriteCommit => self.act(Action::WriteCommit),
                SourceEffect::SendCommit => {
                    let session = self.config.session;
                    self.act(Action::Send(ControlMessage::Commit { session }));
                }
                SourceEffect::SendAbort => {
                    let reason = self.failure.as_ref().map_or_else(
                        || Reason::new(vmferry_wire::ReasonCode::Internal, "the source failed"),
                        MigrateError::reason_for_peer,
                    );
                    self.act(Action::Send(ControlMessage::Abort { reason }));
                }
                SourceEffect::Ask => {
                    let first = before != SourceState::InDoubt;
                    let delay = if first { Duration::ZERO } else { self.timeouts().ask };
                    self.waiting_since = now + delay;
                    self.act(Action::Ask { delay });
                }
                SourceEffect::WriteKept => {
                    let by_operator = self.by_operator;
                    self.act(Action::WriteOutcome { kept: true, by_operator });
                }
                SourceEffect::WriteGiven => {
                    let by_operator = self.by_operator;
                    self.act(Action::WriteOutcome { kept: false, by_operator });
                }
                SourceEffect::Resume => {
                    self.act(Action::Resume);
                    self.act(Action::Report(Report::Resumed));
                }
                SourceEffect::Release => self.act(Action::Release),
            }
        }
        if next.is_final() && !before.is_final() {
            self.close_stats(now);
            self.phase = Phase::Done;
        }
    }

    fn close_stats(&mut self, now: Duration) {
        let verify = self.stats.verify_ms;
        self.stats.total_ms = ms(now.saturating_sub(self.log_started)) - verify;
        if let Some(ordered) = self.pause_ordered {
            self.stats.downtime_ms = ms(now.saturating_sub(ordered)) - verify;
        }
        if self.handover == SourceState::Given {
            self.stats.downtime.commit_ms = ms(now.saturating_sub(self.last_sent));
        }
    }

    /// Whether a peer is expected to be heard on the control channel.
    fn listens(&self) -> bool {
        !matches!(self.handover, SourceState::InDoubt) && self.phase != Phase::Done
    }

    /// The bound of the present wait, what is awaited, and its length.
    fn deadline(&self) -> Option<(Duration, &'static str, Duration)> {
        let timeouts = self.timeouts();
        let (what, after) = match self.phase {
            Phase::Announced => ("the destination's answer to the announced guest", timeouts.accept),
            Phase::Joining => ("the data channels", timeouts.accept),
            Phase::Sending | Phase::LastRound => ("the destination to place frames", timeouts.stall),
            Phase::AwaitReady => ("READY", timeouts.ready),
            Phase::Verifying => ("the hash of the destination's memory", timeouts.verify),
            Phase::HandingOver => ("RUNNING", timeouts.running),
            Phase::Asking => ("the destination's word", timeouts.running),
            // Bounded by the VMM and the kernel, which the engine calls and awaits.
            Phase::Starting | Phase::Harvesting | Phase::Pausing | Phase::LastHarvest => return None,
            Phase::Done => return None,
        };
        Some((self.waiting_since + after, what, after))
    }

    fn watch_the_clock(&mut self, now: Duration) {
        if self.phase == Phase::Done {
            return;
        }
        if let Some((at, what, after)) = self.deadline()
            && now >= at
        {
            self.waiting_since = now;
            self.fail_by(now, SourceEvent::LinkLost, MigrateError::TimedOut { what, after });
            return;
        }
        if !self.listens() {
            return;
        }
        let silence = self.timeouts().silence;
        if now >= self.last_heard + silence {
            self.last_heard = now;
            let what = "any sign of life on the control channel";
            self.fail_by(now, SourceEvent::LinkLost, MigrateError::TimedOut { what, after: silence });
        } else if now >= self.next_ping {
            self.send_ping(now);
        }
    }

    fn send_ping(&mut self, now: Duration) {
        let nonce = self.ping.map_or(1, |(nonce, _)| nonce + 1);
        self.ping = Some((nonce, now));
        self.next_ping = now + PING_INTERVAL;
        self.act(Action::Send(ControlMessage::Ping { nonce }));
    }

    fn on_pong(&mut self, now: Duration, nonce: u64) {
        if let Some((sent, at)) = self.ping
            && sent == nonce
        {
            let round_trip = now.saturating_sub(at);
            if nonce == 1 {
                self.stats.round_trip_ms = ms(round_trip);
                self.predictor.measured_round_trip(round_trip);
                self.act(Action::Report(Report::Connected { round_trip_ms: ms(round_trip) }));
            }
        }
    }
}

/// How often a silent peer is asked for a sign of life.
const PING_INTERVAL: Duration = Duration::from_secs(1);

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
