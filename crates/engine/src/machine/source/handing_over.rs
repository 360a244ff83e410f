//! The source's machine: COMMIT, the destination's answer, and failures.

use std::time::Duration;

use vmferry_wire::{ControlMessage, LaneToken, Reason, ReasonCode, SessionWord};

use super::common::{Common, ms};
use super::io::{Action, Report};
use super::phase::{Asking, HandingOver, Pause, Phase, Serving};
use crate::error::MigrateError;
use vmferry_handover::journal::Record;
use vmferry_handover::{OperatorWord, SourceEffect, SourceEvent, SourceState};

impl Common {
    /// Asks the destination after a delay.
    pub(super) fn ask(&mut self, now: Duration, delay: Duration) {
        self.wait.since = now + delay;
        let offer = self.lane_offer();
        self.act(Action::Ask { delay, offer });
    }
}

/// A step of the handover.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) next: SourceState,
    pub(super) effects: &'static [SourceEffect],
    /// Whether an operator decided so.
    pub(super) by_operator: bool,
}

impl Pause {
    /// The destination is ready: promises the guest to it.
    pub(super) fn commit(self, common: &mut Common, now: Duration) -> Phase {
        common.begin_wait(now);
        let phase = Phase::HandingOver(HandingOver { pause: self, since: now });
        phase.hand_over(common, now, SourceEvent::Ready)
    }
}

impl Phase {
    pub(super) fn on_commit_written(
        self,
        common: &mut Common,
        now: Duration,
        result: Result<(), MigrateError>,
    ) -> Self {
        match result {
            Ok(()) => {
                common.report(Report::Committed);
                common.wait.since = now;
                self.hand_over(common, now, SourceEvent::CommitWritten)
            }
            Err(error) => {
                common.failure = Some(error);
                self.hand_over(common, now, SourceEvent::CommitFailed)
            }
        }
    }

    /// The destination's answer. With a token, it expects the offered fetch lanes.
    pub(super) fn on_answer(
        self,
        common: &mut Common,
        now: Duration,
        word: SessionWord,
        token: Option<LaneToken>,
    ) -> Self {
        if word == SessionWord::Aborted && common.handover.is_committed() {
            let reason = Reason::new(ReasonCode::Internal, "its journal says ABORTED");
            return self.on_aborted(common, now, reason);
        }
        common.wait.since = now;
        let streams = token.and_then(|token| token.streams);
        let token = token.map(|token| token.token);
        let phase = match self {
            Self::Serving(serving) => serving.on_word(common, now, word, token),
            phase => {
                common.links.token = token.or(common.links.token);
                phase
            }
        };
        let phase = phase.hand_over(common, now, SourceEvent::Word(word));
        // The lanes, which are being dialed, are used after that.
        common.use_streams(streams);
        phase
    }

    /// The guest never ran at the destination and never will.
    pub(super) fn on_aborted(self, common: &mut Common, now: Duration, reason: Reason) -> Self {
        common.failure = Some(MigrateError::EndedByPeer { peer: "destination", reason });
        self.hand_over(common, now, SourceEvent::Word(SessionWord::Aborted))
    }

    pub(super) fn on_operator(
        self,
        common: &mut Common,
        now: Duration,
        word: OperatorWord,
    ) -> Self {
        let (next, effects) = common.handover.step(SourceEvent::of_operator(word, common.kind));
        self.follow(common, now, Step { next, effects, by_operator: true })
    }

    pub(super) fn on_cancel(self, common: &mut Common, now: Duration) -> Self {
        if common.handover == SourceState::Holding {
            let during = self.name();
            self.fail(common, now, MigrateError::Cancelled { during })
        } else {
            common.report(Report::TooLateToCancel);
            self
        }
    }

    pub(super) fn fail(self, common: &mut Common, now: Duration, error: MigrateError) -> Self {
        self.fail_by(common, now, SourceEvent::Failed, error)
    }

    pub(super) fn fail_by(
        self,
        common: &mut Common,
        now: Duration,
        event: SourceEvent,
        error: MigrateError,
    ) -> Self {
        if common.handover.is_final() {
            return self;
        }
        let entering_doubt = common.handover == SourceState::Committed
            || matches!(common.handover, SourceState::Committing { .. });
        if entering_doubt {
            let reason = crate::causes::chain(&error);
            common.report(Report::InDoubt { reason });
        }
        if common.handover == SourceState::Serving {
            common.report_serving_failure(&error);
        }
        if common.failure.is_none() {
            common.failure = Some(error);
        }
        self.hand_over(common, now, event)
    }

