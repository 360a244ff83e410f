//! The source's machine: lost channels are reestablished, and what was sent on them is not lost.
//!
//! Until READY a broken link costs only time. Every frame is kept until the destination
//! acknowledges that it is placed, so a lane continues from what the destination has. The guest
//! never waits for that: if it was already paused, it is resumed here, and the pages of the
//! interrupted round are sent again in the next one.

use std::time::Duration;

use vmferry_wire::{ControlMessage, Token};

use super::io::{Action, Report};
use super::{Phase, Source, ms};
use crate::causes::chain;
use crate::error::{ErrorClass, MigrateError};
use crate::link::{EXPLANATION, Loss, channel_name};
use vmferry_handover::{SourceEvent, SourceState};

/// Interval between two attempts to reestablish a channel.
const RETRY: Duration = Duration::from_millis(200);

/// Which channels are lost, and how often each was dialed.
#[derive(Debug)]
pub(super) struct Links {
    token: Token,
    control: Link,
    lanes: Vec<Link>,
    /// Since when at least one is missing.
    down_since: Option<Duration>,
}

#[derive(Debug, Default)]
struct Link {
    /// Attempts to redial so far.
    attempts: u64,
    loss: Option<Loss>,
    /// The cause of the loss, for a lane on which nothing is sent at present. It counts if the
    /// guest runs on here.
    idle_loss: Option<MigrateError>,
}

impl Links {
    pub(super) fn new(lanes: u8) -> Self {
        let lanes = (0..lanes).map(|_| Link::default()).collect();
        Self { token: Token([0; 16]), control: Link::default(), lanes, down_since: None }
    }

    /// The token of the session.
    pub(super) fn token(&self) -> Token {
        self.token
    }

    /// Sets the token that data channels and a resumed control channel must present.
    pub(super) fn set_token(&mut self, token: Token) {
        self.token = token;
    }

    pub(super) fn is_control_up(&self) -> bool {
        self.control.loss.is_none()
    }

    pub(super) fn are_up(&self) -> bool {
        self.all().all(|link| link.loss.is_none())
    }

    fn all(&self) -> impl Iterator<Item = &Link> {
        std::iter::once(&self.control).chain(&self.lanes)
    }

    /// The channel of a lane, or the control channel.
    fn of(&mut self, lane: Option<u8>) -> Option<&mut Link> {
        match lane {
            Some(lane) => self.lanes.get_mut(usize::from(lane)),
            None => Some(&mut self.control),
        }
    }

    /// When the timeout of the first lost channel expires.
    pub(super) fn deadline(&self, patience: Duration) -> Option<Duration> {
        self.all().filter_map(|link| link.loss.as_ref()).map(|loss| loss.since + patience).min()
    }

    /// Events were not processed for this long, so a reestablished channel could not be reported.
    pub(super) fn were_unheard(&mut self, now: Duration, took: Duration) {
        for link in std::iter::once(&mut self.control).chain(&mut self.lanes) {
            if let Some(loss) = &mut link.loss {
                loss.since = now.min(loss.since + took);
            }
        }
    }

    /// The error that ends the migration, if the timeout of a lost channel has expired.
    pub(super) fn take_overdue(
        &mut self,
        now: Duration,
        patience: Duration,
    ) -> Option<MigrateError> {
        let overdue = |link: &mut Link| link.loss.take_if(|loss| now >= loss.since + patience);
        let loss = overdue(&mut self.control).or_else(|| self.lanes.iter_mut().find_map(overdue));
        loss.map(|loss| loss.error)
    }
}

impl Source {
    /// How long to wait for a lost channel. After the loss of a data channel, the control channel
    /// may still report the reason.
    pub(super) fn patience(&self) -> Duration {
        if self.may_reconnect() { self.timeouts().reconnect.max(EXPLANATION) } else { EXPLANATION }
    }

    /// Whether a lost channel can be reestablished: the destination knows the session, and nothing
    /// is promised.
    fn may_reconnect(&self) -> bool {
        // A VMM that has stopped its guest can't resume it and still continue its streams.
        let too_late = self.our_side.streams && self.phase != Phase::Sending;
        self.handover == SourceState::Holding
            && !self.timeouts().reconnect.is_zero()
            && !too_late
            && matches!(
                self.phase,
                Phase::Sending
                    | Phase::Harvesting
                    | Phase::Pausing
                    | Phase::LastHarvest
                    | Phase::LastRound
                    | Phase::AwaitReady
            )
    }

