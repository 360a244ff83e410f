//! The source's machine for carried guests: the VMM decides when a pass over memory ends and when
//! the guest is stopped, and the machine enforces the user's limits.

use std::time::Duration;

use super::common::{Common, ms};
use super::io::{Action, Report};
use super::phase::{LastRound, Pause, Phase, Sending};
use super::post_copy::CarriedPostCopy;
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

impl Sending {
    pub(super) fn on_pass(
        self,
        common: &mut Common,
        now: Duration,
        pass: Pass,
        totals: LaneTotals,
    ) -> Phase {
        let phase = Phase::Sending(self);
        if pass.round <= common.rounds.round() {
            // The first round began with the streams.
            common.rounds.count(&totals);
            return phase;
        }
        let began = common.rounds.started();
        common.turn(
            totals,
            RoundStart {
                now,
                pages: pass.pages,
                dirty_pages_per_s: pass.dirty_pages_per_s,
                ..RoundStart::default()
            },
        );
        let harvest = Harvest {
            rounds: common.rounds.round() - 1,
            elapsed: now.saturating_sub(common.pace.log_started),
            pending_pages: pass.pages,
            dirtied_in: now.saturating_sub(began),
        };
        common.foretell(harvest);
        let decision = common.pace.predictor.decide(harvest);
        if common.is_post_copy_due(&decision, harvest) {
            return match phase {
                Phase::Sending(sending) => sending.begin_carried_post_copy(common),
                phase => phase,
            };
        }
        let predictor = &common.pace.predictor;
        match decision {
            // Without a destination that supports it, the migration has ended before.
            Decision::AnotherRound | Decision::PostCopy => phase,
            // If it fits, the VMM stops the guest itself.
            Decision::SwitchOver
                if predictor.predict(pass.pages) <= common.config.downtime_limit =>
            {
                phase
            }
            Decision::SwitchOver => {
                common.act(Action::SwitchOver);
                phase
            }
            Decision::GiveUp(why) => phase.fail(common, now, MigrateError::NotConverging(why)),
        }
    }

    /// The VMM has stopped the guest, and waits.
    pub(super) fn on_stopped(
        self,
        common: &mut Common,
        now: Duration,
        stood_still: Duration,
        expected: Duration,
        (pages, totals): (u64, LaneTotals),
    ) -> Phase {
        let pause = Pause::begin(common, now, stood_still);
        common.stats.predicted_downtime_ms = ms(expected);
        common.report(Report::Paused { predicted_downtime_ms: ms(expected) });
        common.turn(totals, RoundStart { now, paused: true, ..RoundStart::default() });
        common.begin_wait(now);
        let phase = Phase::LastRound(LastRound::new(pause, now));
        let is_post_copy = common.post_copy.carried == CarriedPostCopy::Begun;
        if !common.links.are_up() || is_post_copy && !common.post_copy.is_open() {
            let error = MigrateError::LinkLost {
                channel: "data".into(),
                during: phase.name(),
                detail: "it was away when the guest was stopped".into(),
            };
            return phase.fail(common, now, error);
        }
        if is_post_copy {
            pause.begin_carried_post_copy(common, pages);
        } else {
            common.act(Action::Save);
        }
        phase
    }
}

impl Common {
    /// Ends a round that the VMM has ended, and begins the next one.
    fn turn(&mut self, totals: LaneTotals, start: RoundStart) {
        let RoundStart { pages, paused, .. } = start;
        let ended = self.rounds.turn(totals, start);
        self.count_round(ended);
        let round = self.rounds.round();
        self.report(Report::RoundStarted { round, pages, paused });
    }
}
