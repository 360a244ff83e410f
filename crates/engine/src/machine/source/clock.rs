//! The source's machine: timeouts and pings.

use std::time::Duration;

use vmferry_wire::ControlMessage;

use super::common::{Common, ms};
use super::io::{Action, Report};
use super::phase::Phase;
use super::pings::FirstPings;
use crate::error::MigrateError;
use vmferry_handover::{SourceEvent, SourceState};

/// The end of a wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    at: Duration,
    /// What is awaited.
    what: &'static str,
    /// The length of the wait.
    after: Duration,
}

impl Phase {
    /// When the clock must be looked at if nothing happens before.
    pub(super) fn next_tick(&self, common: &Common) -> Option<Duration> {
        if self.is_done() {
            return None;
        }
        let deadline = self.deadline(common).map(|deadline| deadline.at);
        let listens = self.listens(common);
        let silence = listens.then(|| common.pings.heard + common.timeouts().silence);
        let ping = listens.then_some(common.pings.next);
        let loss = common.links.deadline(self.patience(common));
        let witness = common.witness_poll.next();
        [deadline, silence, ping, loss, witness, common.rests_until(), self.pause_deadline(common)]
            .into_iter()
            .flatten()
            .min()
    }

    /// Whether messages are expected on the control channel.
    pub(super) fn listens(&self, common: &Common) -> bool {
        let is_asking = match self {
            // Nothing that a destination could say matters after ENDED.
            Self::Serving(serving) => !serving.is_heard || common.handover == SourceState::Ended,
            _ => matches!(common.handover, SourceState::InDoubt { .. }),
        };
        !is_asking && !self.is_done() && common.links.is_control_up()
    }

    /// The deadline of the present wait.
    fn deadline(&self, common: &Common) -> Option<Deadline> {
        let timeouts = common.timeouts();
        let (what, after) = match self {
            Self::Announced(_) => {
                ("the destination's answer to the announced guest", timeouts.accept)
            }
            Self::Joining(_) => ("the data channels", timeouts.accept),
            // Lost channels have a timeout of their own.
            Self::Sending(_) | Self::LastRound(_) if !common.links.are_up() => return None,
            Self::Sending(_) | Self::LastRound(_) => {
                ("the destination to place frames", timeouts.stall)
            }
            Self::AwaitReady(_) | Self::Verifying(_) if self.awaits_verified() => {
                ("the hash of the destination's memory", timeouts.verify)
            }
            Self::AwaitReady(_) => ("READY", timeouts.ready),
            Self::Verifying(_) => ("the hash of this host's memory", timeouts.verify),
            Self::HandingOver(_) => ("RUNNING", timeouts.running),
            Self::Asking(_) => ("the destination's word", timeouts.running),
            Self::Serving(serving)
                if !serving.is_heard && common.handover == SourceState::Serving =>
            {
                ("the destination's word", timeouts.running)
            }
            // However long the destination takes to fetch all pages, or the operator to decide.
            Self::Serving(_) => return None,
            // Bounded by the VMM and the kernel, which the engine calls and waits for.
            Self::OpeningFetch(_) if common.links.are_up() => {
                ("the destination to free outdated pages", timeouts.stall)
            }
            Self::Harvesting(_)
            | Self::OpeningFetch(_)
            | Self::Pausing(_)
            | Self::LastHarvest(_) => return None,
            Self::Done => return None,
        };
        Some(Deadline { at: common.wait.since + after, what, after })
    }

    /// When the pause of the guest before COMMIT becomes too long. The requested comparison of both
    /// memories does not count. There is no deadline for a guest that another client has paused.
    fn pause_deadline(&self, common: &Common) -> Option<Duration> {
        let bound = common.config.downtime_abort()?;
        let counts = common.handover == SourceState::Holding
            && !matches!(self, Self::Verifying(_))
            && !self.awaits_verified()
            && !common.guest_is_paused;
        let verify = Duration::from_secs_f64(common.stats.verify_ms / 1e3);
        self.pause().filter(|_| counts).map(|pause| pause.since + bound + verify)
    }

