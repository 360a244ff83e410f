//! The source's machine: the destination runs the guest and fetches pages from here.
//!
//! The guest never runs here again. This side serves its pages and reestablishes lost channels
//! until the destination has every page, or an operator gives the guest up, or the VMM of a carried
//! guest has ended and its memory is gone.

use std::time::Duration;

use vmferry_handover::{SessionKind, SourceEvent, SourceState, VmError};
use vmferry_wire::{ControlMessage, LaneOffer, LateStreamsId, SessionWord, Token};

use super::common::{Common, ms};
use super::handing_over::Step;
use super::io::{Action, Report};
use super::phase::{Phase, Serving};
use super::reconnect::RETRY;
use crate::causes::chain;
use crate::error::MigrateError;
use crate::link::channel_name;
use crate::vmm::PostCopyFailed;

/// A channel that lived for less is not replaced at once.
const SHORT: Duration = Duration::from_secs(1);

impl Common {
    /// Whether pages are here that the destination lacks, or lacked when its guest crashed.
    fn keeps_pages(&self) -> bool {
        matches!(self.handover, SourceState::Serving | SourceState::Ended)
    }

    /// Reports a failure once, until another one follows.
    pub(super) fn report_serving_failure(&mut self, error: &MigrateError) {
        let reason = chain(error);
        if self.serving_failure.as_ref() != Some(&reason) {
            self.serving_failure = Some(reason.clone());
            self.report(Report::ServingFailed { reason });
        }
    }

    /// Has a fetch lane redialed.
    fn redial_fetch_lane(&mut self, lane: u8, delay: Duration) {
        let channels = self.config.channels.get();
        let index = usize::from(lane.saturating_sub(channels));
        let (Some(token), Some(link)) = (self.links.token, self.post_copy.lanes.get_mut(index))
        else {
            return;
        };
        link.attempts += 1;
        let attempt = link.attempts;
        self.act(Action::RejoinLane { lane, token, attempt, delay });
    }

    /// The fetch lanes that the destination can use from now on, if it lacks pages.
    pub(super) fn lane_offer(&self) -> Option<LaneOffer> {
        let lanes = self.post_copy.announced.filter(|_| self.kind == SessionKind::PostCopy)?;
        let streams = self.post_copy.streams;
        Some(LaneOffer { first: self.config.channels.get(), lanes, streams })
    }

    /// The destination's VMM has these streams. If the VMM of the carried guest has others here,
    /// they are begun again: one of the two processes that carried them has died.
    pub(super) fn use_streams(&mut self, theirs: Option<LateStreamsId>) {
        let Some(theirs) = theirs.filter(|_| self.handover == SourceState::Serving) else { return };
        if self.post_copy.streams != Some(theirs) {
            self.post_copy.streams = Some(theirs);
            self.act(Action::ReconnectVmm);
        }
    }

    /// The destination has answered on another channel: every fetch lane is redialed. The old
    /// channels may have been lost without a trace, and this side, which only answers on them,
    /// would never notice. With a new token, those that are being redialed are dialed again too.
    fn renew_fetch_lanes(&mut self, now: Duration, token: Option<Token>) {
        self.links.token = token.or(self.links.token);
        for (index, lane) in (self.config.channels.get()..).enumerate() {
            let Some(link) = self.post_copy.lanes.get_mut(index) else { return };
            if link.lost.is_none() {
                link.lost = Some(now);
                let reason = "the destination was not heard for a while".to_owned();
                self.report(Report::LinkLost { channel: channel_name(Some(lane)), reason });
            } else if token.is_none() {
                continue;
            }
            self.redial_fetch_lane(lane, Duration::ZERO);
        }
    }
}

impl Phase {
    /// An action has failed, or a VMM by itself.
    pub(super) fn on_failed(self, common: &mut Common, now: Duration, error: MigrateError) -> Self {
        if !matches!(&error, MigrateError::Vm { source, .. } if PostCopyFailed::is_in(source)) {
            return self.fail(common, now, error);
        }
        if matches!(self, Self::Serving(_)) {
            return self.on_not_reconnected(common, now, &error);
        }
        // The destination is asked, and may run the guest.
        common.post_copy.streams = Some(LateStreamsId::NONE);
        self.fail(common, now, error)
    }

    /// The VMM of a carried guest has no streams, and is tried again when the destination answers
    /// again.
    pub(super) fn on_not_reconnected(
        self,
        common: &mut Common,
        now: Duration,
        error: &MigrateError,
    ) -> Self {
        common.post_copy.streams = Some(LateStreamsId::NONE);
        let serving = match self {
            Self::Serving(serving) if common.handover == SourceState::Serving => serving,
            phase => return phase,
        };
        common.report_serving_failure(error);
        common.ask(now, common.timeouts().ask);
        serving.on_ask()
    }

    /// A fetch lane has lost its channel.
    pub(super) fn on_fetch_lane_lost(
        self,
        common: &mut Common,
        now: Duration,
        lane: u8,
        error: MigrateError,
    ) -> Self {
        common.post_copy.are_open = false;
        let index = usize::from(lane.saturating_sub(common.config.channels.get()));
        let Some(link) = common.post_copy.lanes.get_mut(index) else { return self };
        if link.lost.is_some() {
            return self;
        }
        link.lost = Some(now);
        let rejoined = link.rejoined;
        if common.kind != SessionKind::PostCopy {
            return self;
        }
        match common.handover {
            SourceState::Holding if self.awaits_fetching() => self.fail(common, now, error),
            // It is opened again before it is needed.
            SourceState::Holding | SourceState::Ended | SourceState::Given | SourceState::Kept => {
                self
            }
            // The destination may run the guest and use the lane before this side hears of it.
            SourceState::Committing { .. }
            | SourceState::Committed
            | SourceState::InDoubt { .. }
            | SourceState::Serving => {
                let (channel, reason) = (channel_name(Some(lane)), chain(&error));
                common.report(Report::LinkLost { channel, reason });
                // Before this side serves pages, `begin_serving` redials it.
                if common.handover == SourceState::Serving {
                    // A destination that closes each channel at once must not keep this side busy.
                    let is_short = rejoined.is_some_and(|at| now.saturating_sub(at) < SHORT);
                    common.redial_fetch_lane(lane, if is_short { RETRY } else { Duration::ZERO });
                }
                self
            }
        }
    }

