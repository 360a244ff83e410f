//! The source's machine: changed settings, and the hold before the switchover.
//!
//! A held migration does everything except the switchover. When the rest fits the downtime limit it
//! continues with one round per [`PERIOD`], so that the switchover stays as short whenever it is
//! allowed.

use std::time::Duration;

use super::change::Change;
use super::common::{Common, ms};
use super::io::{Action, Report};
use super::pace::Held;
use super::phase::Phase;
use crate::config::{BandwidthCap, ThrottleLimit};
use crate::rounds::convergence::{Decision, Harvest};

/// Interval of harvests while the migration is held: short enough that little is left to send, long
/// enough that a guest that writes little costs almost nothing.
const PERIOD: Duration = Duration::from_secs(1);

impl Phase {
    /// The user releases a held migration.
    pub(super) fn on_switch_over(self, common: &mut Common, now: Duration) -> Self {
        let elapsed = now.saturating_sub(common.pace.log_started);
        common.pace.hold.release(elapsed, common.rounds.round());
        self.go_on(common, now)
    }
}

impl Common {
    /// Decides what to do after a harvest, subject to the hold.
    pub(super) fn decide(&mut self, harvest: Harvest) -> Decision {
        let Harvest { elapsed, rounds, pending_pages, .. } = harvest;
        let hold = &mut self.pace.hold;
        let decision = self.pace.predictor.decide(hold.without(harvest));
        match decision {
            Decision::SwitchOver if hold.wanted => {
                if hold.held.is_none() {
                    hold.held = Some(Held { elapsed, rounds });
                    let predicted_downtime_ms = ms(self.pace.predictor.predict(pending_pages));
                    self.report(Report::Held { predicted_downtime_ms });
                }
                Decision::AnotherRound
            }
            // The limits were met before the hold began.
            Decision::GiveUp(_) if hold.held.is_some() => Decision::AnotherRound,
            other => other,
        }
    }

    /// The time of the next harvest of a held migration.
    pub(super) fn rests_until(&self) -> Option<Duration> {
        let rests = self.pace.hold.held.is_some() && !self.rounds.is_open();
        rests.then(|| self.pace.last_harvest + PERIOD)
    }