    pub(super) fn watch_the_clock(self, common: &mut Common, now: Duration) -> Self {
        if self.is_done() {
            return self;
        }
        self.poll_witness(common, now);
        if self.pause_deadline(common).is_some_and(|at| now >= at)
            && let (Some(pause), Some(bound)) = (self.pause(), common.config.downtime_abort())
        {
            let (during, paused) = (self.name(), now.saturating_sub(pause.since));
            let error = MigrateError::PauseTooLong { during, paused, bound };
            return self.fail(common, now, error);
        }
        if let Some(Deadline { at, what, after }) = self.deadline(common)
            && now >= at
        {
            common.wait.since = now;
            let error = MigrateError::TimedOut { what, after };
            return self.fail_by(common, now, SourceEvent::LinkLost, error);
        }
        let phase = if common.rests_until().is_some_and(|until| now >= until) {
            self.go_on(common, now)
        } else {
            self
        };
        // A destination that fetches pages closes the data channels once it has placed everything.
        // Its acknowledgment comes on another channel, and may come later.
        if matches!(phase, Self::AwaitReady(_)) && !phase.may_reconnect(common) {
            let rounds = &common.rounds;
            common.links.excuse_lanes(|lane| rounds.is_lane_done(lane));
        }
        let patience = phase.patience(common);
        if let Some(error) = common.links.take_overdue(now, patience) {
            return phase.fail_by(common, now, SourceEvent::LinkLost, error);
        }
        if phase.listens(common) { phase.watch_for_silence(common, now) } else { phase }
    }

    fn watch_for_silence(self, common: &mut Common, now: Duration) -> Self {
        let silence = common.timeouts().silence;
        if now >= common.pings.heard + silence {
            common.pings.heard = now;
            let what = "any sign of life on the control channel";
            let error = MigrateError::TimedOut { what, after: silence };
            return self.on_control_lost(common, now, error);
        }
        if now >= common.pings.next {
            common.send_ping(now);
        }
        self
    }

    pub(super) fn on_pong(self, common: &mut Common, now: Duration, nonce: u64) -> Self {
        let phase = match self {
            Self::Sending(sending) => sending.on_pong(common, now, nonce),
            Self::OpeningFetch(opening) => opening.on_pong(common, now, nonce),
            other => other,
        };
        let is_sending = matches!(phase, Self::Sending(_));
        common.measure_round_trip(now, nonce, is_sending);
        phase
    }
}

impl Common {
    /// This side did not read messages for this long, so messages may be unread and the peer was
    /// not silent.
    pub(super) fn on_away(&mut self, now: Duration, took: Duration) {
        self.pings.heard = now.min(self.pings.heard + took);
        self.wait.was_unheard(now, took);
        self.links.were_unheard(now, took);
    }

    /// Returns the number of the ping.
    pub(super) fn send_ping(&mut self, now: Duration) -> u64 {
        let nonce = self.pings.begin(now);
        self.act(Action::Send(ControlMessage::Ping { nonce }));
        nonce
    }

