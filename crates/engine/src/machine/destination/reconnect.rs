//! The destination's machine: channels that are lost and may be reestablished.
//!
//! Until the state is loaded, losing a channel loses no data: the source keeps every frame whose
//! placement was not acknowledged. So the machine waits for the source as long as the source wants
//! to retry. When the control channel is reestablished, everything since the last FINAL is void.

use std::time::Duration;

use super::common::{Common, protocol};
use super::io::Report;
use super::phase::{Hashing, Phase, Placing};
use crate::causes::chain;
use crate::error::MigrateError;
use crate::link::{Loss, channel_name};
use vmferry_handover::{DestinationState, SessionKind};

impl Phase {
    /// Whether a source that has lost its control channel may continue this session on another one.
    pub(super) fn may_resume(&self, common: &Common) -> bool {
        let is_before_load = matches!(
            self,
            Self::Receiving(_) | Self::Placing(_) | Self::Hashing(_) | Self::PutOff(_)
        );
        is_before_load
            && common.handover == DestinationState::Receiving
            && !common.links.reconnect.is_zero()
    }

    pub(super) fn on_control_lost(
        self,
        common: &mut Common,
        now: Duration,
        error: MigrateError,
    ) -> Self {
        let phase = self.put_off_load(common);
        if !phase.may_resume(common) {
            return phase.on_link_lost(common, now, error);
        }
        common.links.is_up = false;
        if common.links.control.is_none() {
            common.report_loss(None, &error);
            common.links.control = Some(Loss { since: now, error });
        }
        phase
    }

    pub(super) fn on_resumed(self, common: &mut Common, now: Duration) -> Self {
        common.links.is_up = true;
        common.last_heard = now;
        if let Some(loss) = common.links.control.take() {
            common.report_return(now, None, &loss);
        }
        self.withdraw(common)
    }

    /// Continues to receive: the guest runs on at the source.
    pub(super) fn withdraw(self, common: &mut Common) -> Self {
        let mut session = match self {
            Self::Receiving(session)
            | Self::Placing(Placing { session, .. })
            | Self::Hashing(Hashing { session, .. })
            | Self::PutOff(session) => session,
            phase => return phase,
        };
        session.withdraw_verify();
        if let Some(lacking) = &mut session.lacking {
            lacking.freed.clear_all();
        }
        common.kind = SessionKind::PreCopy;
        Self::Receiving(session)
    }

    pub(super) fn on_lane_lost(
        self,
        common: &mut Common,
        now: Duration,
        lane: u8,
        error: MigrateError,
    ) -> Self {
        if self.is_fetch_lane(common, lane) {
            return self.on_fetch_lane_lost(common, now, lane, &error);
        }
        // Once everything is placed, data channels are no longer needed.
        let needed = matches!(self, Self::Receiving(_) | Self::Placing(_));
        if needed && !common.handover.is_final() && !common.links.is_lane_lost(lane) {
            if !common.links.reconnect.is_zero() {
                common.report_loss(Some(lane), &error);
            }
            common.links.lose_lane(lane, Loss { since: now, error });
        }
        self
    }

    pub(super) fn on_lane_joined(mut self, common: &mut Common, now: Duration, lane: u8) -> Self {
        if let Some(loss) = common.links.restore_lane(lane) {
            self.extend_wait(now);
            common.report_return(now, Some(lane), &loss);
        }
        self
    }

    /// The source abandons this session.
    pub(super) fn on_superseded(self, common: &mut Common, now: Duration) -> Self {
        let error = common.links.control.take().map_or_else(
            || protocol("the source announces another guest".into()),
            |loss| loss.error,
        );
        self.on_link_lost(common, now, error)
    }
}

impl Common {
    /// Whether the source is disconnected.
    pub(super) fn is_waiting_for_source(&self) -> bool {
        self.links.control.is_some()
    }

    pub(super) fn report_loss(&mut self, lane: Option<u8>, error: &MigrateError) {
        self.report(Report::LinkLost { channel: channel_name(lane), reason: chain(error) });
    }

    fn report_return(&mut self, now: Duration, lane: Option<u8>, loss: &Loss) {
        let after_ms = now.saturating_sub(loss.since).as_secs_f64() * 1e3;
        self.report(Report::LinkRestored { channel: channel_name(lane), after_ms });
    }
}

#[cfg(test)]
mod tests {
    use vmferry_wire::ControlMessage;

    use super::super::fixture::{DIGEST, assert_phase, finish, heard, receiving};
    use super::*;
    use crate::config::Timeouts;
    use crate::machine::destination::io::{Action, Input, LinkId, Loaded};

    fn lost() -> Input {
        Input::LinkLost(MigrateError::Cancelled { during: "a test" })
    }

    /// A source that lost its links after FINAL resumes its guest, and sends again what was not
    /// placed.
    #[test]
    fn final_before_a_reconnection_is_withdrawn() {
        let now = Duration::ZERO;
        let mut destination = receiving(false);
        finish(&mut destination);
        destination.handle(now, lost());
        destination.handle(now, Input::LaneEnded { lane: 0, sequence: 1 });
        assert_phase!(destination, Placing, "the source is disconnected");
        destination.handle(now, Input::Resumed);
        assert_phase!(destination, Receiving);
        finish(&mut destination);
        assert_phase!(destination, Summing);
        let actions = &destination.common.actions;
        let sums = actions.iter().filter(|action| matches!(action, Action::SumDigest));
        assert_eq!(sums.count(), 1);
    }

    /// The long timeout for comparing memories does not apply once the link is lost.
    #[test]
    fn link_lost_during_the_comparison_has_the_usual_timeout() {
        let (now, timeouts) = (Duration::from_secs(5), Timeouts::default());
        let mut destination = receiving(true);
        destination.handle(Duration::ZERO, Input::LaneEnded { lane: 0, sequence: 1 });
        finish(&mut destination);
        destination.handle(Duration::ZERO, Input::Digest(DIGEST));
        destination.handle(Duration::ZERO, Input::Loaded(Ok(Loaded::default())));
        assert_eq!(destination.handover(), DestinationState::Ready);
        let deadline = |destination: &crate::machine::destination::Destination| {
            destination.phase.deadline(&destination.common).unwrap()
        };
        let before = deadline(&destination);
        let message = ControlMessage::Verify {};
        destination.handle(now, Input::Control { link: LinkId::CONTROL, message });
        assert_eq!(before.at, timeouts.verify + timeouts.commit);
        assert_eq!(before.what, "COMMIT");
        assert_eq!(deadline(&destination), before, "VERIFY moves no deadline");
        let later = now + Duration::from_secs(1);
        destination.handle(later, lost());
        assert_eq!(deadline(&destination).at, later + timeouts.commit);
        // Losing the link a second time does not extend the deadline.
        destination.handle(later + Duration::from_secs(1), lost());
        assert_eq!(deadline(&destination).at, later + timeouts.commit);
    }

    #[test]
    fn withdraw_before_final_changes_nothing() {
        let mut destination = receiving(false);
        heard(&mut destination, ControlMessage::Withdraw {});
        assert_phase!(destination, Receiving);
    }
}
