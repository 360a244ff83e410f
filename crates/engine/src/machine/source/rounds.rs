//! The source's machine during pre-copy: rounds and harvests, until the rest fits the downtime
//! limit.

use std::time::Duration;

use super::common::{Common, ms};
use super::io::{Action, Report};
use super::phase::{Found, Harvesting, Pausing, Phase, Sending, Withdrawal};
use crate::error::MigrateError;
use crate::rounds::convergence::{Decision, Harvest};
use crate::rounds::tracker::RoundStart;
use crate::stats::RoundStats;

impl Phase {
    /// The destination acknowledges a lane's frames.
    pub(super) fn on_placed(
        self,
        common: &mut Common,
        now: Duration,
        lane: u8,
        sequence: u64,
    ) -> Self {
        if common.rounds.placed(lane, sequence) {
            common.wait.on_news(now);
        }
        if common.wait.is_extended(now, common.timeouts().stall) {
            self.on_flow(common, now);
        }
        self.finish_round(common, now)
    }

    /// Frames are arriving, however slowly.
    pub(super) fn on_flow(&self, common: &mut Common, now: Duration) {
        if matches!(self, Self::Sending(_) | Self::LastRound(_) | Self::AwaitReady(_)) {
            common.wait.since = now;
        }
    }

    /// Completes the round if it is placed, and continues.
    pub(super) fn finish_round(self, common: &mut Common, now: Duration) -> Self {
        if let Some((lane, placed, end)) = common.rounds.placed_unsent() {
            // Rounds would end without being placed, and never become shorter.
            let reason = format!("PLACED names frame {placed} of lane {lane}, which ends at {end}");
            return self.fail(common, now, MigrateError::protocol("control", 0, reason));
        }
        let Some(round) = common.rounds.finish(now) else { return self };
        common.count_round(round);
        self.go_on(common, now)
    }

    /// Begins the next round if the previous one is placed and the destination expects another one.
    pub(super) fn go_on(self, common: &mut Common, now: Duration) -> Self {
        match self {
            Self::Sending(sending) => sending.go_on(common, now),
            other => other,
        }
    }
}

impl Sending {
    pub(super) fn go_on(self, common: &mut Common, now: Duration) -> Phase {
        let ours = !common.our_side.streams && self.withdrawal.is_none();
        let rests = common.rests_until().is_some_and(|until| now < until);
        if common.rounds.is_open() || !ours || rests {
            return Phase::Sending(self);
        }
        common.begin_wait(now);
        common.act(Action::Harvest);
        Phase::Harvesting(Harvesting)
    }

    /// A ping was answered.
    pub(super) fn on_pong(self, common: &mut Common, now: Duration, nonce: u64) -> Phase {
        match self.withdrawal {
            Some(Withdrawal::SentBefore(ping)) if nonce >= ping => {
                Self { withdrawal: None }.go_on(common, now)
            }
            _ => Phase::Sending(self),
        }
    }
}

impl Harvesting {
    pub(super) fn on_harvested(self, common: &mut Common, now: Duration, found: Found) -> Phase {
        common.pace.predictor.waited_for_devices(found.stood_still);
        let harvest = Harvest {
            rounds: common.rounds.round(),
            elapsed: now.saturating_sub(common.pace.log_started),
            pending_pages: found.pages,
            dirtied_in: now.saturating_sub(common.pace.last_harvest),
        };
        common.foretell(harvest);
        let decision = if common.links.are_up() {
            common.decide(harvest)
        } else {
            // The guest is not paused while the link is down.
            Decision::AnotherRound
        };
        let next = match decision {
            decision if common.is_post_copy_due(&decision, harvest) => {
                self.begin_post_copy(common, now, found)
            }
            // Without a destination that supports it, the migration has ended before.
            Decision::AnotherRound | Decision::PostCopy => {
                if let Some(percent) = common.pace.throttle.next(found.pages) {
                    common.throttle(percent);
                }
                common.start_running_round(now, found)
            }
            Decision::SwitchOver => common.pause_guest(now, found.pages),
            Decision::GiveUp(why) => {
                Phase::Harvesting(self).fail(common, now, MigrateError::NotConverging(why))
            }
        };
        common.pace.last_harvest = now;
        next
    }
}

impl Common {
    /// Starts a round with the guest running.
    pub(super) fn start_running_round(&mut self, now: Duration, found: Found) -> Phase {
        let dirtied_in = now.saturating_sub(self.pace.last_harvest).as_secs_f64();
        let first = self.rounds.round() == 0;
        let rate = if first || dirtied_in <= 0.0 { 0.0 } else { found.pages as f64 / dirtied_in };
        self.start_round(RoundStart {
            now,
            pages: found.pages,
            harvest: found.took,
            stood_still: found.stood_still,
            dirty_pages_per_s: rate,
            throttle_percent: self.pace.throttle.percent(),
            paused: false,
        });
        Phase::Sending(Sending::default())
    }

    /// Lets the lanes send a round.
    pub(super) fn start_round(&mut self, start: RoundStart) {
        let RoundStart { now, pages, paused, .. } = start;
        self.stats.harvest_pauses_ms += ms(start.stood_still);
        let round = self.rounds.start(start);
        self.begin_wait(now);
        self.report(Report::RoundStarted { round, pages, paused });
        self.act(Action::SendRound { round, rearm: !paused });
    }

    /// Records a completed round.
    pub(super) fn count_round(&mut self, round: RoundStats) {
        if !round.interrupted {
            self.pace.predictor.measured_round(
                round.encoded.content(),
                round.bytes,
                Duration::from_secs_f64(round.ms / 1e3),
            );
        }
        self.stats.sent_bytes += round.bytes;
        self.stats.encoded.add(&round.encoded);
        self.stats.free_pages += round.free_pages;
        self.stats.rounds.push(round.clone());
        let wire_bytes: u64 = self.stats.rounds.iter().map(|round| round.bytes).sum();
        let page_bytes = self.stats.encoded.content() as f64 * vmferry_memory::PAGE_SIZE as f64;
        self.stats.compression_ratio = page_bytes / wire_bytes as f64;
        self.report(Report::RoundDone(round));
    }

    /// Reports the forecast after a harvest.
    pub(super) fn foretell(&mut self, harvest: Harvest) {
        let forecast = self.pace.predictor.forecast(harvest, self.pace.throttle.has_more());
        self.report(Report::Forecast(forecast));
    }

    /// Throttles the vCPUs.
    pub(super) fn throttle(&mut self, percent: u8) {
        self.pace.predictor.throttled(percent);
        self.act(Action::Throttle { percent });
        self.report(Report::Throttled { percent });
    }

    /// Begins the switchover, with this number of pages to send before FINAL.
    pub(super) fn pause_guest(&mut self, now: Duration, pages: u64) -> Phase {
        let predicted = ms(self.pace.predictor.predict(pages));
        self.stats.predicted_downtime_ms = predicted;
        self.begin_wait(now);
        self.report(Report::Paused { predicted_downtime_ms: predicted });
        self.act(Action::Pause);
        Phase::Pausing(Pausing)
    }
}
