//! The source's machine: lost channels are reestablished, and what was sent on them is not lost.
//!
//! Until READY a broken link costs only time. Every frame is kept until the destination
//! acknowledges that it is placed, so a lane continues from what the destination has. The guest
//! never waits for that: if it was already paused, it is resumed here, and the pages of the
//! interrupted round are sent again in the next one.

use std::time::Duration;

use vmferry_wire::ControlMessage;

use super::common::{Common, ms};
use super::io::{Action, Report};
use super::phase::{AwaitReady, LastRound, Phase, Sending, Withdrawal};
use crate::causes::chain;
use crate::error::{ErrorClass, MigrateError};
use crate::link::{EXPLANATION, Loss, channel_name};
use vmferry_handover::{SessionKind, SourceEvent, SourceState};

/// Interval between two attempts to reestablish a channel.
pub(super) const RETRY: Duration = Duration::from_millis(200);

impl Phase {
    /// How long to wait for a lost channel. After the loss of a data channel, the control channel
    /// may still report the reason.
    pub(super) fn patience(&self, common: &Common) -> Duration {
        if self.may_reconnect(common) {
            common.timeouts().reconnect.max(EXPLANATION)
        } else {
            EXPLANATION
        }
    }

    /// Whether a lost channel can be reestablished: the destination knows the session, and nothing
    /// is promised.
    pub(super) fn may_reconnect(&self, common: &Common) -> bool {
        // A VMM that has stopped its guest can't resume it and still continue its streams.
        let too_late = common.our_side.streams && !matches!(self, Self::Sending(_))
            || common.kind == SessionKind::PostCopy
                && matches!(self, Self::LastRound(_) | Self::AwaitReady(_));
        common.handover == SourceState::Holding
            && !common.timeouts().reconnect.is_zero()
            && !too_late
            && matches!(
                self,
                Self::Sending(_)
                    | Self::Harvesting(_)
                    | Self::OpeningFetch(_)
                    | Self::Pausing(_)
                    | Self::LastHarvest(_)
                    | Self::LastRound(_)
                    | Self::AwaitReady(_)
            )
    }

    pub(super) fn on_control_lost(
        self,
        common: &mut Common,
        now: Duration,
        error: MigrateError,
    ) -> Self {
        if !self.may_reconnect(common) {
            return self.fail_by(common, now, SourceEvent::LinkLost, error);
        }
        // After a silence the state of all channels is unknown. New channels are available sooner
        // than old ones that wait for TCP retransmissions.
        let silent = matches!(error, MigrateError::TimedOut { .. });
        self.lose(common, now, None, error);
        if silent {
            for lane in 0..common.config.channels.get() {
                if !common.rounds.is_lane_done(lane) {
                    let error = MigrateError::LinkLost {
                        channel: channel_name(Some(lane)),
                        during: self.name(),
                        detail: "nothing is heard of the other side".into(),
                    };
                    self.lose(common, now, Some(lane), error);
                }
            }
        }
        self.recall(common, now)
    }

    pub(super) fn on_lane_lost(
        self,
        common: &mut Common,
        now: Duration,
        lane: u8,
        error: MigrateError,
    ) -> Self {
        let needed = match self {
            // All frames of this lane have arrived, or all of them will be sent again.
            Self::AwaitReady(_) => !common.rounds.is_lane_done(lane),
            Self::Verifying(_)
            | Self::HandingOver(_)
            | Self::Asking(_)
            | Self::Serving(_)
            | Self::Done => false,
            _ => true,
        };
        if !needed {
            if let Some(link) = common.links.of(Some(lane)) {
                link.idle_loss = Some(error);
            }
            return self;
        }
        self.lose(common, now, Some(lane), error);
        if self.may_reconnect(common) { self.recall(common, now) } else { self }
    }

    /// Records the loss of a channel, and has it reestablished if that is wanted.
    fn lose(&self, common: &mut Common, now: Duration, lane: Option<u8>, error: MigrateError) {
        let reason = chain(&error);
        match common.links.of(lane) {
            Some(link) if link.loss.is_none() => link.loss = Some(Loss { since: now, error }),
            _ => return,
        }
        if !self.may_reconnect(common) {
            return;
        }
        common.links.down_since.get_or_insert(now);
        common.rounds.interrupted();
        common.report(Report::LinkLost { channel: channel_name(lane), reason });
        common.dial(lane, Duration::ZERO);
    }