    /// Whether the destination may already request pages.
    fn awaits_fetching(&self) -> bool {
        matches!(self, Self::LastRound(_) | Self::AwaitReady(_))
    }

    /// A fetch lane has another channel.
    pub(super) fn on_fetch_lane_rejoined(
        self,
        common: &mut Common,
        now: Duration,
        lane: u8,
    ) -> Self {
        let index = usize::from(lane.saturating_sub(common.config.channels.get()));
        let link = common.post_copy.lanes.get_mut(index);
        let lost = link.and_then(|link| {
            link.rejoined = Some(now);
            link.lost.take()
        });
        if let Some(since) = lost {
            common.stats.reconnections += 1;
            let after_ms = ms(now.saturating_sub(since));
            common.report(Report::LinkRestored { channel: channel_name(Some(lane)), after_ms });
        }
        self
    }

    /// A fetch lane could not be reestablished. A page that the guest needs is only here, so this
    /// side never gives up.
    pub(super) fn on_fetch_lane_not_rejoined(self, common: &mut Common, lane: u8) -> Self {
        if common.handover == SourceState::Serving {
            common.redial_fetch_lane(lane, RETRY);
        }
        self
    }

    /// The destination has run the guest, which has crashed while it lacked pages of it. They are
    /// kept, and nothing is asked or sent any more.
    pub(super) fn begin_keeping(self, common: &mut Common, now: Duration) -> Self {
        self.note_downtime(common, now);
        common.links.forget_losses();
        Self::Serving(Serving { since: now, is_heard: true })
    }

    /// The guest has been started at the destination.
    fn note_downtime(&self, common: &mut Common, now: Duration) {
        if let Some(pause) = self.pause() {
            common.stats.downtime_ms = ms(now.saturating_sub(pause.since));
        }
        if let Some(since) = self.promised_at() {
            common.stats.downtime.commit_ms = ms(now.saturating_sub(since));
        }
    }

    /// The destination runs the guest and lacks pages of it.
    pub(super) fn begin_serving(self, common: &mut Common, now: Duration) -> Self {
        self.note_downtime(common, now);
        let was_asked = matches!(self, Self::Asking(_));
        common.links.forget_losses();
        let first = common.config.channels.get();
        let lost = (first..).zip(&common.post_copy.lanes).filter(|(_, link)| link.lost.is_some());
        let lost: Vec<u8> = lost.map(|(lane, _)| lane).collect();
        lost.into_iter().for_each(|lane| common.redial_fetch_lane(lane, Duration::ZERO));
        if was_asked {
            common.renew_fetch_lanes(now, None);
        }
        common.pings.on_new_channel(now);
        Self::Serving(Serving { since: now, is_heard: true })
    }
}

impl Serving {
    /// The destination has answered. Its channel carries the next word.
    pub(super) fn on_word(
        mut self,
        common: &mut Common,
        now: Duration,
        word: SessionWord,
        token: Option<Token>,
    ) -> Phase {
        let is_new = !std::mem::replace(&mut self.is_heard, true);
        if word == SessionWord::Fetching && (is_new || token.is_some()) {
            common.renew_fetch_lanes(now, token);
        }
        if is_new {
            common.pings.on_new_channel(now);
        }
        Phase::Serving(self)
    }

    /// A process that was restarted knows no token. The destination gives one with an answer to a
    /// question only.
    pub(super) fn ask_for_token(self, common: &mut Common, now: Duration) -> Phase {
        if common.links.token.is_some() || !self.is_heard {
            return Phase::Serving(self);
        }
        common.ask(now, common.timeouts().ask);
        self.on_ask()
    }

    /// Another channel is dialed to ask the destination.
    pub(super) fn on_ask(mut self) -> Phase {
        self.is_heard = false;
        Phase::Serving(self)
    }
}

impl Phase {
    /// The operator gives up a guest that still lacks pages.
    pub(super) fn on_give_up(self, common: &mut Common, now: Duration) -> Self {
        self.lose_pages(common, now, MigrateError::GivenUp)
    }

    /// The VMM of a carried guest has ended. Pages that the destination lacks are lost.
    pub(super) fn on_vmm_ended(self, common: &mut Common, now: Duration, source: VmError) -> Self {
        if common.keeps_pages() {
            return self.lose_pages(common, now, MigrateError::PagesLost { source });
        }
        common.vmm_has_ended = true;
        self.fail(common, now, MigrateError::of_vm("stream the guest", source))
    }

    /// No page is sent any more. Means nothing before the destination runs the guest.
    fn lose_pages(self, common: &mut Common, now: Duration, error: MigrateError) -> Self {
        let (next, effects) = common.handover.step(SourceEvent::GiveUp);
        let by_operator = matches!(error, MigrateError::GivenUp);
        if common.keeps_pages() {
            // The destination can't notice it: its guest only waits.
            let reason = error.reason_for_peer();
            common.act(Action::Send(ControlMessage::Abort { reason }));
            common.lost = Some(error);
        }
        self.follow(common, now, Step { next, effects, by_operator })
    }
}
