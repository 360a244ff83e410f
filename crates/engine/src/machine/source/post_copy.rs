//! The source's machine: switchover with post-copy.
//!
//! The guest is paused while pages are still to be sent. LACKING names them, FINAL follows at once,
//! and the destination requests them on fetch lanes while its guest runs. From FINAL on this side
//! only answers requests. After COMMIT it can't resume the guest: it serves pages, and
//! reestablishes lost channels for as long as that takes.
//!
//! Until COMMIT every failure resumes the guest here. So does a lost link: the destination has
//! freed outdated pages by then, and the source would have to send them again.

mod opening_fetch;

use std::time::Duration;

use vmferry_wire::{FetchLanes, LateStreamsId};

use super::common::Common;
use super::io::{Action, Report};
use super::phase::{LastRound, Pause, Phase, Sending};
use crate::config::{PostCopy, WhenStuck};
use crate::error::MigrateError;
use crate::rounds::convergence::{Decision, Harvest};
use crate::stats::forecast::Verdict;
use vmferry_handover::SessionKind;

/// Whether and when to switch over with post-copy.
#[derive(Debug)]
pub(super) struct PostCopyPlan {
    pub(super) policy: PostCopy,
    /// The lanes that were announced, if this guest can be moved with post-copy.
    pub(super) announced: Option<FetchLanes>,
    /// Whether the destination has accepted that.
    pub(super) accepted: bool,
    /// Why the destination can't receive this guest so, if it says.
    refused: Option<String>,
    /// Whether all fetch lanes have channels, as far as is known.
    pub(super) are_open: bool,
    pub(super) lanes: Vec<FetchLink>,
    /// What the previous harvest found.
    before: Option<Before>,
    /// How far a carried guest's VMM is on its way to its own post-copy.
    pub(super) carried: CarriedPostCopy,
    /// The streams of a carried guest's VMM.
    pub(super) streams: Option<LateStreamsId>,
}

/// A carried guest's way to post-copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum CarriedPostCopy {
    /// It is not due.
    #[default]
    None,
    /// It is due, and the fetch lanes are being opened.
    Opening,
    /// The VMM was told to stop the guest.
    Begun,
    /// The VMM had stopped it by itself.
    TooLate,
}

/// The channel of a fetch lane.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FetchLink {
    /// Attempts to redial so far.
    pub(super) attempts: u64,
    /// Since when it has been lost.
    pub(super) lost: Option<Duration>,
    /// When it was last reestablished.
    pub(super) rejoined: Option<Duration>,
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
            refused: None,
            are_open: false,
            lanes: vec![FetchLink::default(); usize::from(count)],
            before: None,
            carried: CarriedPostCopy::None,
            streams: None,
        }
    }

    /// A process that was restarted has no channels, and a carried guest's VMM no streams.
    pub(super) fn lose_all(&mut self, now: Duration, is_carried: bool) {
        self.streams = is_carried.then_some(LateStreamsId::NONE);
        self.lanes.iter_mut().for_each(|link| link.lost = Some(now));
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
    pub(super) fn agree_on_post_copy(
        &mut self,
        answer: Option<Result<(), String>>,
    ) -> Result<(), MigrateError> {
        self.post_copy.accepted = answer == Some(Ok(())) && self.post_copy.announced.is_some();
        self.post_copy.refused = answer.and_then(Result::err);
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
    fn no_post_copy(&self) -> String {
        if self.config.verify {
            "both memories are to be compared before the switchover, and would not be complete"
                .to_owned()
        } else if self.our_side.streams && self.our_side.vmm_post_copy.is_none() {
            "its VMM must know before the migration begins that it may be wanted".to_owned()
        } else if let Some(Err(why)) = &self.our_side.vmm_post_copy {
            why.clone()
        } else if self.post_copy.announced.is_none() {
            "the destination speaks version 1 of the protocol".to_owned()
        } else if let Some(why) = &self.post_copy.refused {
            format!("the destination: {why}")
        } else {
            "the destination's release does not support it".to_owned()
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
}

impl Sending {
    /// A carried guest is moved with its VMM's own post-copy: the fetch lanes are opened, unless
    /// they are, and the VMM is told to stop the guest.
    pub(super) fn begin_carried_post_copy(self, common: &mut Common) -> Phase {
        if common.post_copy.carried == CarriedPostCopy::None {
            common.post_copy.carried = CarriedPostCopy::Opening;
            common.open_fetch_lanes();
        }
        Phase::Sending(self)
    }

    /// All fetch lanes have channels.
    pub(super) fn on_fetch_lanes_joined(self, common: &mut Common) -> Phase {
        common.post_copy.note_open();
        if common.post_copy.carried == CarriedPostCopy::Opening {
            common.post_copy.carried = CarriedPostCopy::Begun;
            common.act(Action::BeginCarriedPostCopy);
        }
        Phase::Sending(self)
    }
}

impl PostCopyPlan {
    /// All fetch lanes have channels.
    fn note_open(&mut self) {
        self.are_open = true;
        self.lanes.iter_mut().for_each(|link| link.lost = None);
    }

    /// Whether all fetch lanes have channels, as far as is known.
    pub(super) fn is_open(&self) -> bool {
        self.are_open
    }
}

impl Common {
    fn open_fetch_lanes(&mut self) {
        let Some(token) = self.links.token else { return };
        let attempts = |link: &mut FetchLink| {
            let attempt = link.attempts;
            // If this fails, the next attempt has another number.
            link.attempts += 1;
            attempt
        };
        let attempts = self.post_copy.lanes.iter_mut().map(attempts).collect();
        self.act(Action::OpenFetchLanes { token, attempts });
    }
}

impl Pause {
    /// A carried guest's VMM has stopped it, and sends the rest while it runs at the destination.
    pub(super) fn begin_carried_post_copy(self, common: &mut Common, pages: u64) {
        common.kind = SessionKind::PostCopy;
        common.stats.missing_pages = pages;
        common.report(Report::PostCopy { round: common.rounds.round(), pages });
        common.post_copy.streams = Some(LateStreamsId::FIRST);
        common.act(Action::CutStreams { pages });
        common.act(Action::Save);
    }

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

#[cfg(test)]
mod tests;
