//! The source's machine: timeouts and pings.

use std::time::Duration;

use vmferry_wire::ControlMessage;

use super::io::{Action, Report};
use super::{Phase, Source, ms};
use crate::error::MigrateError;
use vmferry_handover::{SourceEvent, SourceState};

/// Interval of pings to a silent peer.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(1);

/// Consecutive pings once the channels are open. The first one wakes threads and fills caches; the
/// shortest round trip is the link's.
const PINGS_AT_START: u64 = 4;

impl Source {
    /// Whether messages are expected on the control channel.
    pub(super) fn listens(&self) -> bool {
        !matches!(self.handover, SourceState::InDoubt { .. })
            && self.phase != Phase::Done
            && self.links.is_control_up()
    }

    /// The deadline of the present wait, what is awaited, and the length of the wait.
    pub(super) fn deadline(&self) -> Option<(Duration, &'static str, Duration)> {
        let timeouts = self.timeouts();
        let (what, after) = match self.phase {
            Phase::Announced => {
                ("the destination's answer to the announced guest", timeouts.accept)
            }
            Phase::Joining => ("the data channels", timeouts.accept),
            // Lost channels have a timeout of their own.
            Phase::Sending | Phase::LastRound if !self.links.are_up() => return None,
            Phase::Sending | Phase::LastRound => {
                ("the destination to place frames", timeouts.stall)
            }
            Phase::AwaitReady if self.comparison.awaits_verified() => {
                ("the hash of the destination's memory", timeouts.verify)
            }
            Phase::AwaitReady => ("READY", timeouts.ready),
            Phase::Verifying if self.comparison.awaits_verified() => {
                ("the hash of the destination's memory", timeouts.verify)
            }
            Phase::Verifying => ("the hash of this host's memory", timeouts.verify),
            Phase::HandingOver => ("RUNNING", timeouts.running),
            Phase::Asking => ("the destination's word", timeouts.running),
            // Bounded by the VMM and the kernel, which the engine calls and waits for.
            Phase::Harvesting | Phase::Pausing | Phase::LastHarvest => return None,
            Phase::Done => return None,
        };
        Some((self.waiting_since + after, what, after))
    }

    /// When the pause of the guest before COMMIT becomes too long. The requested comparison of both
    /// memories does not count. There is no deadline for a guest that another client has paused.
    pub(super) fn pause_deadline(&self) -> Option<Duration> {
        let bound = self.config.downtime_abort()?;
        let counts = self.handover == SourceState::Holding
            && self.phase != Phase::Verifying
            && !self.comparison.awaits_verified()
            && !self.guest_is_paused;
        let verify = Duration::from_secs_f64(self.stats.verify_ms / 1e3);
        self.stopped_at.filter(|_| counts).map(|stopped_at| stopped_at + bound + verify)
    }

    /// This side did not read messages for this long, so messages may be unread and the peer was
    /// not silent.
    pub(super) fn on_away(&mut self, now: Duration, took: Duration) {
        self.last_heard = now.min(self.last_heard + took);
        self.waiting_since = now.max(self.waiting_since).min(self.waiting_since + took);
        self.links.were_unheard(now, took);
    }

    /// Frames are arriving, however slowly.
    pub(super) fn on_flow(&mut self, now: Duration) {
        if matches!(self.phase, Phase::Sending | Phase::LastRound | Phase::AwaitReady) {
            self.waiting_since = now;
        }
    }

    pub(super) fn watch_the_clock(&mut self, now: Duration) {
        if self.phase == Phase::Done {
            return;
        }
        if self.pause_deadline().is_some_and(|at| now >= at)
            && let (Some(stopped_at), Some(bound)) = (self.stopped_at, self.config.downtime_abort())
        {
            let (during, paused) = (self.phase.name(), now.saturating_sub(stopped_at));
            return self.fail(now, MigrateError::PauseTooLong { during, paused, bound });
        }
        if let Some((at, what, after)) = self.deadline()
            && now >= at
        {
            self.waiting_since = now;
            self.fail_by(now, SourceEvent::LinkLost, MigrateError::TimedOut { what, after });
            return;
        }
        if self.rests_until().is_some_and(|until| now >= until) {
            self.go_on(now);
        }
        if let Some(error) = self.links.take_overdue(now, self.patience()) {
            self.fail_by(now, SourceEvent::LinkLost, error);
            return;
        }
        if !self.listens() {
            return;
        }
        let silence = self.timeouts().silence;
        if now >= self.last_heard + silence {
            self.last_heard = now;
            let what = "any sign of life on the control channel";
            self.on_control_lost(now, MigrateError::TimedOut { what, after: silence });
        } else if now >= self.next_ping {
            self.send_ping(now);
        }
    }

