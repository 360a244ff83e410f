//! The source's machine for carried guests: the VMM decides when a pass over memory ends and when
//! the guest is stopped, and the machine enforces the user's limits.

use std::time::Duration;

use super::io::{Action, Report};
use super::{Phase, Source, ms};
use crate::error::MigrateError;
use crate::rounds::convergence::{Decision, Harvest};
use crate::rounds::tracker::{LaneTotals, RoundStart};

/// The beginning of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    pub(super) round: u32,
    pub(super) pages: u64,
    pub(super) dirty_pages_per_s: f64,
}

impl Source {
    pub(super) fn on_pass(&mut self, now: Duration, pass: Pass, totals: LaneTotals) {
        if pass.round <= self.rounds.round() {
            // The first round began with the streams.
            self.rounds.count(&totals);
            return;
        }
        let began = self.rounds.started();
        self.turn(now, pass, totals, false);
        let harvest = Harvest {
            rounds: self.rounds.round() - 1,
            elapsed: now.saturating_sub(self.log_started),
            pending_pages: pass.pages,
            dirtied_in: now.saturating_sub(began),
        };
        self.foretell(harvest);
        match self.predictor.decide(harvest) {
            Decision::AnotherRound => {}
            // If it fits, the VMM stops the guest itself.
            Decision::SwitchOver
                if self.predictor.predict(pass.pages) <= self.config.downtime_limit => {}
            Decision::SwitchOver => self.act(Action::SwitchOver),
            Decision::GiveUp(why) => self.fail(now, MigrateError::NotConverging(why)),
        }
    }

    /// The VMM has stopped the guest, and waits.
    pub(super) fn on_stopped(
        &mut self,
        now: Duration,
        stood_still: Duration,
        expected: Duration,
        totals: LaneTotals,
    ) {
        self.stopped_at = Some(now.saturating_sub(stood_still));
        self.stats.downtime.pause_ms = ms(stood_still);
        self.stats.predicted_downtime_ms = ms(expected);
        self.act(Action::Report(Report::Paused { predicted_downtime_ms: ms(expected) }));
        let round = self.rounds.round() + 1;
        self.turn(now, Pass { round, pages: 0, dirty_pages_per_s: 0.0 }, totals, true);
        self.enter(now, Phase::LastRound);
        if self.links.are_up() {
            self.act(Action::Save);
        } else {
            let error = MigrateError::LinkLost {
                channel: "data".into(),
                during: self.phase.name(),
                detail: "it was away when the guest was stopped".into(),
            };
            self.fail(now, error);
        }
    }

    fn turn(&mut self, now: Duration, pass: Pass, totals: LaneTotals, paused: bool) {
        let ended = self.rounds.turn(
            totals,
            RoundStart {
                now,
                pages: pass.pages,
                dirty_pages_per_s: pass.dirty_pages_per_s,
                paused,
                ..RoundStart::default()
            },
        );
        self.count_round(ended);
        let round = self.rounds.round();
        self.act(Action::Report(Report::RoundStarted { round, pages: pass.pages, paused }));
    }
}
