//! The destination's machine: the handover, its promises, and failures.

use std::time::Duration;

use vmferry_wire::{ControlMessage, Reason, ReasonCode};

use super::io::{Action, LinkId, Report};
use super::links::Losses;
use super::{Destination, Phase, Verification, micros};
use crate::error::MigrateError;
use vmferry_handover::{DestinationEffect, DestinationEvent, DestinationState};

impl Destination {
    pub(super) fn on_journal(
        &mut self,
        now: Duration,
        result: Result<(), MigrateError>,
        done: DestinationEvent,
    ) {
        let event = match result {
            Ok(()) => done,
            Err(error) => {
                self.failure = Some(error);
                DestinationEvent::JournalFailed
            }
        };
        self.hand_over(now, LinkId::CONTROL, event);
    }

    pub(super) fn on_link_lost(&mut self, now: Duration, error: MigrateError) {
        let was_up = std::mem::replace(&mut self.link_up, false);
        self.losses = Losses::default();
        match self.phase {
            Phase::AwaitBegin | Phase::Preparing | Phase::Opening => {
                self.failure = Some(error);
                self.phase = Phase::Refused;
            }
            _ => {
                if self.handover == DestinationState::Ready {
                    // A source that still had to compare memories keeps its guest when the link is
                    // lost: COMMIT has been sent by now, or never will be.
                    if was_up && self.verification != Verification::None {
                        self.waiting_since = now;
                    }
                    self.actions.push_back(Action::Report(Report::WaitingForWord));
                } else if self.failure.is_none() && !self.handover.is_final() {
                    self.failure = Some(error);
                }
                self.hand_over(now, LinkId::CONTROL, DestinationEvent::LinkLost);
            }
        }
    }

    pub(super) fn fail(&mut self, now: Duration, error: MigrateError) {
        if self.handover.is_final() {
            return;
        }
        match self.phase {
            Phase::AwaitBegin | Phase::Preparing | Phase::Opening => {
                self.refuse(error.reason_for_peer());
                self.failure = Some(error);
            }
            _ => {
                if self.failure.is_none() {
                    self.failure = Some(error);
                }
                self.hand_over(now, LinkId::CONTROL, DestinationEvent::Failed);
            }
        }
    }

    pub(super) fn hand_over(&mut self, now: Duration, link: LinkId, event: DestinationEvent) {
        let (next, effects) = self.handover.step(event);
        self.handover = next;
        let Some(session) = self.session() else { return };
        for effect in effects {
            let action = match effect {
                DestinationEffect::SendReady => {
                    self.waiting_since = now;
                    self.actions.push_back(Action::Report(Report::Ready));
                    Action::Send {
                        link: LinkId::CONTROL,
                        message: ControlMessage::Ready {
                            digest: self.digest,
                            load_us: micros(self.load),
                        },
                    }
                }
                DestinationEffect::WriteIntent => Action::WriteIntent,
                DestinationEffect::WriteAborted => Action::WriteAborted { reason: self.why() },
                DestinationEffect::Run => {
                    let paused = self.paused;
                    let report = if paused { Report::Paused } else { Report::Running };
                    self.actions.push_back(Action::Report(report));
                    Action::Run
                }
                DestinationEffect::SendRunning => {
                    let start_us = micros(now.saturating_sub(self.committed_at));
                    Action::Broadcast(ControlMessage::Running { session, start_us })
                }
                DestinationEffect::SendAborted => {
                    let code = self
                        .failure
                        .as_ref()
                        .map_or(ReasonCode::Internal, |error| error.reason_for_peer().code);
                    let reason = Reason::new(code, &self.why());
                    Action::Broadcast(ControlMessage::Aborted { session, reason })
                }
                DestinationEffect::Discard => Action::Discard,
                DestinationEffect::Answer(word) => {
                    Action::Send { link, message: ControlMessage::Answer { session, word: *word } }
                }
            };
            self.actions.push_back(action);
        }
    }

    pub(super) fn why(&self) -> String {
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