    pub(super) fn send_ping(&mut self, now: Duration) {
        self.pings += 1;
        let nonce = self.pings;
        self.ping = Some((nonce, now));
        self.next_ping = now + PING_INTERVAL;
        self.act(Action::Send(ControlMessage::Ping { nonce }));
    }

    pub(super) fn on_pong(&mut self, now: Duration, nonce: u64) {
        if self.withdrawn.take_if(|ping| nonce >= *ping).is_some() {
            self.go_on(now);
        }
        // Each ping gives one measurement, however often its answer is repeated.
        let Some((_, at)) = self.ping.take_if(|(sent, _)| *sent == nonce) else { return };
        let round_trip = now.saturating_sub(at);
        let best = self.round_trip.map_or(round_trip, |known| known.min(round_trip));
        if self.round_trip != Some(best) {
            self.act(Action::FitWindows { round_trip: best });
        }
        self.round_trip = Some(best);
        self.stats.round_trip_ms = ms(best);
        self.predictor.measured_round_trip(best);
        if nonce < PINGS_AT_START {
            self.send_ping(now);
        } else if nonce == PINGS_AT_START {
            let (protocol, destination) = (self.protocol(), self.stats.destination.clone());
            let round_trip_ms = ms(best);
            let connected = Report::Connected { round_trip_ms, protocol, destination };
            self.act(Action::Report(connected));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::awaiting_ready;
    use super::*;
    use crate::config::SourceConfig;
    use crate::config::WhenStuck;
    use crate::machine::source::io::{Ending, Input};

    const SECOND: Duration = Duration::from_secs(1);

    fn bounded(verify: bool) -> Source {
        let mut config = SourceConfig::new("unused".into());
        (config.downtime_abort, config.verify) = (Some(SECOND * 3), verify);
        awaiting_ready(config, true)
    }

    #[test]
    fn pause_that_is_too_long_is_given_up_before_commit() {
        let mut source = bounded(false);
        assert!(source.next_tick().is_some_and(|tick| tick <= SECOND * 3));
        source.handle(SECOND * 3 - Duration::from_millis(1), Input::Tick);
        assert_eq!(source.handover(), SourceState::Holding);
        source.handle(SECOND * 3, Input::Tick);
        let Some(Ending::Kept(error)) = source.ending() else { panic!("{source:?}") };
        assert!(matches!(error, MigrateError::PauseTooLong { bound, .. } if bound == SECOND * 3));
        assert_eq!(source.stats.downtime_ms, 3000.0);
    }

    #[test]
    fn comparison_that_was_asked_for_does_not_count_as_pause() {
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
    fn time_that_this_side_was_away_is_nobodys_silence() {
        let silence = SourceConfig::new("unused".into()).timeouts.silence;
        let later = silence * 3;
        let mut source = awaiting_ready(SourceConfig::new("unused".into()), false);
        source.handle(later, Input::Away { took: later });
        assert!(source.listens());
        source.handle(later + silence, Input::Tick);
        assert!(!source.listens(), "it is silent now");
    }

    #[test]
    fn acknowledgement_without_news_is_a_sign_that_frames_arrive() {
        let mut config = SourceConfig::new("unused".into());
        config.timeouts.ready = SECOND * 5;
        let mut source = awaiting_ready(config, false);
        let placed = || Input::Control(ControlMessage::Placed { lane: 0, sequence: 1 });
        for second in [4, 8] {
            source.handle(SECOND * second, placed());
        }
        assert_eq!(source.phase, Phase::AwaitReady);
        source.handle(SECOND * 13, Input::Tick);
        assert_eq!(source.handover(), SourceState::Kept);
    }

    #[test]
    fn acknowledgements_without_news_do_not_keep_the_guest_waiting_for_ever() {
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
    fn a_second_verified_makes_the_pause_no_longer() {
        let mut source = bounded(true);
        let verified =
            |elapsed_us| Input::Control(ControlMessage::Verified { hash: 1, pages: 1, elapsed_us });
        source.handle(SECOND, verified(1_000_000));
        let deadline = source.pause_deadline();
        source.handle(SECOND * 2, verified(2_000_000));
        assert_eq!(source.pause_deadline(), deadline);
    }

    #[test]
    fn pause_of_a_guest_that_was_paused_already_has_no_bound() {
        let mut source = bounded(false);
        source.guest_is_paused = true;
        source.handle(SECOND * 4, Input::Tick);
        assert_eq!(source.handover(), SourceState::Holding);
    }
}
