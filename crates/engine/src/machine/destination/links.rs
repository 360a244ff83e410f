//! The destination's machine: channels that are lost and may be reestablished.
//!
//! Until the state is loaded, losing a channel loses no data: the source keeps every frame whose
//! placement was not acknowledged. So the machine waits for the source as long as the source wants
//! to retry. When the control channel is reestablished, everything since the last FINAL is void.

use std::time::Duration;

use super::io::Report;
use super::{Destination, Phase, protocol};
use crate::causes::chain;
use crate::error::MigrateError;
use crate::link::{EXPLANATION, Loss, channel_name};
use vmferry_handover::DestinationState;

/// Channels that are lost.
#[derive(Debug, Default)]
pub(super) struct Losses {
    control: Option<Loss>,
    /// Lost data channels with their lane.
    lanes: Vec<(u8, Loss)>,
}

impl Losses {
    pub(super) fn is_empty(&self) -> bool {
        self.control.is_none() && self.lanes.is_empty()
    }

    fn all(&self) -> impl Iterator<Item = &Loss> {
        self.control.iter().chain(self.lanes.iter().map(|(_, loss)| loss))
    }

    /// When the timeout of the first lost channel expires.
    pub(super) fn deadline(&self, patience: Duration) -> Option<Duration> {
        self.all().map(|loss| loss.since + patience).min()
    }

    /// The error that ends the session, if the timeout of a lost channel has expired.
    pub(super) fn take_overdue(
        &mut self,
        now: Duration,
        patience: Duration,
    ) -> Option<MigrateError> {
        if let Some(loss) = self.control.take_if(|loss| now >= loss.since + patience) {
            return Some(loss.error);
        }
        let index = self.lanes.iter().position(|(_, loss)| now >= loss.since + patience)?;
        Some(self.lanes.remove(index).1.error)
    }
}

impl Destination {
    /// Whether a source that has lost its control channel may continue this session on another one.
    #[must_use]
    pub fn may_resume(&self) -> bool {
        matches!(self.phase, Phase::Receiving | Phase::Placing | Phase::Hashing)
            && self.handover == DestinationState::Receiving
            && !self.reconnect.is_zero()
    }

    /// Whether the source is disconnected. An authorized source may then start a new session.
    #[must_use]
    pub fn is_waiting_for_source(&self) -> bool {
        self.losses.control.is_some()
    }

    /// How long to wait for a lost channel. After the loss of a data channel, the control channel
    /// may still report the reason.
    pub(super) fn patience(&self) -> Duration {
        self.reconnect.max(EXPLANATION)
    }

    pub(super) fn on_control_lost(&mut self, now: Duration, error: MigrateError) {
        self.put_off_load();
        if !self.may_resume() {
            return self.on_link_lost(now, error);
        }
        self.link_up = false;
        if self.losses.control.is_none() {
            self.report_loss(None, &error);
            self.losses.control = Some(Loss { since: now, error });
        }
    }

    pub(super) fn on_resumed(&mut self, now: Duration) {
        self.link_up = true;
        self.last_heard = now;
        if let Some(loss) = self.losses.control.take() {
            self.report_return(now, None, &loss);
        }
        self.withdraw();
    }

    /// Continues to receive: the guest runs on at the source.
    pub(super) fn withdraw(&mut self) {
        self.last = None;
        self.withdraw_verify();
        self.phase = Phase::Receiving;
    }

    pub(super) fn on_lane_lost(&mut self, now: Duration, lane: u8, error: MigrateError) {
        // Once everything is placed, data channels are no longer needed.
        if !matches!(self.phase, Phase::Receiving | Phase::Placing) || self.handover.is_final() {
            return;
        }
        if self.losses.lanes.iter().all(|(lost, _)| *lost != lane) {
            if !self.reconnect.is_zero() {
                self.report_loss(Some(lane), &error);
            }
            self.losses.lanes.push((lane, Loss { since: now, error }));
        }
    }

    pub(super) fn on_lane_joined(&mut self, now: Duration, lane: u8) {
        if let Some(index) = self.losses.lanes.iter().position(|(lost, _)| *lost == lane) {
            let (_, loss) = self.losses.lanes.swap_remove(index);
            self.waiting_since = now;
            self.report_return(now, Some(lane), &loss);
        }
    }

