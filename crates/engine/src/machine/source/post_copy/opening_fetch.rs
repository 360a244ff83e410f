//! From the decision for post-copy to the pause: fetch lanes are opened, and the destination frees
//! the pages that it will lack. The guest runs.
//!
//! Freeing a page takes the destination some microseconds, and the guest writes others meanwhile.
//! Those are harvested and named too, so that few are left to be freed in the pause.

use std::time::Duration;

use vmferry_wire::ControlMessage;

use super::super::common::Common;
use super::super::io::Action;
use super::super::phase::{Found, Harvesting, OpeningFetch, Phase};
use vmferry_handover::SessionKind;

/// The pause is not put off for pages that the destination frees in less time.
const SHORT: Duration = Duration::from_millis(1);

/// New pages are named as long as they are at most this share of those that were named last ...
const MOST: f64 = 0.9;

/// ... and this many times at most, the first time included.
const MOST_NAMINGS: u32 = 16;

impl Harvesting {
    /// Pages of this harvest will be missing: they are named, and fetch lanes are opened, unless
    /// they are.
    pub(in super::super) fn begin_post_copy(
        self,
        common: &mut Common,
        now: Duration,
        found: Found,
    ) -> Phase {
        let are_open = common.post_copy.are_open;
        let phase = OpeningFetch { found, are_open, ..OpeningFetch::default() };
        let phase = phase.name(common, now, found.pages);
        if !are_open {
            common.open_fetch_lanes();
        }
        phase
    }
}

impl OpeningFetch {
    /// Names all pending pages, of which this number is new.
    fn name(mut self, common: &mut Common, now: Duration, new: u64) -> Phase {
        common.begin_wait(now);
        common.act(Action::TellLacking);
        self.ping = Some(common.send_ping(now));
        (self.named, self.named_at) = (new, now);
        self.namings += 1;
        Phase::OpeningFetch(self)
    }

    /// All fetch lanes have channels.
    pub(in super::super) fn on_opened(mut self, common: &mut Common, now: Duration) -> Phase {
        self.are_open = true;
        common.post_copy.note_open();
        self.go_on(common, now)
    }

    /// A ping was answered.
    pub(in super::super) fn on_pong(
        mut self,
        common: &mut Common,
        now: Duration,
        nonce: u64,
    ) -> Phase {
        if self.ping.take_if(|ping| nonce >= *ping).is_some() {
            self.freed_in = now.saturating_sub(self.named_at + common.round_trip());
        }
        self.go_on(common, now)
    }

    /// The control channel was reestablished. The destination has withdrawn LACKING, and it frees
    /// no more pages because of it.
    pub(in super::super) fn on_resumed(mut self, common: &mut Common, now: Duration) -> Phase {
        if self.is_harvesting {
            self.is_withdrawn = true;
            return Phase::OpeningFetch(self);
        }
        common.start_running_round(now, self.found)
    }

    /// The pages that the guest has written since the previous harvest are pending too.
    pub(in super::super) fn on_harvested(
        mut self,
        common: &mut Common,
        now: Duration,
        found: Found,
    ) -> Phase {
        common.pace.predictor.waited_for_devices(found.stood_still);
        let new = found.pages.saturating_sub(self.found.pages);
        self.found = Found {
            pages: found.pages,
            took: self.found.took + found.took,
            stood_still: self.found.stood_still + found.stood_still,
        };
        self.is_harvesting = false;
        if self.is_withdrawn {
            let phase = common.start_running_round(now, self.found);
            common.pace.last_harvest = now;
            return phase;
        }
        common.pace.last_harvest = now;
        if self.is_worth_naming(new) && common.may_switch_over() {
            return self.name(common, now, new);
        }
        self.go_on(common, now)
    }

    /// Whether the destination would need a while to free these new pages. Naming nearly as many as
    /// before would not shorten the pause: the guest writes as many meanwhile. But most guests
    /// write to a part of their memory, of which less and less is new.
    fn is_worth_naming(&self, new: u64) -> bool {
        let share = new as f64 / self.named.max(1) as f64;
        let freed_in = self.freed_in.mul_f64(share.min(1.0));
        share <= MOST && self.namings < MOST_NAMINGS && freed_in >= SHORT
    }

    fn go_on(mut self, common: &mut Common, now: Duration) -> Phase {
        let is_busy = self.ping.is_some() || self.is_harvesting;
        if !self.are_open || is_busy || !common.links.is_control_up() {
            return Phase::OpeningFetch(self);
        }
        if !common.may_switch_over() {
            // All of these pages are sent as in pre-copy.
            common.act(Action::Send(ControlMessage::Withdraw {}));
            return common.start_running_round(now, self.found);
        }
        let since_harvest = now.saturating_sub(common.pace.last_harvest);
        if since_harvest > common.round_trip() + SHORT {
            self.is_harvesting = true;
            common.act(Action::HarvestMore);
            return Phase::OpeningFetch(self);
        }
        common.kind = SessionKind::PostCopy;
        common.pause_guest(now, 0)
    }
}

impl Common {
    /// Whether no channel is missing.
    fn may_switch_over(&self) -> bool {
        self.links.is_control_up() && self.links.are_up() && self.post_copy.are_open
    }

    /// The shortest round trip so far, or none if it is not known.
    fn round_trip(&self) -> Duration {
        self.pings.round_trip.unwrap_or_default()
    }
}
