//! The source's machine: switchover with post-copy.
//!
//! The guest is paused while pages are still to be sent. LACKING names them, FINAL follows at once,
//! and the destination requests them on fetch lanes while its guest runs. From FINAL on this side
//! only answers requests. After COMMIT it can't resume the guest: it serves pages, and
//! reestablishes lost channels for as long as that takes.
//!
//! Until COMMIT every failure resumes the guest here. So does a lost link: the destination has
//! freed outdated pages by then, and the source would have to send them again.

use std::time::Duration;

use vmferry_wire::{ControlMessage, FetchLanes, SessionWord};

use super::common::{Common, ms};
use super::io::{Action, Report};
use super::phase::{Found, Harvesting, LastRound, OpeningFetch, Pause, Phase, Serving};
use super::reconnect::RETRY;
use crate::causes::chain;
use crate::config::{PostCopy, WhenStuck};
use crate::error::MigrateError;
use crate::link::channel_name;
use crate::rounds::convergence::{Decision, Harvest};
use crate::stats::forecast::Verdict;
use vmferry_handover::{SessionKind, SourceState};

/// Whether and when to switch over with post-copy.
#[derive(Debug)]
pub(super) struct PostCopyPlan {
    pub(super) policy: PostCopy,
    /// The lanes that were announced, if this guest can be moved with post-copy.
    pub(super) announced: Option<FetchLanes>,
    /// Whether the destination has accepted that.
    pub(super) accepted: bool,
    /// Whether all fetch lanes have channels, as far as is known.
    are_open: bool,
    lanes: Vec<FetchLink>,
    /// What the previous harvest found.
    before: Option<Before>,
}

/// The channel of a fetch lane.
#[derive(Clone, Copy, Debug, Default)]
struct FetchLink {
    /// Attempts to redial so far.
    attempts: u64,
    /// Since when it has been lost.
    lost: Option<Duration>,
}

/// The previous harvest.
#[derive(Clone, Copy, Debug)]
struct Before {
    pages: u64,
    converges: bool,
}

impl PostCopyPlan {
    pub(super) fn new(policy: PostCopy, announced: Option<FetchLanes>) -> Self {
        let count = announced.map_or(0, FetchLanes::count);
        Self {
            policy,
            announced,
            accepted: false,
            are_open: false,
            lanes: vec![FetchLink::default(); usize::from(count)],
            before: None,
        }
    }

    /// Whether to switch over with post-copy after a harvest for which pre-copy has decided so.
    ///
    /// `auto` does if the rounds do not converge, and at a local minimum: not while the guest has
    /// more to send than before, unless that is already the second such round.
    fn is_due(&mut self, decision: &Decision, verdict: Verdict, harvest: Harvest) -> bool {
        let pages = harvest.pending_pages;
        let converges = verdict != Verdict::NotConverging;
        let before = self.before.replace(Before { pages, converges });
        if !self.accepted {
            return false;
        }
        match (decision, self.policy) {
            // The rest fits the downtime limit.
            (Decision::SwitchOver, _) => false,
            (Decision::PostCopy, _) => true,
            (_, PostCopy::Never) => false,
            (_, PostCopy::Now) => true,
            (Decision::GiveUp(_), PostCopy::Auto) => true,
            (Decision::AnotherRound, PostCopy::Auto) => {
                !converges
                    && before.is_some_and(|before| pages <= before.pages || !before.converges)
            }
        }
    }
}

impl Common {
    /// The destination's answer is known. Returns an error if the user relies on post-copy and it
    /// can't be used.
    pub(super) fn agree_on_post_copy(&mut self, accepted: bool) -> Result<(), MigrateError> {
        self.post_copy.accepted = accepted && self.post_copy.announced.is_some();
        let relied_on =
            self.post_copy.policy == PostCopy::Now || self.config.when_stuck == WhenStuck::PostCopy;
        if self.post_copy.accepted || self.post_copy.policy == PostCopy::Never && !relied_on {
            return Ok(());
        }
        let why = self.no_post_copy();
        if relied_on {
            return Err(MigrateError::NoPostCopy { why });
        }
        self.report(Report::PostCopyUnavailable { why });
        Ok(())
    }

    /// Why this guest can't be moved with post-copy.
    fn no_post_copy(&self) -> &'static str {
        if self.config.verify {
            "both memories are to be compared before the switchover, and would not be complete"
        } else if self.post_copy.announced.is_none() {
            "its VMM streams the guest, or the destination speaks version 1 of the protocol"
        } else {
            "the destination does not support it for this guest"
        }
    }

    /// The user changes the policy.
    pub(super) fn change_post_copy(&mut self, policy: PostCopy) {
        if policy != PostCopy::Never && !self.post_copy.accepted {
            let why = self.no_post_copy();
            self.report(Report::PostCopyUnavailable { why });
        }
        self.post_copy.policy = policy;
    }

    /// Whether the switchover that follows a harvest has post-copy.
    pub(super) fn is_post_copy_due(&mut self, decision: &Decision, harvest: Harvest) -> bool {
        let verdict = self.pace.predictor.forecast(harvest, self.pace.throttle.has_more()).verdict;
        let is_held = self.pace.hold.wanted;
        self.post_copy.is_due(decision, verdict, harvest) && !is_held && self.links.are_up()
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

    /// Has every fetch lane redialed that is not being redialed anyway: the destination has
    /// answered on another channel. The old channels may have been lost without a trace, and this
    /// side, which only answers on them, would never notice.
    fn renew_fetch_lanes(&mut self, now: Duration) {
        for (index, lane) in (self.config.channels.get()..).enumerate() {
            let Some(link) = self.post_copy.lanes.get_mut(index) else { return };
            if link.lost.is_some() {
                continue;
            }
            link.lost = Some(now);
            let reason = "the destination was not heard for a while".to_owned();
            self.report(Report::LinkLost { channel: channel_name(Some(lane)), reason });
            self.redial_fetch_lane(lane, Duration::ZERO);
        }
    }
}

