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
        let claim = common.claim_retry.filter(|_| common.handover == DestinationState::Claiming);
        [silence, deadline, common.links.deadline(), retry, claim].into_iter().flatten().min()
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
            (
                Self::Deciding(Deciding { committed_at: Some(at), .. }),
                DestinationState::Claiming,
            ) => (at, "the witness", timeouts.claim),
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
            common.failure = Some(match common.handover {
                DestinationState::Ready => MigrateError::TimedOut { what, after },
                DestinationState::Claiming => common.unanswered_claim(after),
                _ => return self.fail(common, now, MigrateError::TimedOut { what, after }),
            });
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
            None => {
                common.retry_claim(now);
                self.retry_fetched(common, now)
            }
        }
    }
}

impl Common {
    /// This side did not read messages for this long, so messages may be unread and the source was
    /// not silent.
    pub(super) fn on_away(&mut self, now: Duration, took: Duration) {
        self.last_heard = now.min(self.last_heard + took);
        self.links.were_unheard(now, took);
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::receiving;
    use super::super::io::Input;
    use super::*;

    /// Not every action has a result: a VMM may need long to free the pages that a source with
    /// post-copy has named.
    #[test]
    fn silence_excludes_time_that_this_side_was_away() {
        let mut destination = receiving(false);
        let silence = destination.common.timeouts.silence;
        let later = silence * 3;
        destination.handle(later, Input::Away { took: later });
        assert!(destination.common.links.is_up);
        destination.handle(later + silence, Input::Tick);
        assert!(!destination.common.links.is_up, "it is silent now");
    }

    #[test]
    fn wait_for_a_lost_lane_excludes_time_that_this_side_was_away() {
        let mut destination = receiving(false);
        let error = MigrateError::Cancelled { during: "a test" };
        let lost = Input::LaneLost { lane: 0, attempt: 0, error };
        destination.handle(Duration::ZERO, lost);
        let reconnect = destination.common.links.reconnect;
        assert!(!reconnect.is_zero());
        destination.handle(2 * reconnect, Input::Away { took: 2 * reconnect });
        destination.handle(2 * reconnect, Input::LaneJoined { lane: 0 });
        assert!(destination.common.links.are_complete());
        assert!(destination.common.failure.is_none());
    }
}
