//! The destination's machine: timeouts.

use std::time::Duration;

use super::common::Common;
use super::io::LinkId;
use super::phase::{AwaitBegin, Deciding, Phase, Placing, Verification};
use crate::error::MigrateError;
use vmferry_handover::{DestinationEvent, DestinationState};

/// The end of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deadline {
    pub(super) at: Duration,
    /// What is awaited.
    pub(super) what: &'static str,
    /// The length of the wait.
    after: Duration,
}

impl Phase {
    /// When the clock must be looked at if nothing happens before.
    pub(super) fn next_tick(&self, common: &Common) -> Option<Duration> {
        let expects_life = self.expects_life(common);
        let silence = expects_life.then(|| common.last_heard + common.timeouts.silence);
        let deadline = self.deadline(common).map(|deadline| deadline.at);
        let retry = common.fetched_retry.filter(|_| common.handover == DestinationState::Fetching);
        [silence, deadline, common.links.deadline(), retry].into_iter().flatten().min()
    }

    fn expects_life(&self, common: &Common) -> bool {
        common.links.is_up && !common.handover.is_final() && !self.is_refused()
    }

    /// The deadline of the present wait.
    pub(super) fn deadline(&self, common: &Common) -> Option<Deadline> {
        let timeouts = &common.timeouts;
        let (since, what, after) = match (self, common.handover) {
            (Self::AwaitBegin(AwaitBegin { since }), _) => {
                (since, "the announcement of a guest", timeouts.accept)
            }
            (Self::Placing(Placing { since, .. }), DestinationState::Receiving)
                if common.links.are_complete() =>
            {
                (since, "the last frames", timeouts.stall)
            }
            // If the source has announced a comparison, both sides hash first. A disconnected
            // source keeps its guest, unless it has sent COMMIT by now.
            (Self::Deciding(Deciding { since, session, .. }), DestinationState::Ready)
                if common.links.is_up && session.verification != Verification::None =>
            {
                (since, "COMMIT", timeouts.verify + timeouts.commit)
            }
            (Self::Deciding(Deciding { since, .. }), DestinationState::Ready) => {
                (since, "COMMIT", timeouts.commit)
            }
            _ => return None,
        };
        Some(Deadline { at: *since + after, what, after })
    }

    /// The last frames are arriving, however slowly.
    pub(super) fn on_arriving(mut self, now: Duration) -> Self {
        if let Self::Placing(placing) = &mut self {
            placing.since = now;
        }
        self
    }

    /// A channel is up again, so the present wait begins again.
    pub(super) fn extend_wait(&mut self, now: Duration) {
        match self {
            Self::Placing(Placing { since, .. }) | Self::Deciding(Deciding { since, .. }) => {
                *since = now;
            }
            _ => {}
        }
    }

    pub(super) fn watch_the_clock(self, common: &mut Common, now: Duration) -> Self {
        if let Some(Deadline { what, after, .. }) =
            self.deadline(common).filter(|deadline| now >= deadline.at)
        {
            let error = MigrateError::TimedOut { what, after };
            if common.handover != DestinationState::Ready {
                return self.fail(common, now, error);
            }
            common.failure = Some(error);
            return self.hand_over(common, now, LinkId::CONTROL, DestinationEvent::CommitTimeout);
        }
        let silence = common.timeouts.silence;
        if self.expects_life(common) && now >= common.last_heard + silence {
            let what = "any sign of life from the source";
            let error = MigrateError::TimedOut { what, after: silence };
            return self.on_control_lost(common, now, error);
        }
        match common.links.take_overdue(now) {
            Some(error) => self.on_link_lost(common, now, error),
            None => self.retry_fetched(common, now),
        }
    }
}
