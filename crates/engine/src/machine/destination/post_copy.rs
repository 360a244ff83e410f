//! The destination's machine with post-copy: LACKING names the pages that only the source has, and
//! the guest fetches them while it runs here.
//!
//! From RUN-INTENT on no failure ends the session. Lost channels are waited for: the source redials
//! them, and asks on a query channel if it has lost the control channel.

use std::time::Duration;

use vmferry_memory::{PageRun, SlotId};

use super::common::{Common, protocol};
use super::io::{Action, LinkId, Report};
use super::phase::{Lacking, Phase, Session};
use crate::causes::chain;
use crate::error::MigrateError;
use crate::link::Loss;
use vmferry_handover::{DestinationEvent, DestinationState};

/// The pause before another attempt to write FETCHED.
const FETCHED_RETRY: Duration = Duration::from_secs(1);

impl Session {
    /// The source names pages that it has not sent.
    pub(super) fn on_lacking(
        mut self,
        common: &mut Common,
        now: Duration,
        (slot, first): (SlotId, u64),
        bits: &[u8],
    ) -> Phase {
        match self.add_lacking(slot, first, bits) {
            Ok(runs) => {
                // Those that were named before are free already.
                if !runs.is_empty() {
                    common.act(Action::FreeOutdated { runs });
                }
                Phase::Receiving(self)
            }
            Err(reason) => Phase::Receiving(self).fail(common, now, protocol(reason)),
        }
    }

    /// Returns the pages that were not named before, or not since the last withdrawal.
    fn add_lacking(
        &mut self,
        slot: SlotId,
        first: u64,
        bits: &[u8],
    ) -> Result<Vec<PageRun>, String> {
        let Some(lacking) = &mut self.lacking else {
            return Err("LACKING without post-copy, which this side has not accepted".into());
        };
        let Some(in_slot) = self.layout.get(usize::from(slot.0)) else {
            let slots = self.layout.len();
            return Err(format!("LACKING names {slot}, and the guest has {slots} slots"));
        };
        let Lacking { named, freed } = lacking;
        let (named, freed) = (named.bitmap_mut(slot), freed.bitmap_mut(slot));
        let mut runs: Vec<PageRun> = Vec::new();
        for (byte, at) in bits.iter().zip((0..).step_by(8)).filter(|(byte, _)| **byte != 0) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
                let page = first.checked_add(at + bit).filter(|page| *page < in_slot.pages);
                let Some(page) = page else {
                    let all = in_slot.pages;
                    return Err(format!(
                        "LACKING names page {first}+{} of {slot}, which has {all}",
                        at + bit
                    ));
                };
                named.set(page);
                if freed.is_set(page) {
                    continue;
                }
                freed.set(page);
                match runs.last_mut() {
                    Some(run) if run.first + run.pages == page => run.pages += 1,
                    _ => runs.push(PageRun { slot, first: page, pages: 1 }),
                }
            }
        }
        Ok(runs)
    }
}

impl Common {
    /// How the fetch has ended, if the guest was started and neither FETCHED nor ENDED is on disk.
    fn end_of_fetch(&self) -> Option<DestinationEvent> {
        match (self.handover, self.has_fetched, self.guest_ended) {
            (DestinationState::Fetching, true, _) => Some(DestinationEvent::Fetched),
            (DestinationState::Fetching, false, true) => Some(DestinationEvent::Crashed),
            _ => None,
        }
    }
}

impl Phase {
    /// Ends the session if the guest runs and has all its pages, or has ended.
    pub(super) fn go_on_fetching(self, common: &mut Common, now: Duration) -> Self {
        let Some(event) = common.end_of_fetch() else { return self };
        if !common.guest_ended && common.has_fetched {
            common.report(Report::Fetched);
        }
        self.hand_over(common, now, LinkId::CONTROL, event)
    }

    /// The guest's VMM is a process of its own, and has ended. If it was told to, nothing of the
    /// source is needed. What a crashed guest lacks is of use to nobody but its operator.
    pub(super) fn on_guest_ended(self, common: &mut Common, now: Duration, in_order: bool) -> Self {
        if !std::mem::replace(&mut common.guest_ended, true) {
            common.report(Report::GuestEnded { in_order });
        }
        common.has_fetched |= in_order;
        self.go_on_fetching(common, now)
    }

    /// FETCHED or ENDED could not be written. The guest runs on, the source keeps its memory, and
    /// the write is tried again for as long as it takes.
    pub(super) fn on_fetched_failed(
        self,
        common: &mut Common,
        now: Duration,
        error: &MigrateError,
    ) -> Self {
        if common.fetched_retry.replace(now + FETCHED_RETRY).is_none() {
            common.report(Report::FetchingFailed { reason: chain(error) });
        }
        self.hand_over(common, now, LinkId::CONTROL, DestinationEvent::JournalFailed)
    }

    /// Tries again to write FETCHED or ENDED, if it is time.
    pub(super) fn retry_fetched(self, common: &mut Common, now: Duration) -> Self {
        match common.end_of_fetch().filter(|_| common.fetched_retry.is_some_and(|at| now >= at)) {
            Some(event) => self.hand_over(common, now, LinkId::CONTROL, event),
            None => self,
        }
    }

    /// Whether this is the number of a fetch lane, and not of a data lane.
    pub(super) fn is_fetch_lane(&self, common: &Common, lane: u8) -> bool {
        let is_after = |session: &Session| usize::from(lane) >= session.lane_ends.len();
        common.handover.is_fetching() || self.session().is_some_and(is_after)
    }

    /// A fetch lane has lost its channel. Before the guest runs, the source ends the session if it
    /// needs the lane.
    pub(super) fn on_fetch_lane_lost(
        self,
        common: &mut Common,
        now: Duration,
        lane: u8,
        error: &MigrateError,
    ) -> Self {
        if common.handover == DestinationState::Fetching && !common.links.is_lane_lost(lane) {
            common.report_loss(Some(lane), error);
            let error = MigrateError::Cancelled { during: self.name() };
            common.links.lose_fetch_lane(lane, Loss { since: now, error });
        }
        self
    }
}

#[cfg(test)]
mod tests;