    pub(super) fn on_control_lost(&mut self, now: Duration, error: MigrateError) {
        if !self.may_reconnect() {
            return self.fail_by(now, SourceEvent::LinkLost, error);
        }
        // After a silence the state of all channels is unknown. New channels are available sooner
        // than old ones that wait for TCP retransmissions.
        let silent = matches!(error, MigrateError::TimedOut { .. });
        self.lose(now, None, error);
        if silent {
            for lane in 0..self.config.channels {
                if !self.rounds.is_lane_done(lane) {
                    let error = MigrateError::LinkLost {
                        channel: channel_name(Some(lane)),
                        during: self.phase.name(),
                        detail: "nothing is heard of the other side".into(),
                    };
                    self.lose(now, Some(lane), error);
                }
            }
        }
        self.recall(now);
    }

    pub(super) fn on_lane_lost(&mut self, now: Duration, lane: u8, error: MigrateError) {
        let needed = match self.phase {
            // All frames of this lane have arrived, or all of them will be sent again.
            Phase::AwaitReady => !self.rounds.is_lane_done(lane),
            Phase::Verifying | Phase::HandingOver | Phase::Asking | Phase::Done => false,
            _ => true,
        };
        if !needed {
            if let Some(link) = self.links.of(Some(lane)) {
                link.idle_loss = Some(error);
            }
            return;
        }
        self.lose(now, Some(lane), error);
        if self.may_reconnect() {
            self.recall(now);
        }
    }

    /// Records the loss of a channel, and has it reestablished if that is wanted.
    fn lose(&mut self, now: Duration, lane: Option<u8>, error: MigrateError) {
        let reason = chain(&error);
        match self.links.of(lane) {
            Some(link) if link.loss.is_none() => link.loss = Some(Loss { since: now, error }),
            _ => return,
        }
        if !self.may_reconnect() {
            return;
        }
        self.links.down_since.get_or_insert(now);
        self.rounds.interrupted();
        self.act(Action::Report(Report::LinkLost { channel: channel_name(lane), reason }));
        self.dial(lane, Duration::ZERO);
    }

    fn dial(&mut self, lane: Option<u8>, delay: Duration) {
        let token = self.links.token;
        let Some(link) = self.links.of(lane) else { return };
        link.attempts += 1;
        let attempt = link.attempts;
        self.act(match lane {
            Some(lane) => Action::RejoinLane { lane, token, attempt, delay },
            None => Action::ResumeControl { token, attempt, delay },
        });
    }

    /// Resumes the guest if it was paused and not everything is known to have arrived.
    pub(super) fn recall(&mut self, now: Duration) {
        if self.our_side.streams || !matches!(self.phase, Phase::LastRound | Phase::AwaitReady) {
            return;
        }
        self.act(Action::Recall);
        self.act(Action::Report(Report::Recalled));
        if self.phase == Phase::AwaitReady {
            // The data channels may overtake WITHDRAW, and a READY may be in flight, which looks
            // like the next one if the guest has written nothing. So no other round begins before
            // the destination has answered or has accepted another control channel.
            self.withdrawn = Some(u64::MAX);
            if self.links.is_control_up() {
                self.act(Action::Send(ControlMessage::Withdraw {}));
                self.send_ping(now);
                self.withdrawn = Some(self.pings);
            }
        }
        self.state = None;
        self.digest = None;
        self.comparison.withdraw();
        (self.stats.verify_ms, self.stats.verify_match) = (0.0, None);
        self.stats.recalls += 1;
        if let Some(stopped_at) = self.stopped_at.take() {
            self.stats.recalled_pause_ms += ms(now.saturating_sub(stopped_at));
        }
        self.rounds.recalled();
        self.enter(now, Phase::Sending);
        // The loss of a channel is reported only once, and the channel is needed again now.
        for lane in 0..self.config.channels {
            let error = self.links.of(Some(lane)).and_then(|link| link.idle_loss.take());
            if let Some(error) = error {
                self.lose(now, Some(lane), error);
            }
        }
        self.go_on(now);
    }

    /// A channel was reestablished.
    fn restore(&mut self, now: Duration, lane: Option<u8>) {
        let Some(loss) = self.links.of(lane).and_then(|link| link.loss.take()) else { return };
        self.waiting_since = now;
        self.stats.reconnections += 1;
        let after_ms = ms(now.saturating_sub(loss.since));
        self.act(Action::Report(Report::LinkRestored { channel: channel_name(lane), after_ms }));
        if self.links.are_up()
            && let Some(since) = self.links.down_since.take()
        {
            self.stats.link_down_ms += ms(now.saturating_sub(since));
        }
    }

