//! The source's machine from the pause of the guest to READY: the last harvest, the last round and
//! the state.

use std::time::Duration;

use vmferry_wire::ControlMessage;

use super::common::{Common, ms};
use super::io::{Action, Report, Saved, StorageSample};
use super::phase::{AwaitReady, LastHarvest, LastRound, Pause, Pausing, Phase};
use crate::error::MigrateError;
use crate::rounds::tracker::RoundStart;
use vmferry_handover::SessionKind;

/// The first protocol version that can announce a guest that stays paused.
const PAUSED_SINCE: u16 = 2;

impl Pause {
    /// The guest is paused, and has been for this long.
    pub(super) fn begin(common: &mut Common, now: Duration, stood_still: Duration) -> Self {
        common.stats.downtime.pause_ms = ms(stood_still);
        Self { since: now.saturating_sub(stood_still) }
    }
}

impl Pausing {
    pub(super) fn on_paused(
        self,
        common: &mut Common,
        now: Duration,
        stood_still: Duration,
    ) -> Phase {
        let pause = Pause::begin(common, now, stood_still);
        common.begin_wait(now);
        common.act(Action::HarvestLast);
        Phase::LastHarvest(LastHarvest { pause })
    }
}

impl LastHarvest {
    /// All pages of the last round are known.
    pub(super) fn on_harvested(
        self,
        common: &mut Common,
        now: Duration,
        pages: u64,
        took: Duration,
    ) -> Phase {
        common.stats.downtime.harvest_ms = ms(took);
        if !common.links.are_up() {
            common.kind = SessionKind::PreCopy;
        } else if common.kind == SessionKind::PostCopy {
            return self.pause.begin_post_copy(common, now, pages);
        }
        common.start_round(RoundStart {
            now,
            pages,
            harvest: took,
            throttle_percent: common.pace.throttle.percent(),
            paused: true,
            ..RoundStart::default()
        });
        let phase = Phase::LastRound(LastRound::new(self.pause, now));
        if !common.links.are_up() {
            // The link was lost while the guest was being paused.
            return phase.recall(common, now);
        }
        common.act(Action::Save);
        phase
    }
}

impl LastRound {
    /// The last harvest was done at `since`.
    pub(super) fn new(pause: Pause, since: Duration) -> Self {
        Self { pause, since, state: None, storage_sample: Vec::new(), digest: None }
    }

    pub(super) fn on_saved(mut self, common: &mut Common, now: Duration, saved: Saved) -> Phase {
        let Saved { state, took, paused, sample } = saved;
        if paused && common.our_side.protocol < PAUSED_SINCE {
            return Phase::LastRound(self).fail(common, now, MigrateError::PausedForOldPeer);
        }
        common.guest_is_paused = paused;
        common.stats.downtime.save_ms = ms(took);
        common.stats.state_bytes = state.len() as u64;
        common.stats.sent_bytes += state.len() as u64;
        let StorageSample { bytes, took } = sample.unwrap_or_default();
        common.stats.downtime.storage_ms = ms(took);
        self.storage_sample = bytes;
        self.state = Some(state);
        self.send_final(common, now)
    }

    pub(super) fn on_digest(mut self, common: &mut Common, now: Duration, digest: u64) -> Phase {
        self.digest = Some(digest);
        self.send_final(common, now)
    }

    /// Sends FINAL once the state is saved and the digest is known.
    fn send_final(self, common: &mut Common, now: Duration) -> Phase {
        let Self { pause, since, state: Some(state), storage_sample, digest: Some(digest) } = self
        else {
            return Phase::LastRound(self);
        };
        let asks_now = common.config.verify && common.verification.before_load;
        let comparison = asks_now.then(|| common.request_comparison());
        if common.kind == SessionKind::PostCopy {
            common.act(Action::ServePages { round: common.rounds.round() + 1 });
        }
        common.act(Action::Send(ControlMessage::Final {
            lane_sequences: common.rounds.end_sequences(),
            digest,
            state,
            paused: common.guest_is_paused,
            kind: common.kind,
            storage_sample,
        }));
        common.stats.downtime.send_ms = ms(now.saturating_sub(since));
        common.begin_wait(now);
        Phase::AwaitReady(AwaitReady { pause, digest, sent_at: now, comparison })
    }
}

impl AwaitReady {
    /// READY has arrived, with the digest of everything that was placed.
    pub(super) fn on_ready(self, common: &mut Common, now: Duration, placed: u64) -> Phase {
        // READY is sent after everything was placed, so a lost PLACED must not leave a round open.
        common.rounds.placed_everything();
        if let Some(round) = common.rounds.finish(now) {
            common.count_round(round);
        }
        common.stats.downtime.ready_ms =
            ms(now.saturating_sub(self.sent_at)) - common.stats.verify_ms;
        let sent = self.digest;
        common.stats.digest_match = Some(sent == placed);
        if sent != placed {
            let error = MigrateError::DigestMismatch { sent, placed };
            return Phase::AwaitReady(self).fail(common, now, error);
        }
        common.report(Report::Ready);
        if common.config.verify {
            self.compare_at_ready(common, now)
        } else {
            self.pause.commit(common, now)
        }
    }
}
