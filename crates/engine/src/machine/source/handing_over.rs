//! The source's machine: COMMIT, the destination's answer, and failures.

use std::time::Duration;

use vmferry_wire::{ControlMessage, Reason, ReasonCode, SessionWord};

use super::io::{Action, Report};
use super::{Phase, Source, ms};
use crate::error::MigrateError;
use vmferry_handover::{SourceEffect, SourceEvent, SourceState};

impl Source {
    pub(super) fn commit(&mut self, now: Duration) {
        self.last_sent = now;
        self.enter(now, Phase::HandingOver);
        self.hand_over(now, SourceEvent::Ready);
    }

    pub(super) fn on_commit_written(&mut self, now: Duration, result: Result<(), MigrateError>) {
        match result {
            Ok(()) => {
                self.act(Action::Report(Report::Committed));
                self.waiting_since = now;
                self.hand_over(now, SourceEvent::CommitWritten);
            }
            Err(error) => {
                self.failure = Some(error);
                self.hand_over(now, SourceEvent::CommitFailed);
            }
        }
    }

    pub(super) fn on_word(&mut self, now: Duration, word: SessionWord, reason: Option<Reason>) {
        if word == SessionWord::Aborted && self.handover.is_committed() {
            let reason = reason
                .unwrap_or_else(|| Reason::new(ReasonCode::Internal, "its journal says ABORTED"));
            self.failure = Some(MigrateError::EndedByPeer { peer: "destination", reason });
        }
        self.waiting_since = now;
        self.hand_over(now, SourceEvent::Word(word));
    }

    pub(super) fn on_cancel(&mut self, now: Duration) {
        if self.handover == SourceState::Holding {
            self.fail(now, MigrateError::Cancelled { during: self.phase.name() });
        } else {
            self.act(Action::Report(Report::TooLateToCancel));
        }
    }

    pub(super) fn fail(&mut self, now: Duration, error: MigrateError) {
        self.fail_by(now, SourceEvent::Failed, error);
    }

    pub(super) fn fail_by(&mut self, now: Duration, event: SourceEvent, error: MigrateError) {
        if self.handover.is_final() {
            return;
        }
        let entering_doubt = self.handover == SourceState::Committed
            || matches!(self.handover, SourceState::Committing { .. });
        if entering_doubt {
            let reason = crate::causes::chain(&error);
            self.act(Action::Report(Report::InDoubt { reason }));
        }
        if self.failure.is_none() {
            self.failure = Some(error);
        }
        self.hand_over(now, event);
    }

    pub(super) fn hand_over(&mut self, now: Duration, event: SourceEvent) {
        let (next, effects) = self.handover.step(event);
        self.follow(now, next, effects);
    }

    /// Enters the handover's next state and carries out its effects.
    pub(super) fn follow(
        &mut self,
        now: Duration,
        next: SourceState,
        effects: &'static [SourceEffect],
    ) {
        let before = std::mem::replace(&mut self.handover, next);
        if matches!(next, SourceState::InDoubt { .. }) {
            self.phase = Phase::Asking;
        }
        for effect in effects {
            match effect {
                SourceEffect::WriteCommit => self.act(Action::WriteCommit),
                SourceEffect::SendCommit => {
                    let session = self.config.session;
                    self.act(Action::Send(ControlMessage::Commit { session }));
                }
                SourceEffect::SendAbort => {
                    let reason = self.failure.as_ref().map_or_else(
                        || Reason::new(ReasonCode::Internal, "the source failed"),
                        MigrateError::reason_for_peer,
                    );
                    self.act(Action::Send(ControlMessage::Abort { reason }));
                }
                SourceEffect::Ask => {
                    let first = !matches!(before, SourceState::InDoubt { .. });
                    let delay = if first { Duration::ZERO } else { self.timeouts().ask };
                    self.waiting_since = now + delay;
                    self.act(Action::Ask { delay });
                }
                SourceEffect::WriteKept => {
                    let by_operator = self.by_operator;
                    self.act(Action::WriteOutcome { kept: true, by_operator });
                }
                SourceEffect::WriteGiven => {
                    let by_operator = self.by_operator;
                    self.act(Action::WriteOutcome { kept: false, by_operator });
                }
                SourceEffect::Resume => {
                    self.act(Action::Resume);
                    self.act(Action::Report(Report::Resumed));
                }
                SourceEffect::Release => self.act(Action::Release),
            }
        }
        if next.is_final() && !before.is_final() {
            self.close_stats(now);
            self.phase = Phase::Done;
        }
    }

    pub(super) fn close_stats(&mut self, now: Duration) {
        let verify = self.stats.verify_ms;
        self.stats.total_ms = ms(now.saturating_sub(self.log_started)) - verify;
        if let Some(stopped_at) = self.stopped_at {
            self.stats.downtime_ms = ms(now.saturating_sub(stopped_at)) - verify;
        }
        if self.handover == SourceState::Given {
            self.stats.downtime.commit_ms = ms(now.saturating_sub(self.last_sent));
        }
    }
}