    /// Resumes the guest if it was paused and not everything is known to have arrived.
    pub(super) fn recall(self, common: &mut Common, now: Duration) -> Self {
        match self {
            phase if common.our_side.streams || common.kind == SessionKind::PostCopy => phase,
            Self::LastRound(last) => last.recall(common, now),
            Self::AwaitReady(waiting) => waiting.recall(common, now),
            phase => phase,
        }
    }

    /// The control channel was reestablished.
    pub(super) fn on_resumed(self, common: &mut Common, now: Duration) -> Self {
        // A destination that resumes a session has discarded FINAL, and the old channel is no
        // longer read.
        common.pings.on_new_channel(now);
        common.restore(now, None);
        match self {
            Self::Sending(_) => Sending { withdrawal: None }.go_on(common, now),
            Self::OpeningFetch(opening) => opening.on_resumed(common, now),
            phase => phase,
        }
    }

    pub(super) fn on_lane_rejoined(
        self,
        common: &mut Common,
        now: Duration,
        lane: u8,
        placed: u64,
    ) -> Self {
        common.restore(now, Some(lane));
        common.rounds.placed(lane, placed);
        self.finish_round(common, now)
    }

    /// A channel could not be reestablished. A destination that refuses has ended the session, and
    /// may be reporting the reason on the control channel at this moment.
    pub(super) fn on_not_restored(
        self,
        common: &mut Common,
        now: Duration,
        lane: Option<u8>,
        error: MigrateError,
    ) -> Self {
        let Some(loss) = common.links.of(lane).and_then(|link| link.loss.as_ref()) else {
            return self;
        };
        let explained = lane.is_none() || now >= loss.since + EXPLANATION;
        let refused = matches!(error, MigrateError::Refused { .. })
            || !matches!(error.class(), ErrorClass::Connect | ErrorClass::LinkLost);
        if refused && explained {
            return self.fail_by(common, now, SourceEvent::LinkLost, error);
        }
        common.dial(lane, RETRY);
        self
    }
}

impl LastRound {
    fn recall(self, common: &mut Common, now: Duration) -> Phase {
        common.resume_guest();
        common.begin_sending_again(now, self.pause.since, Sending { withdrawal: None })
    }
}

impl AwaitReady {
    fn recall(self, common: &mut Common, now: Duration) -> Phase {
        common.resume_guest();
        // The data channels may overtake WITHDRAW, and a READY may be in flight, which looks like
        // the next one if the guest has written nothing. So no other round begins before the
        // destination has answered or has accepted another control channel.
        let withdrawal = if common.links.is_control_up() {
            common.act(Action::Send(ControlMessage::Withdraw {}));
            Withdrawal::SentBefore(common.send_ping(now))
        } else {
            Withdrawal::Unsent
        };
        let sending = Sending { withdrawal: Some(withdrawal) };
        common.begin_sending_again(now, self.pause.since, sending)
    }
}

impl Common {
    fn resume_guest(&mut self) {
        self.act(Action::Recall);
        self.report(Report::Recalled);
    }

    /// Continues with pre-copy after a pause that was for nothing.
    fn begin_sending_again(
        &mut self,
        now: Duration,
        paused_since: Duration,
        sending: Sending,
    ) -> Phase {
        (self.stats.verify_ms, self.stats.verify_match) = (0.0, None);
        self.stats.recalls += 1;
        self.stats.recalled_pause_ms += ms(now.saturating_sub(paused_since));
        self.rounds.recalled();
        self.begin_wait(now);
        let phase = Phase::Sending(sending);
        // The loss of a channel is reported only once, and the channel is needed again now.
        for lane in 0..self.config.channels.get() {
            let error = self.links.of(Some(lane)).and_then(|link| link.idle_loss.take());
            if let Some(error) = error {
                phase.lose(self, now, Some(lane), error);
            }
        }
        phase.go_on(self, now)
    }

    fn dial(&mut self, lane: Option<u8>, delay: Duration) {
        let (Some(token), Some(link)) = (self.links.token, self.links.of(lane)) else { return };
        link.attempts += 1;
        let attempt = link.attempts;
        self.act(match lane {
            Some(lane) => Action::RejoinLane { lane, token, attempt, delay },
            None => Action::ResumeControl { token, attempt, delay },
        });
    }