    /// The connection is reported with the shortest round trip of the first pings. If a round has
    /// ended before all are answered, it is reported with the next answer: that one comes before
    /// READY, because both are sent on the same channel.
    fn measure_round_trip(&mut self, now: Duration, nonce: u64, is_sending: bool) {
        let Some(round_trip) = self.pings.answered(now, nonce) else { return };
        let best = self.pings.round_trip.map_or(round_trip, |known| known.min(round_trip));
        if self.pings.round_trip != Some(best) {
            self.act(Action::FitWindows { round_trip: best });
        }
        self.pings.round_trip = Some(best);
        self.stats.round_trip_ms = ms(best);
        self.pace.predictor.measured_round_trip(best);
        match self.pings.first {
            FirstPings::Awaited(awaited) if awaited > 1 && is_sending => {
                self.pings.first = FirstPings::Awaited(awaited - 1);
                self.send_ping(now);
            }
            FirstPings::Awaited(_) => {
                self.pings.first = FirstPings::Reported;
                let destination = self.stats.destination.clone();
                let (protocol, round_trip_ms) = (self.our_side.protocol, ms(best));
                self.report(Report::Connected { round_trip_ms, protocol, destination });
            }
            FirstPings::NotSent | FirstPings::Reported => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::super::fixture::{
        accepted, announced, assert_phase, awaiting_ready, log_started, placed, sent,
    };
    use super::*;
    use crate::config::SourceConfig;
    use crate::config::WhenStuck;
    use crate::machine::source::Source;
    use crate::machine::source::io::{Ending, Input};

    const SECOND: Duration = Duration::from_secs(1);

    fn bounded(verify: bool) -> Source {
        let mut config = SourceConfig::new("unused".into());
        (config.downtime_abort, config.verify) = (Some(SECOND * 3), verify);
        awaiting_ready(config, true)
    }

    #[test]
    fn pause_beyond_its_bound_ends_the_migration_before_commit() {
        let mut source = bounded(false);
        assert!(source.next_tick().is_some_and(|tick| tick <= SECOND * 3));
        source.handle(SECOND * 3 - Duration::from_millis(1), Input::Tick);
        assert_eq!(source.handover(), SourceState::Holding);
        source.handle(SECOND * 3, Input::Tick);
        let Some(Ending::Kept(error)) = source.ending() else { panic!("{source:?}") };
        assert!(matches!(error, MigrateError::PauseTooLong { bound, .. } if bound == SECOND * 3));
        assert_eq!(source.common.stats.downtime_ms, 3000.0);
    }

    #[test]
    fn pause_bound_excludes_the_requested_comparison() {
        let mut source = bounded(true);
        let verified = ControlMessage::Verified { hash: 1, pages: 1, elapsed_us: 60_000_000 };
        // Answers to pings, as the source would receive them.
        for second in 1..=61 {
            source.handle(SECOND * second, Input::Control(ControlMessage::Pong { nonce: 0 }));
        }
        source.handle(SECOND * 61, Input::Control(verified));
        assert_eq!(source.handover(), SourceState::Holding);
        source.handle(SECOND * 63, Input::Tick);
        assert_eq!(source.handover(), SourceState::Kept, "60 s of 63 do not count");
    }

    /// Time spent in a call of the own VMM or in a write does not count as silence of the peer.
    #[test]
    fn silence_excludes_time_that_this_side_was_away() {
        let silence = SourceConfig::new("unused".into()).timeouts.silence;
        let later = silence * 3;
        let mut source = awaiting_ready(SourceConfig::new("unused".into()), false);
        source.handle(later, Input::Away { took: later });
        assert!(source.phase.listens(&source.common));
        source.handle(later + silence, Input::Tick);
        assert!(!source.phase.listens(&source.common), "it is silent now");
    }

    /// A source whose pings are answered a round trip after they were sent, but not before the
    /// destination has accepted the guest.
    struct Conversation {
        source: Source,
        now: Duration,
        accepts_at: Duration,
        round_trip: Duration,
        answers: VecDeque<(Duration, u64)>,
        /// The reports so far, without their contents.
        reports: Vec<&'static str>,
    }

    impl Conversation {
        fn new(accepts_at: Duration, round_trip: Duration) -> Self {
            let source = announced(SourceConfig::new("unused".into()));
            let (now, answers, reports) = (Duration::ZERO, VecDeque::new(), Vec::new());
            Self { source, now, accepts_at, round_trip, answers, reports }
        }

        fn tell(&mut self, input: Input) {
            self.source.handle(self.now, input);
            while let Some(action) = self.source.next_action() {
                match action {
                    Action::Send(ControlMessage::Ping { nonce }) => {
                        let at = (self.now + self.round_trip).max(self.accepts_at);
                        self.answers.push_back((at, nonce));
                    }
                    Action::Report(Report::Connected { .. }) => self.reports.push("connected"),
                    Action::Report(Report::RoundStarted { .. }) => self.reports.push("round"),
                    Action::Report(Report::Ready) => self.reports.push("ready"),
                    _ => {}
                }
            }
        }

        fn pass(&mut self, time: Duration) {
            let until = self.now + time;
            while self.now < until {
                self.now += Duration::from_millis(10);
                self.tell(Input::Tick);
                while self.answers.front().is_some_and(|(at, _)| *at <= self.now) {
                    let nonce = self.answers.pop_front().unwrap().1;
                    self.tell(Input::Control(ControlMessage::Pong { nonce }));
                }
            }
        }
    }

    /// On a slow link or a busy host more pings are due before the first one is answered.
    #[test]
    fn connection_is_reported_once_however_slow_pings_are_answered() {
        let (instantly, slowly) = (Duration::from_millis(10), SECOND * 5 / 2);
        for round_trip in [instantly, slowly] {
            for (starts_log, accepts) in [(0, 0), (6, 0), (0, 6), (6, 6)] {
                let accepts_at = SECOND * accepts;
                let mut conversation = Conversation::new(accepts_at, round_trip);
                for second in 0..30 {
                    if second == starts_log {
                        conversation.tell(log_started());
                    }
                    if second == accepts {
                        conversation.tell(accepted(false));
                    }
                    if second == starts_log.max(accepts) {
                        assert!(conversation.reports.is_empty(), "the channels are not open");
                        conversation.tell(Input::LanesJoined);
                    }
                    conversation.pass(SECOND);
                }
                let case = (round_trip, starts_log, accepts);
                assert_eq!(conversation.reports, ["round", "connected"], "{case:?}");
            }
        }
    }

    #[test]
    fn connection_is_reported_before_ready_if_the_rounds_are_over_at_once() {
        let mut conversation = Conversation::new(Duration::ZERO, SECOND);
        for input in [log_started(), accepted(false), Input::LanesJoined, sent(1), placed(1)] {
            conversation.tell(input);
        }
        conversation.pass(SECOND);
        assert_eq!(conversation.reports, ["round", "connected"], "the first ping is answered");
        conversation.pass(SECOND * 5);
        assert_eq!(conversation.reports, ["round", "connected"]);
    }

    #[test]
    fn acknowledgement_without_news_extends_the_wait() {
        let mut config = SourceConfig::new("unused".into());
        config.timeouts.ready = SECOND * 5;
        let mut source = awaiting_ready(config, false);
        let placed = || Input::Control(ControlMessage::Placed { lane: 0, sequence: 1 });
        for second in [4, 8] {
            source.handle(SECOND * second, placed());
        }
        assert_phase!(source, AwaitReady);
        source.handle(SECOND * 13, Input::Tick);
        assert_eq!(source.handover(), SourceState::Kept);
    }

    #[test]
    fn acknowledgements_without_news_extend_the_wait_only_for_some_stalls() {
        let mut config = SourceConfig::new("unused".into());
        config.downtime_abort = None;
        config.when_stuck = WhenStuck::SwitchOver;
        config.timeouts.ready = SECOND * 5;
        config.timeouts.stall = SECOND;
        let mut source = awaiting_ready(config, false);
        let placed = || Input::Control(ControlMessage::Placed { lane: 0, sequence: 1 });
        let kept = (1..=30).find(|second| {
            source.handle(SECOND * *second, placed());
            source.handover() == SourceState::Kept
        });
        assert_eq!(kept, Some(14), "the last one that counts comes after 9 s");
    }

    #[test]
    fn second_verified_does_not_extend_the_pause_bound() {
        let mut source = bounded(true);
        let verified =
            |elapsed_us| Input::Control(ControlMessage::Verified { hash: 1, pages: 1, elapsed_us });
        source.handle(SECOND, verified(1_000_000));
        let deadline = source.phase.pause_deadline(&source.common);
        source.handle(SECOND * 2, verified(2_000_000));
        assert_eq!(source.phase.pause_deadline(&source.common), deadline);
    }

    #[test]
    fn pause_of_a_guest_paused_by_another_client_has_no_bound() {
        let mut source = bounded(false);
        source.common.guest_is_paused = true;
        source.handle(SECOND * 4, Input::Tick);
        assert_eq!(source.handover(), SourceState::Holding);
    }
}
