//! The destination's machine: the handover, its promises, and failures.

use std::time::Duration;

use vmferry_wire::{ControlMessage, Reason, ReasonCode, SessionWord};

use super::common::{Common, micros};
use super::io::{Action, LinkId, Report};
use super::phase::{Deciding, Phase, Verification};
use crate::error::MigrateError;
use vmferry_handover::{DestinationEffect, DestinationEvent, DestinationState};

impl Phase {
    pub(super) fn on_journal(
        self,
        common: &mut Common,
        now: Duration,
        result: Result<(), MigrateError>,
        done: DestinationEvent,
    ) -> Self {
        let event = match result {
            Ok(()) => done,
            Err(error) => {
                common.failure = Some(error);
                DestinationEvent::JournalFailed
            }
        };
        self.hand_over(common, now, LinkId::CONTROL, event)
    }

    /// COMMIT, at a time when it may be sent.
    pub(super) fn on_commit(mut self, common: &mut Common, now: Duration, link: LinkId) -> Self {
        // A repeated COMMIT does not extend the wait for the witness.
        if let Self::Deciding(deciding) = &mut self
            && common.handover != DestinationState::Claiming
        {
            deciding.committed_at = Some(now);
        }
        self.hand_over(common, now, link, DestinationEvent::Commit)
    }

    /// The guest's vCPUs were started, or could not be.
    pub(super) fn on_started(
        self,
        common: &mut Common,
        now: Duration,
        result: Result<(), MigrateError>,
    ) -> Self {
        if let Self::Deciding(Deciding { committed_at: Some(at), .. }) = &self {
            common.stats.start_ms = now.saturating_sub(*at).as_secs_f64() * 1e3;
        }
        if let Err(error) = result {
            common.failure = Some(error);
        }
        self
    }

    /// The control channel is lost for good.
    pub(super) fn on_link_lost(
        mut self,
        common: &mut Common,
        now: Duration,
        error: MigrateError,
    ) -> Self {
        let was_up = common.links.give_up();
        if self.is_before_acceptance() {
            common.failure = Some(error);
            return Self::Refused(self.session_id());
        }
        if common.handover == DestinationState::Ready {
            // A source that still had to compare memories keeps its guest when the link is lost:
            // COMMIT has been sent by now, or never will be.
            if let Self::Deciding(Deciding { session, since, .. }) = &mut self
                && was_up
                && session.verification != Verification::None
            {
                *since = now;
            }
            common.report(Report::WaitingForWord);
        } else if common.failure.is_none()
            && common.handover != DestinationState::Claiming
            && !common.handover.is_final()
            && !common.handover.may_run()
        {
            common.failure = Some(error);
        }
        self.hand_over(common, now, LinkId::CONTROL, DestinationEvent::LinkLost)
    }

    pub(super) fn fail(self, common: &mut Common, now: Duration, error: MigrateError) -> Self {
        if common.handover.is_final() {
            return self;
        }
        if common.handover.may_run() {
            // The guest runs on, and waits for its missing pages.
            common.report_fetching_failure(&error);
            return self;
        }
        if self.is_before_acceptance() {
            return self.refuse(common, error.reason_for_peer(), error);
        }
        if common.failure.is_none() {
            common.failure = Some(error);
        }
        self.hand_over(common, now, LinkId::CONTROL, DestinationEvent::Failed)
    }

    /// Processes an event of the handover. `link` is where a query came from.
    pub(super) fn hand_over(
        self,
        common: &mut Common,
        now: Duration,
        link: LinkId,
        event: DestinationEvent,
    ) -> Self {
        let step = common.handover.step(event);
        self.follow(common, now, link, step)
    }

    /// Enters the handover's next state and carries out its effects.
    pub(super) fn follow(
        self,
        common: &mut Common,
        now: Duration,
        link: LinkId,
        (next, effects): (DestinationState, &[DestinationEffect]),
    ) -> Self {
        common.handover = next;
        let Some(session) = self.session_id() else { return self };
        for effect in effects {
            match (effect, &self) {
                (DestinationEffect::Claim, _) if common.our_side.witness.is_none() => {
                    return self.hand_over(common, now, link, DestinationEvent::Claimed);
                }
                (DestinationEffect::Claim, _) => common.act(Action::Claim),
                (DestinationEffect::SendReady, Self::Deciding(deciding)) => {
                    let (digest, load_us) = (deciding.digest, micros(deciding.load));
                    common.report(Report::Ready);
                    common.send(ControlMessage::Ready { digest, load_us });
                }
                (DestinationEffect::WriteIntent, _) => {
                    common.act(Action::WriteIntent(common.kind));
                }
                (DestinationEffect::WriteFetched, _) => common.act(Action::WriteFetched),
                (DestinationEffect::WriteEnded, _) => common.act(Action::WriteEnded),
                (DestinationEffect::SendEnded, _) => {
                    let word = SessionWord::Ended;
                    let message = ControlMessage::Answer { session, word, token: None };
                    common.act(Action::Broadcast(message));
                }
                (DestinationEffect::SendFetching, _) => {
                    common.report(Report::Fetching { pages: common.missing_pages });
                    let word = SessionWord::Fetching;
                    let message = ControlMessage::Answer { session, word, token: None };
                    common.act(Action::Broadcast(message));
                    // The source, which waits for this message, may be sending other pages next.
                    common.act(Action::FetchAll);
                }
                (DestinationEffect::WriteAborted, _) => {
                    let reason = common.why();
                    common.act(Action::WriteAborted { reason });
                }
                (DestinationEffect::Run, Self::Deciding(Deciding { paused, .. })) => {
                    common.report(if *paused { Report::Paused } else { Report::Running });
                    common.act(Action::Run);
                }
                (DestinationEffect::SendRunning, Self::Deciding(deciding)) => {
                    let committed_at = deciding.committed_at.unwrap_or(now);
                    let start_us = micros(now.saturating_sub(committed_at));
                    common.act(Action::Broadcast(ControlMessage::Running { session, start_us }));
                }
                // The handover has these effects only after the state is loaded.
                (
                    DestinationEffect::SendReady
                    | DestinationEffect::Run
                    | DestinationEffect::SendRunning,
                    _,
                ) => {}
                (DestinationEffect::SendAborted, _) => {
                    let code = common
                        .failure
                        .as_ref()
                        .map_or(ReasonCode::Internal, |error| error.reason_for_peer().code);
                    let reason = Reason::new(code, &common.why());
                    common.act(Action::Broadcast(ControlMessage::Aborted { session, reason }));
                }
                (DestinationEffect::Discard, _) => common.act(Action::Discard),
                (DestinationEffect::Answer(word), _) => {
                    let message = ControlMessage::Answer { session, word: *word, token: None };
                    common.act(Action::Send { link, message });
                }
            }
        }
        self
    }
}

impl Common {
    /// Why there is no guest here, for people.
    fn why(&self) -> String {
        match &self.failure {
            None => "no COMMIT came in time".to_owned(),
            // The reason for the peer names the full back end, or has the VMM's own words.
            Some(error @ (MigrateError::Memory(_) | MigrateError::Vm { .. })) => {
                error.reason_for_peer().text
            }
            Some(error) => error.to_string(),
        }
    }
}
