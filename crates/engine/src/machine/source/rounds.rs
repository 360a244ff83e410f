//! The source's machine from the data channels to READY: rounds, the pause, and the comparison of
//! digests.

use std::time::Duration;

use vmferry_wire::ControlMessage;

use super::io::{Action, Input, Report};
use super::passes::Pass;
use super::{Phase, Source, ms};
use crate::error::MigrateError;
use crate::rounds::convergence::{Decision, Harvest};
use crate::rounds::tracker::RoundStart;
use crate::stats::RoundStats;

/// The first protocol version that can announce a guest that stays paused.
const PAUSED_SINCE: u16 = 2;

impl Source {
    pub(super) fn on_progress(&mut self, now: Duration, input: Input) {
        match (input, self.phase) {
            (Input::LogStarted { populated_pages, stood_still }, Phase::Announced) => {
                self.last_harvest = now;
                self.stood_still = stood_still;
                self.first_pages = Some((populated_pages, now.saturating_sub(self.log_started)));
                self.open_lanes(now);
            }
            (Input::LanesJoined, Phase::Joining) => {
                self.send_ping(now);
                let (pages, took) = self.first_pages.unwrap_or_default();
                self.start_round(now, pages, took, false);
            }
            (Input::LaneSent { lane, end_sequence, totals }, _) => {
                self.rounds.sent(lane, end_sequence, totals);
                if self.phase == Phase::LastRound && self.rounds.all_sent() {
                    self.act(Action::SumDigest);
                }
                self.finish_round(now);
            }
            (Input::Pass { round, pages, dirty_pages_per_s, totals }, Phase::Sending) => {
                let pass = Pass { round, pages, dirty_pages_per_s };
                self.on_pass(now, pass, totals);
            }
            (Input::Stopped { stood_still, expected, totals }, Phase::Sending) => {
                self.on_stopped(now, stood_still, expected, totals);
            }
            (Input::Harvested { pages, took, stood_still }, Phase::Harvesting) => {
                self.stood_still = stood_still;
                self.predictor.waited_for_devices(stood_still);
                self.on_harvested(now, pages, took);
            }
            (Input::Paused { stood_still }, Phase::Pausing) => {
                self.stopped_at = Some(now.saturating_sub(stood_still));
                self.stood_still = Duration::ZERO;
                self.stats.downtime.pause_ms = ms(stood_still);
                self.enter(now, Phase::LastHarvest);
                self.act(Action::HarvestLast);
            }
            (Input::LastHarvest { pages, took }, Phase::LastHarvest) => {
                self.stats.downtime.harvest_ms = ms(took);
                self.start_round(now, pages, took, true);
                if self.links.are_up() {
                    self.act(Action::Save);
                } else {
                    // The link was lost while the guest was being paused.
                    self.recall(now);
                }
            }
            (Input::Saved { paused: true, .. }, Phase::LastRound)
                if self.protocol() < PAUSED_SINCE =>
            {
                self.fail(now, MigrateError::PausedForOldPeer);
            }
            (Input::Saved { state, took, paused }, Phase::LastRound) => {
                self.guest_is_paused = paused;
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
            (Input::Hashed { attempt, hash }, Phase::AwaitReady | Phase::Verifying) => {
                self.on_hashed(now, attempt, hash);
            }
            _ => {}
        }
    }

    /// Continues once the destination has accepted the guest and the log is running.
    pub(super) fn open_lanes(&mut self, now: Duration) {
        if self.accepted && self.first_pages.is_some() {
            self.enter(now, Phase::Joining);
            self.act(Action::OpenLanes(self.links.token()));
        }
    }

    pub(super) fn start_round(
        &mut self,
        now: Duration,
        pages: u64,
        harvest: Duration,
        paused: bool,
    ) {
        let dirtied_in = now.saturating_sub(self.last_harvest).as_secs_f64();
        let first = self.rounds.round() == 0;
        let rate =
            if first || paused || dirtied_in <= 0.0 { 0.0 } else { pages as f64 / dirtied_in };
        let stood_still = std::mem::take(&mut self.stood_still);
        self.stats.harvest_pauses_ms += ms(stood_still);
        let round = self.rounds.start(RoundStart {
            now,
            pages,
            harvest,
            stood_still,
            dirty_pages_per_s: rate,
            throttle_percent: self.throttle.percent(),
            paused,
        });
        self.enter(now, if paused { Phase::LastRound } else { Phase::Sending });
        self.act(Action::Report(Report::RoundStarted { round, pages, paused }));
        self.act(Action::SendRound { round, rearm: !paused });
    }

    pub(super) fn finish_round(&mut self, now: Duration) {
        let Some(round) = self.rounds.finish(now) else { return };
        self.count_round(round);
        self.go_on(now);
    }

    /// Records a completed round.
    pub(super) fn count_round(&mut self, round: RoundStats) {
        if !round.interrupted {
            self.predictor.measured_round(
                round.encoded.content(),
                round.bytes,
                Duration::from_secs_f64(round.ms / 1e3),
            );
        }
        self.stats.sent_bytes += round.bytes;
        self.stats.encoded.add(&round.encoded);
        self.stats.free_pages += round.free_pages;
        self.wire_bytes += round.bytes;
        let page_bytes = self.stats.encoded.content() as f64 * vmferry_memory::PAGE_SIZE as f64;
        self.stats.compression_ratio = page_bytes / self.wire_bytes as f64;
        self.stats.rounds.push(round.clone());
        self.act(Action::Report(Report::RoundDone(round)));
    }

    /// Begins the next round if the previous one is placed and the destination expects another one.
    pub(super) fn go_on(&mut self, now: Duration) {
        let ours = !self.our_side.streams && self.withdrawn.is_none();
        let rests = self.rests_until().is_some_and(|until| now < until);
        if self.phase == Phase::Sending && !self.rounds.is_open() && ours && !rests {
            self.harvest(now);
        }
    }

    pub(super) fn harvest(&mut self, now: Duration) {
        self.enter(now, Phase::Harvesting);
        self.act(Action::Harvest);
    }

    pub(super) fn on_harvested(&mut self, now: Duration, pages: u64, took: Duration) {
        let harvest = Harvest {
            rounds: self.rounds.round(),
            elapsed: now.saturating_sub(self.log_started),
            pending_pages: pages,
            dirtied_in: now.saturating_sub(self.last_harvest),
        };
        self.foretell(harvest);
        let decision = if self.links.are_up() {
            self.decide(harvest)
        } else {
            // The guest is not paused while the link is down.
            Decision::AnotherRound
        };
        match decision {
            Decision::AnotherRound => {
                if let Some(percent) = self.throttle.next(pages) {
                    self.predictor.throttled(percent);
                    self.act(Action::Throttle { percent });
                    self.act(Action::Report(Report::Throttled { percent }));
                }
                self.start_round(now, pages, took, false);
            }
            Decision::SwitchOver => {
                let predicted = ms(self.predictor.predict(pages));
                self.stats.predicted_downtime_ms = predicted;
                self.enter(now, Phase::Pausing);
                self.act(Action::Report(Report::Paused { predicted_downtime_ms: predicted }));
                self.act(Action::Pause);
            }
            Decision::GiveUp(why) => self.fail(now, MigrateError::NotConverging(why)),
        }
        self.last_harvest = now;
    }

    /// Reports the forecast after a harvest.
    pub(super) fn foretell(&mut self, harvest: Harvest) {
        let forecast = self.predictor.forecast(harvest, self.throttle.has_more());
        self.act(Action::Report(Report::Forecast(forecast)));
    }

    pub(super) fn send_final(&mut self, now: Duration) {
        let (Some(digest), true) = (self.digest, self.state.is_some()) else { return };
        let Some(state) = self.state.take() else { return };
        if self.config.verify && self.comparison.is_before_load() {
            self.ask_to_verify(now);
        }
        self.act(Action::Send(ControlMessage::Final {
            lane_sequences: self.rounds.end_sequences(),
            digest,
            state,
            paused: self.guest_is_paused,
        }));
        self.last_sent = now;
        self.stats.downtime.send_ms = ms(now.saturating_sub(self.rounds.started()));
        self.enter(now, Phase::AwaitReady);
    }

    pub(super) fn on_ready(&mut self, now: Duration, placed: u64) {
        // READY is sent after everything was placed, so a lost PLACED must not leave a round open.
        self.rounds.placed_everything();
        self.finish_round(now);
        self.stats.downtime.ready_ms =
            ms(now.saturating_sub(self.last_sent)) - self.stats.verify_ms;
        let sent = self.digest.unwrap_or_default();
        self.stats.digest_match = Some(sent == placed);
        if sent != placed {
            return self.fail(now, MigrateError::DigestMismatch { sent, placed });
        }
        self.act(Action::Report(Report::Ready));
        if self.config.verify { self.compare_at_ready(now) } else { self.commit(now) }
    }
}