    pub(super) fn hand_over(self, common: &mut Common, now: Duration, event: SourceEvent) -> Self {
        let (next, effects) = common.handover.step(event);
        self.follow(common, now, Step { next, effects, by_operator: false })
    }

    /// Enters the handover's next state and carries out its effects.
    pub(super) fn follow(self, common: &mut Common, now: Duration, step: Step) -> Self {
        let Step { next, effects, by_operator } = step;
        let before = std::mem::replace(&mut common.handover, next);
        let mut phase = match (next, self) {
            (SourceState::Serving | SourceState::Ended, phase @ Self::Serving(_)) => phase,
            (SourceState::Serving, phase) => phase.begin_serving(common, now),
            (SourceState::Ended, phase) => phase.begin_keeping(common, now),
            (_, Self::Asking(asking)) => Self::Asking(asking),
            (SourceState::InDoubt { .. }, phase) => {
                let (pause, since) = (phase.pause(), phase.promised_at().unwrap_or(now));
                Self::Asking(Asking { pause, since })
            }
            (_, phase) => phase,
        };
        for effect in effects {
            match effect {
                SourceEffect::WriteCommit => common.act(Action::WriteCommit(common.kind)),
                SourceEffect::SendCommit => {
                    let session = common.config.session;
                    common.act(Action::Send(ControlMessage::Commit { session }));
                }
                SourceEffect::SendAbort => {
                    let reason = common.failure.as_ref().map_or_else(
                        || Reason::new(ReasonCode::Internal, "the source failed"),
                        MigrateError::reason_for_peer,
                    );
                    common.act(Action::Send(ControlMessage::Abort { reason }));
                }
                SourceEffect::Ask => {
                    let first =
                        !matches!(before, SourceState::InDoubt { .. } | SourceState::Serving);
                    let delay = if first { Duration::ZERO } else { common.timeouts().ask };
                    common.ask(now, delay);
                    if let Self::Serving(serving) = phase {
                        phase = serving.on_ask();
                    }
                }
                SourceEffect::WriteKept => {
                    common.act(Action::WriteOutcome(Record::Kept { by_operator }));
                }
                SourceEffect::WriteGiven => {
                    common.act(Action::WriteOutcome(Record::Given { by_operator }));
                }
                SourceEffect::WriteServing => common.act(Action::WriteOutcome(Record::Serving)),
                SourceEffect::Resume => {
                    common.act(Action::Resume);
                    common.report(Report::Resumed);
                }
                SourceEffect::Release => common.act(Action::Release),
            }
        }
        // After the record that says so.
        match next {
            SourceState::Serving if before != next => {
                common.report(Report::Serving { pages: common.stats.missing_pages });
            }
            SourceState::Ended if before != next => common.report(Report::GuestCrashed),
            _ => {}
        }
        match phase {
            phase if next.is_final() && !before.is_final() => phase.end(common, now),
            phase @ Self::Serving(_) if common.vmm_has_ended => {
                let source = match common.failure.take() {
                    Some(MigrateError::Vm { source, .. }) => source,
                    _ => "it has ended".into(),
                };
                phase.on_vmm_ended(common, now, source)
            }
            Self::Serving(serving) if next == SourceState::Serving => {
                serving.ask_for_token(common, now)
            }
            phase => phase,
        }
    }

    /// When READY was accepted, if it was.
    pub(super) fn promised_at(&self) -> Option<Duration> {
        match self {
            Self::HandingOver(HandingOver { since, .. }) | Self::Asking(Asking { since, .. }) => {
                Some(*since)
            }
            _ => None,
        }
    }

    /// Completes the statistics.
    fn end(self, common: &mut Common, now: Duration) -> Self {
        let stats = &mut common.stats;
        let verify = stats.verify_ms;
        stats.total_ms = ms(now.saturating_sub(common.pace.log_started)) - verify;
        if let Self::Serving(Serving { since, .. }) = &self {
            stats.serving_ms = ms(now.saturating_sub(*since));
        }
        if let Some(pause) = self.pause() {
            stats.downtime_ms = ms(now.saturating_sub(pause.since)) - verify;
        }
        if common.handover == SourceState::Given
            && let Some(since) = self.promised_at()
        {
            stats.downtime.commit_ms = ms(now.saturating_sub(since));
        }
        Self::Done
    }
}