    pub(super) fn on_change(&mut self, change: Change) {
        if let Some(cap) = change.max_bandwidth {
            let cap = cap.map(BandwidthCap::get);
            self.pace.predictor.set_cap(cap);
            self.act(Action::Cap(cap));
        }
        if let Some(limit) = change.downtime_limit {
            self.config.downtime_limit = limit;
            if self.our_side.streams {
                self.act(Action::LimitDowntime(limit));
            }
        }
        self.config.max_rounds = change.max_rounds.unwrap_or(self.config.max_rounds);
        self.pace.predictor.set_limits(self.config.limits());
        if let Some(policy) = change.post_copy {
            self.change_post_copy(policy);
        }
        let set_most = |most: ThrottleLimit| self.pace.throttle.set_most(most.get());
        if let Some(percent) = change.throttle.and_then(set_most) {
            self.throttle(percent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{after_one_round, assert_phase, harvested, placed, sent};
    use super::*;
    use crate::config::{RoundLimit, SourceConfig};
    use crate::machine::source::Source;
    use crate::machine::source::io::Input;
    use crate::stats::forecast::Verdict;

    fn held(max_rounds: u32) -> Source {
        let mut config = SourceConfig::new("unused".into());
        (config.pause_before_switchover, config.max_rounds) =
            (true, RoundLimit::new(max_rounds).unwrap());
        after_one_round(config)
    }

    fn reports(source: &mut Source) -> Vec<Report> {
        let actions = std::iter::from_fn(|| source.next_action());
        let report = |action| if let Action::Report(report) = action { Some(report) } else { None };
        actions.filter_map(report).collect()
    }

    /// Lets the source send rounds of 1 page for these seconds.
    fn rounds_for(source: &mut Source, seconds: std::ops::Range<u64>) {
        for second in seconds {
            let now = Duration::from_secs(second);
            source.handle(now, harvested(1));
            source.handle(now, sent(second + 2));
            source.handle(now, placed(second + 2));
            assert_phase!(source, Sending, "it rests");
            let next = now + PERIOD;
            assert_eq!(source.common.rests_until(), Some(next));
            assert!(source.next_tick().is_some_and(|tick| tick <= next));
            source.handle(next - Duration::from_millis(1), Input::Tick);
            assert_phase!(source, Sending, "it still rests");
            source.handle(next, Input::Tick);
            assert_phase!(source, Harvesting);
        }
    }

    #[test]
    fn hold_sends_rounds_until_it_is_released() {
        let mut source = held(2);
        // Far more than the round limit.
        rounds_for(&mut source, 0..8);
        let told = reports(&mut source);
        let helds = told.iter().filter(|report| matches!(report, Report::Held { .. })).count();
        assert_eq!(helds, 1, "reported once");
        assert!(!told.iter().any(|report| matches!(report, Report::Paused { .. })));
        source.handle(Duration::from_secs(8), Input::SwitchOver);
        source.handle(Duration::from_secs(8), harvested(1));
        assert_phase!(source, Pausing);
    }

    #[test]
    fn release_ends_the_rest_between_rounds() {
        let mut source = held(2);
        for input in [harvested(1), sent(2), placed(2)] {
            source.handle(Duration::ZERO, input);
        }
        assert!(source.common.rests_until().is_some());
        source.handle(Duration::ZERO, Input::SwitchOver);
        assert_phase!(source, Harvesting);
    }

    #[test]
    fn hold_that_is_released_before_it_is_reached_does_not_hold() {
        let mut source = held(2);
        source.handle(Duration::ZERO, Input::SwitchOver);
        source.handle(Duration::ZERO, harvested(1));
        assert_phase!(source, Pausing);
    }

    /// Rounds during the hold do not count.
    #[test]
    fn limits_count_from_the_release() {
        let mut source = held(3);
        rounds_for(&mut source, 0..8);
        source.handle(Duration::from_secs(8), Input::SwitchOver);
        // More pages than fit the limit: a second and a third round are still allowed.
        for round in [10, 11] {
            source.handle(Duration::from_secs(9), harvested(1 << 20));
            assert_phase!(source, Sending);
            source.handle(Duration::from_secs(9), sent(round));
            source.handle(Duration::from_secs(9), placed(round));
        }
        source.handle(Duration::from_secs(9), harvested(1 << 20));
        assert_phase!(source, Done);
    }

    #[test]
    fn changed_limits_apply_to_the_next_harvest() {
        let mut config = SourceConfig::new("unused".into());
        config.downtime_limit = Duration::from_millis(20);
        let mut source = after_one_round(config);
        let huge = || harvested(1 << 16);
        source.handle(Duration::from_secs(1), huge());
        assert_phase!(source, Sending);
        source.handle(Duration::from_secs(2), sent(2));
        let change = Change { downtime_limit: Some(Duration::from_secs(60)), ..Change::default() };
        source.handle(Duration::from_secs(2), Input::Change(change));
        source.handle(Duration::from_secs(2), placed(2));
        source.handle(Duration::from_secs(2), huge());
        assert_phase!(source, Pausing);
        let forecasts: Vec<Verdict> = reports(&mut source)
            .into_iter()
            .filter_map(|report| match report {
                Report::Forecast(forecast) => Some(forecast.verdict),
                _ => None,
            })
            .collect();
        assert_eq!(forecasts.last(), Some(&Verdict::Fits));
        assert_ne!(forecasts[0], Verdict::Fits);
    }

    #[test]
    fn throttle_can_be_removed_while_running() {
        let mut config = SourceConfig::new("unused".into());
        (config.downtime_limit, config.throttle) =
            (Duration::from_millis(20), ThrottleLimit::new(99).unwrap());
        let mut source = after_one_round(config);
        for sequence in 2..6 {
            source.handle(Duration::ZERO, harvested(1 << 16));
            source.handle(Duration::ZERO, sent(sequence));
            source.handle(Duration::ZERO, placed(sequence));
        }
        assert!(source.common.pace.throttle.percent() > 0);
        let _ = reports(&mut source);
        let change = Change { throttle: Some(ThrottleLimit::new(0).unwrap()), ..Change::default() };
        source.handle(Duration::ZERO, Input::Change(change));
        assert_eq!(reports(&mut source), [Report::Throttled { percent: 0 }]);
        assert_eq!(source.common.pace.throttle.percent(), 0);
    }
}