    /// A channel was reestablished.
    fn restore(&mut self, now: Duration, lane: Option<u8>) {
        let Some(loss) = self.links.of(lane).and_then(|link| link.loss.take()) else { return };
        self.wait.since = now;
        self.stats.reconnections += 1;
        let after_ms = ms(now.saturating_sub(loss.since));
        self.report(Report::LinkRestored { channel: channel_name(lane), after_ms });
        if self.links.are_up()
            && let Some(since) = self.links.down_since.take()
        {
            self.stats.link_down_ms += ms(now.saturating_sub(since));
        }
    }

    pub(super) fn on_resent(&mut self, lane: u8, frames: u64, bytes: u64) {
        self.stats.resent_bytes += bytes;
        self.report(Report::Resent { lane, frames, bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{DIGEST, assert_phase, awaiting_ready, placed};
    use super::*;
    use crate::config::SourceConfig;
    use crate::machine::source::Source;
    use crate::machine::source::io::Input;

    /// A machine that has sent FINAL and then lost its lane, so that the guest was resumed.
    /// Everything was placed since.
    fn recalled() -> Source {
        let mut source = awaiting_ready(SourceConfig::new("unused".into()), false);
        source.handle(Duration::ZERO, lane_lost());
        source.handle(Duration::ZERO, Input::LaneRejoined { lane: 0, placed: 2 });
        assert_phase!(source, Sending);
        assert_eq!(source.common.stats.recalls, 1);
        source
    }

    fn lane_lost() -> Input {
        Input::LaneLost { lane: 0, attempt: 0, error: failure() }
    }

    /// The channels of a carried guest are not reestablished once it is stopped. READY may take
    /// long: the VMM loads the guest.
    #[test]
    fn channel_may_be_closed_before_the_acknowledgment_of_its_last_frame_arrives() {
        for last_placed in [2, 1] {
            let mut source = awaiting_ready(SourceConfig::new("unused".into()), false);
            source.common.our_side.streams = true;
            source.handle(Duration::ZERO, lane_lost());
            source.handle(EXPLANATION / 2, placed(last_placed));
            source.handle(EXPLANATION * 2, Input::Tick);
            let has_ended = matches!(source.phase, Phase::Done);
            assert_eq!(has_ended, last_placed < 2, "{:?}", source.phase);
        }
    }

    fn rejoins_its_lane(source: &mut Source) -> bool {
        std::iter::from_fn(|| source.next_action())
            .any(|action| matches!(action, Action::RejoinLane { lane: 0, .. }))
    }

    fn failure() -> MigrateError {
        MigrateError::Cancelled { during: "a test" }
    }

    #[test]
    fn next_round_waits_for_the_answer_to_withdraw() {
        let mut source = recalled();
        let nonce = source.common.pings.sent;
        source.handle(Duration::ZERO, Input::Control(ControlMessage::Pong { nonce: nonce - 1 }));
        assert_phase!(source, Sending, "that was another ping");
        source.handle(Duration::ZERO, Input::Control(ControlMessage::Pong { nonce }));
        assert_phase!(source, Harvesting);
    }

    #[test]
    fn lane_lost_while_idle_is_redialed_once_it_is_needed() {
        let mut source = awaiting_ready(SourceConfig::new("unused".into()), false);
        let placed = Input::Control(ControlMessage::Placed { lane: 0, sequence: 2 });
        source.handle(Duration::ZERO, placed);
        source.handle(Duration::ZERO, lane_lost());
        assert!(!rejoins_its_lane(&mut source), "all of it has arrived");
        // The guest is resumed now, and its next round needs the lane.
        source.handle(Duration::ZERO, Input::LinkLost(failure()));
        assert_phase!(source, Sending);
        assert_eq!(source.common.stats.recalls, 1);
        assert!(rejoins_its_lane(&mut source));
    }

    #[test]
    fn ready_for_a_withdrawn_final_ends_the_migration() {
        let mut source = recalled();
        let ready = ControlMessage::Ready { digest: DIGEST, load_us: 0 };
        source.handle(Duration::ZERO, Input::Control(ready));
        assert_eq!(source.handover(), SourceState::Kept);
    }

    #[test]
    fn next_round_begins_once_the_control_channel_is_reestablished() {
        let mut source = recalled();
        source.handle(Duration::ZERO, Input::LinkLost(failure()));
        assert_phase!(source, Sending);
        source.handle(Duration::ZERO, Input::Resumed);
        assert_phase!(source, Harvesting);
    }
}
