//! The destination's machine: timeouts.

use std::time::Duration;

use super::io::LinkId;
use super::{Destination, Phase, Verification};
use crate::error::MigrateError;
use vmferry_handover::{DestinationEvent, DestinationState};

impl Destination {
    pub(super) fn expects_life(&self) -> bool {
        self.link_up && !self.handover.is_final() && self.phase != Phase::Refused
    }

    pub(super) fn deadline(&self) -> Option<(Duration, &'static str, Duration)> {
        let (what, after) = match (self.phase, self.handover) {
            (Phase::AwaitBegin, _) => ("the announcement of a guest", self.timeouts.accept),
            (Phase::Placing, DestinationState::Receiving) if self.losses.is_empty() => {
                ("the last frames", self.timeouts.stall)
            }
            // If the source has announced a comparison, both sides hash first. A disconnected
            // source keeps its guest, unless it has sent COMMIT by now.
            (Phase::Deciding, DestinationState::Ready)
                if self.link_up && self.verification != Verification::None =>
            {
                ("COMMIT", self.timeouts.verify + self.timeouts.commit)
            }
            (Phase::Deciding, DestinationState::Ready) => ("COMMIT", self.timeouts.commit),
            _ => return None,
        };
        Some((self.waiting_since + after, what, after))
    }

    pub(super) fn watch_the_clock(&mut self, now: Duration) {
        if let Some((at, what, after)) = self.deadline()
            && now >= at
        {
            self.waiting_since = now;
            let error = MigrateError::TimedOut { what, after };
            if self.handover == DestinationState::Ready {
                self.failure = Some(error);
                self.hand_over(now, LinkId::CONTROL, DestinationEvent::CommitTimeout);
            } else {
                self.fail(now, error);
            }
        } else if self.expects_life() && now >= self.last_heard + self.timeouts.silence {
            let what = "any sign of life from the source";
            self.on_control_lost(
                now,
                MigrateError::TimedOut { what, after: self.timeouts.silence },
            );
        } else if let Some(error) = self.losses.take_overdue(now, self.patience()) {
            self.on_link_lost(now, error);
        }
    }
}