    pub(super) fn on_superseded(&mut self, now: Duration) {
        let error = self.losses.control.take().map_or_else(
            || protocol("the source announces another guest".into()),
            |loss| loss.error,
        );
        self.on_link_lost(now, error);
    }

    fn report_loss(&mut self, lane: Option<u8>, error: &MigrateError) {
        let report = Report::LinkLost { channel: channel_name(lane), reason: chain(error) };
        self.actions.push_back(super::Action::Report(report));
    }

    fn report_return(&mut self, now: Duration, lane: Option<u8>, loss: &Loss) {
        let after_ms = now.saturating_sub(loss.since).as_secs_f64() * 1e3;
        let report = Report::LinkRestored { channel: channel_name(lane), after_ms };
        self.actions.push_back(super::Action::Report(report));
    }
}

#[cfg(test)]
mod tests {
    use vmferry_memory::GuestBytes;
    use vmferry_wire::{ControlMessage, Token};

    use super::super::Verification;
    use super::*;
    use crate::config::Timeouts;
    use crate::machine::destination::io::{Action, Input, LinkId};
    use crate::machine::peer::DestinationSide;

    /// A source that lost its links after FINAL resumes its guest, and sends again what was not
    /// placed.
    #[test]
    fn nothing_is_loaded_while_the_source_is_away() {
        let now = Duration::ZERO;
        let mut destination =
            Destination::new(Timeouts::default(), Token([1; 16]), DestinationSide::default(), now);
        (destination.phase, destination.lane_ends) = (Phase::Receiving, vec![0]);
        destination.reconnect = Duration::from_secs(30);
        let last = || Input::Control {
            link: LinkId::CONTROL,
            message: ControlMessage::Final {
                lane_sequences: vec![2],
                digest: 7,
                state: GuestBytes::new(),
                paused: false,
            },
        };
        destination.handle(now, last());
        destination.on_control_lost(now, MigrateError::Cancelled { during: "a test" });
        destination.handle(now, Input::LaneEnded { lane: 0, sequence: 2 });
        assert_eq!(destination.phase, Phase::Placing);
        destination.on_resumed(now);
        assert_eq!(destination.phase, Phase::Receiving, "what FINAL said was withdrawn");
        destination.handle(now, last());
        assert_eq!(destination.phase, Phase::Loading);
        let sums = destination.actions.iter().filter(|action| matches!(action, Action::SumDigest));
        assert_eq!(sums.count(), 1);
    }

    /// The long timeout for comparing memories does not apply once the link is lost.
    #[test]
    fn a_link_that_is_lost_while_memories_are_compared_is_waited_for_as_any_other() {
        let (now, timeouts) = (Duration::from_secs(5), Timeouts::default());
        let mut destination =
            Destination::new(timeouts, Token([1; 16]), DestinationSide::default(), Duration::ZERO);
        (destination.phase, destination.handover) = (Phase::Deciding, DestinationState::Ready);
        (destination.last_heard, destination.verification) = (now, Verification::Announced);
        let before = destination.deadline();
        let verify = Input::Control { link: LinkId::CONTROL, message: ControlMessage::Verify {} };
        destination.handle(now, verify);
        let (deadline, what, _) = destination.deadline().unwrap();
        assert_eq!((deadline, what), (timeouts.verify + timeouts.commit, "COMMIT"));
        assert_eq!(destination.deadline(), before, "VERIFY moves no deadline");
        let error = MigrateError::Cancelled { during: "a test" };
        destination.handle(now + Duration::from_secs(1), Input::LinkLost(error));
        let (deadline, ..) = destination.deadline().unwrap();
        assert_eq!(deadline, now + Duration::from_secs(1) + timeouts.commit);
        // Losing the link a second time does not extend the deadline.
        let error = MigrateError::Cancelled { during: "a test" };
        destination.handle(now + Duration::from_secs(2), Input::LinkLost(error));
        assert_eq!(destination.deadline().unwrap().0, deadline);
    }
}