impl Harvesting {
    /// The harvest is the last one with the guest running: fetch lanes are opened, unless they are.
    pub(super) fn begin_post_copy(self, common: &mut Common, now: Duration, found: Found) -> Phase {
        common.begin_wait(now);
        // Freeing pages takes a while, so the destination learns of most of them while the guest
        // still runs.
        common.act(Action::TellLacking);
        let ping = Some(common.send_ping(now));
        let opening = OpeningFetch { found, are_open: common.post_copy.are_open, ping };
        if opening.are_open {
            return Phase::OpeningFetch(opening);
        }
        if let (Some(token), Some(lanes)) = (common.links.token, common.post_copy.announced) {
            let attempts = |link: &mut FetchLink| {
                let attempt = link.attempts;
                // If this fails, the next attempt has another number.
                link.attempts += 1;
                attempt
            };
            let attempts = common.post_copy.lanes.iter_mut().map(attempts).collect();
            common.act(Action::OpenFetchLanes { token, lanes, attempts });
        }
        Phase::OpeningFetch(opening)
    }
}

impl OpeningFetch {
    /// All fetch lanes have channels.
    pub(super) fn on_opened(mut self, common: &mut Common, now: Duration) -> Phase {
        self.are_open = true;
        common.post_copy.are_open = true;
        common.post_copy.lanes.iter_mut().for_each(|link| link.lost = None);
        self.go_on(common, now)
    }

    /// A ping was answered.
    pub(super) fn on_pong(mut self, common: &mut Common, now: Duration, nonce: u64) -> Phase {
        self.ping.take_if(|ping| nonce >= *ping);
        self.go_on(common, now)
    }

    /// The control channel was reestablished. The destination has withdrawn LACKING, and it frees
    /// no more pages because of it.
    pub(super) fn on_resumed(self, common: &mut Common, now: Duration) -> Phase {
        common.start_running_round(now, self.found)
    }

    fn go_on(self, common: &mut Common, now: Duration) -> Phase {
        if !self.are_open || self.ping.is_some() || !common.links.is_control_up() {
            return Phase::OpeningFetch(self);
        }
        if !common.links.are_up() || !common.post_copy.are_open {
            // All of these pages are sent as in pre-copy.
            common.act(Action::Send(ControlMessage::Withdraw {}));
            return common.start_running_round(now, self.found);
        }
        common.kind = SessionKind::PostCopy;
        common.pause_guest(now, 0)
    }
}

impl Pause {
    /// All pages that the destination will lack are known.
    pub(super) fn begin_post_copy(self, common: &mut Common, now: Duration, pages: u64) -> Phase {
        let round = common.rounds.round() + 1;
        common.stats.missing_pages = pages;
        common.report(Report::PostCopy { round, pages });
        common.act(Action::TellLacking);
        common.act(Action::SumDigest);
        common.act(Action::Save);
        common.begin_wait(now);
        Phase::LastRound(LastRound::new(self, now))
    }
}

impl Phase {
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
        match (common.kind, common.handover) {
            (SessionKind::PostCopy, SourceState::Serving) => {
                let (channel, reason) = (channel_name(Some(lane)), chain(&error));
                common.report(Report::LinkLost { channel, reason });
                common.redial_fetch_lane(lane, Duration::ZERO);
                self
            }
            (SessionKind::PostCopy, SourceState::Holding) if self.awaits_fetching() => {
                self.fail(common, now, error)
            }
            // It is opened again before it is needed, or redialed when this side serves pages.
            _ => self,
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
        let lost = common.post_copy.lanes.get_mut(index).and_then(|link| link.lost.take());
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

    /// The destination runs the guest and lacks pages of it.
    pub(super) fn begin_serving(self, common: &mut Common, now: Duration) -> Self {
        if let Some(pause) = self.pause() {
            common.stats.downtime_ms = ms(now.saturating_sub(pause.since));
        }
        if let Some(since) = self.promised_at() {
            common.stats.downtime.commit_ms = ms(now.saturating_sub(since));
        }
        let was_asked = matches!(self, Self::Asking(_));
        common.report(Report::Serving { pages: common.stats.missing_pages });
        common.links.forget_losses();
        let first = common.config.channels.get();
        let lost = (first..).zip(&common.post_copy.lanes).filter(|(_, link)| link.lost.is_some());
        let lost: Vec<u8> = lost.map(|(lane, _)| lane).collect();
        lost.into_iter().for_each(|lane| common.redial_fetch_lane(lane, Duration::ZERO));
        if was_asked {
            common.renew_fetch_lanes(now);
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
    ) -> Phase {
        if !std::mem::replace(&mut self.is_heard, true) {
            if word == SessionWord::Fetching {
                common.renew_fetch_lanes(now);
            }
            common.pings.on_new_channel(now);
        }
        Phase::Serving(self)
    }

    /// Another channel is dialed to ask the destination.
    pub(super) fn on_ask(mut self) -> Phase {
        self.is_heard = false;
        Phase::Serving(self)
    }
}

#[cfg(test)]
mod tests;