    pub(super) fn on_resumed(&mut self, now: Duration) {
        self.last_heard = now;
        // A destination that resumes a session has discarded FINAL, and the old channel is no
        // longer read.
        self.withdrawn = None;
        self.ping = None;
        self.next_ping = now;
        self.restore(now, None);
        self.go_on(now);
    }

    pub(super) fn on_lane_rejoined(&mut self, now: Duration, lane: u8, placed: u64) {
        self.restore(now, Some(lane));
        self.rounds.placed(lane, placed);
        self.finish_round(now);
    }

    pub(super) fn on_resent(&mut self, lane: u8, frames: u64, bytes: u64) {
        self.stats.resent_bytes += bytes;
        self.act(Action::Report(Report::Resent { lane, frames, bytes }));
    }

    /// A channel could not be reestablished. A destination that refuses has ended the session, and
    /// may be reporting the reason on the control channel at this moment.
    pub(super) fn on_not_restored(&mut self, now: Duration, lane: Option<u8>, error: MigrateError) {
        let Some(loss) = self.links.of(lane).and_then(|link| link.loss.as_ref()) else { return };
        let explained = lane.is_none() || now >= loss.since + EXPLANATION;
        let refused = matches!(error, MigrateError::Refused { .. })
            || !matches!(error.class(), ErrorClass::Connect | ErrorClass::LinkLost);
        if refused && explained {
            return self.fail_by(now, SourceEvent::LinkLost, error);
        }
        self.dial(lane, RETRY);
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{DIGEST, awaiting_ready};
    use super::*;
    use crate::config::SourceConfig;
    use crate::machine::source::io::Input;

    /// A machine that has sent FINAL and then lost its lane, so that the guest was resumed.
    /// Everything was placed since.
    fn recalled() -> Source {
        let mut source = awaiting_ready(SourceConfig::new("unused".into()), false);
        source.handle(Duration::ZERO, lane_lost());
        source.handle(Duration::ZERO, Input::LaneRejoined { lane: 0, placed: 2 });
        assert_eq!((source.phase, source.stats.recalls), (Phase::Sending, 1));
        source
    }

    fn lane_lost() -> Input {
        Input::LaneLost { lane: 0, attempt: 0, error: failure() }
    }

    fn rejoins_its_lane(source: &mut Source) -> bool {
        std::iter::from_fn(|| source.next_action())
            .any(|action| matches!(action, Action::RejoinLane { lane: 0, .. }))
    }

    fn failure() -> MigrateError {
        MigrateError::Cancelled { during: "a test" }
    }

    #[test]
    fn the_next_round_waits_until_the_destination_knows_that_the_guest_runs_on() {
        let mut source = recalled();
        let nonce = source.pings;
        source.handle(Duration::ZERO, Input::Control(ControlMessage::Pong { nonce: nonce - 1 }));
        assert_eq!(source.phase, Phase::Sending, "that was another ping");
        source.handle(Duration::ZERO, Input::Control(ControlMessage::Pong { nonce }));
        assert_eq!(source.phase, Phase::Harvesting);
    }

    #[test]
    fn a_lane_that_was_lost_when_it_was_done_is_made_again_once_it_is_needed() {
        let mut source = awaiting_ready(SourceConfig::new("unused".into()), false);
        let placed = Input::Control(ControlMessage::Placed { lane: 0, sequence: 2 });
        source.handle(Duration::ZERO, placed);
        source.handle(Duration::ZERO, lane_lost());
        assert!(!rejoins_its_lane(&mut source), "all of it has arrived");
        // The guest is resumed now, and its next round needs the lane.
        source.handle(Duration::ZERO, Input::LinkLost(failure()));
        assert_eq!((source.phase, source.stats.recalls), (Phase::Sending, 1));
        assert!(rejoins_its_lane(&mut source));
    }

    #[test]
    fn an_old_ready_ends_the_migration() {
        let mut source = recalled();
        let ready = ControlMessage::Ready { digest: DIGEST, load_us: 0 };
        source.handle(Duration::ZERO, Input::Control(ready));
        assert_eq!(source.handover(), SourceState::Kept);
    }

    #[test]
    fn a_destination_that_lets_the_source_go_on_knows_too() {
        let mut source = recalled();
        source.handle(Duration::ZERO, Input::LinkLost(failure()));
        assert_eq!(source.phase, Phase::Sending);
        source.handle(Duration::ZERO, Input::Resumed);
        assert_eq!(source.phase, Phase::Harvesting);
    }
}
