//! The source's machine: which phase takes which event.

use std::time::Duration;

use vmferry_memory::WholeHash;
use vmferry_wire::{AlgorithmSet, ControlMessage};

use super::common::Common;
use super::io::{Action, Input};
use super::opening::{Acceptance, from_release};
use super::passes::Pass;
use super::phase::{Found, Phase};
use super::post_copy::CarriedPostCopy;
use crate::error::MigrateError;
use vmferry_handover::{SessionKind, SourceEvent, SourceState};

impl Phase {
    /// Processes an event, and returns the phase that follows.
    pub(super) fn on_input(self, common: &mut Common, now: Duration, input: Input) -> Self {
        match input {
            Input::Control(message) => {
                common.pings.heard = now;
                return self.on_message(common, now, message);
            }
            Input::LinkLost(error) => return self.on_control_lost(common, now, error),
            Input::Resumed => return self.on_resumed(common, now),
            Input::NotResumed(error) => return self.on_not_restored(common, now, None, error),
            Input::LaneLost { lane, error, .. } if common.is_fetch_lane(lane) => {
                return self.on_fetch_lane_lost(common, now, lane, error);
            }
            Input::LaneLost { lane, error, .. } => {
                return self.on_lane_lost(common, now, lane, error);
            }
            Input::LaneRejoined { lane, .. } if common.is_fetch_lane(lane) => {
                return self.on_fetch_lane_rejoined(common, now, lane);
            }
            Input::LaneRejoined { lane, placed } => {
                return self.on_lane_rejoined(common, now, lane, placed);
            }
            Input::LaneNotRejoined { lane, .. } if common.is_fetch_lane(lane) => {
                return self.on_fetch_lane_not_rejoined(common, lane);
            }
            Input::LaneNotRejoined { lane, error } => {
                return self.on_not_restored(common, now, Some(lane), error);
            }
            Input::Failed(error) => return self.on_failed(common, now, error),
            Input::NotReconnected(error) => return self.on_not_reconnected(common, now, &error),
            Input::VmmEnded(error) => return self.on_vmm_ended(common, now, error),
            Input::Cancel => return self.on_cancel(common, now),
            Input::SwitchOver => return self.on_switch_over(common, now),
            Input::Operator(word) => return self.on_operator(common, now, word),
            Input::GiveUp => return self.on_give_up(common, now),
            Input::CommitWritten(result) => return self.on_commit_written(common, now, result),
            Input::Register(answer) => return self.on_register(common, now, answer),
            Input::UnknownFields { message, fields } => common.on_unknown_fields(message, fields),
            Input::Resent { lane, frames, bytes } => common.on_resent(lane, frames, bytes),
            Input::Change(change) => common.on_change(change),
            Input::Away { took } => common.on_away(now, took),
            Input::Flowing => self.on_flow(common, now),
            Input::Tick => {}
            other if common.handover == SourceState::Holding => {
                return self.on_progress(common, now, other);
            }
            _ => {}
        }
        self
    }

    /// An action towards the handover was carried out.
    fn on_progress(self, common: &mut Common, now: Duration, input: Input) -> Self {
        match (input, self) {
            (Input::LogStarted { populated_pages, stood_still }, Self::Announced(announced)) => {
                announced.on_log_started(common, now, populated_pages, stood_still)
            }
            (Input::LanesJoined, Self::Joining(joining)) => joining.on_lanes_joined(common, now),
            (Input::LaneSent { lane, end_sequence, totals }, phase) => {
                common.rounds.sent(lane, end_sequence, totals);
                let is_last = matches!(phase, Self::LastRound(_));
                // With post-copy only a carried guest has a last round.
                let has_round = common.kind == SessionKind::PreCopy || common.our_side.streams;
                if is_last && has_round && common.rounds.all_sent() {
                    common.act(Action::SumDigest);
                }
                phase.finish_round(common, now)
            }
            (Input::Pass { round, pages, dirty_pages_per_s, totals }, Self::Sending(sending)) => {
                let pass = Pass { round, pages, dirty_pages_per_s };
                sending.on_pass(common, now, pass, totals)
            }
            (Input::Stopped { stood_still, expected, pages, totals }, Self::Sending(sending)) => {
                sending.on_stopped(common, now, stood_still, expected, (pages, totals))
            }
            (Input::Harvested { pages, took, stood_still }, Self::Harvesting(harvesting)) => {
                harvesting.on_harvested(common, now, Found { pages, took, stood_still })
            }
            (Input::Harvested { pages, took, stood_still }, Self::OpeningFetch(opening)) => {
                opening.on_harvested(common, now, Found { pages, took, stood_still })
            }
            (Input::FetchLanesJoined, Self::OpeningFetch(opening)) => {
                opening.on_opened(common, now)
            }
            (Input::FetchLanesJoined, Self::Sending(sending)) => {
                sending.on_fetch_lanes_joined(common)
            }
            (Input::TooLateForPostCopy, phase @ Self::Sending(_)) => {
                common.post_copy.carried = CarriedPostCopy::TooLate;
                phase
            }
            (Input::Paused { stood_still }, Self::Pausing(pausing)) => {
                pausing.on_paused(common, now, stood_still)
            }
            (Input::LastHarvest { pages, took }, Self::LastHarvest(harvest)) => {
                harvest.on_harvested(common, now, pages, took)
            }
            (Input::Saved(saved), Self::LastRound(last)) => last.on_saved(common, now, saved),
            (Input::Digest(digest), Self::LastRound(last)) => last.on_digest(common, now, digest),
            (Input::Hashed { attempt, hash }, Self::AwaitReady(waiting)) => {
                waiting.on_hashed(common, now, attempt, hash)
            }
            (Input::Hashed { attempt, hash }, Self::Verifying(verifying)) => {
                verifying.on_hashed(common, now, attempt, hash)
            }
            (_, phase) => phase,
        }
    }

    fn on_message(self, common: &mut Common, now: Duration, message: ControlMessage) -> Self {
        let ours = common.config.session;
        match (message, self) {
            (
                ControlMessage::Accept {
                    token,
                    release,
                    algorithms,
                    verifies_placed,
                    post_copy,
                    compares_storage,
                },
                Self::Announced(announced),
            ) => {
                let algorithms = algorithms.unwrap_or(AlgorithmSet::VERSION_1);
                let acceptance = Acceptance {
                    token,
                    release,
                    algorithms,
                    verifies_placed,
                    compares_storage,
                    post_copy,
                };
                announced.on_accept(common, now, acceptance)
            }
            (
                ControlMessage::Refuse { reason, release },
                phase @ (Self::Announced(_) | Self::Joining(_)),
            ) => {
                let reason = from_release(reason, release.as_ref());
                common.stats.destination = release.or(common.stats.destination.take());
                let error = MigrateError::Refused { peer: "destination", reason };
                phase.fail(common, now, error)
            }
            (ControlMessage::Placed { lane, sequence }, phase) => {
                phase.on_placed(common, now, lane, sequence)
            }
            (ControlMessage::Ready { digest, .. }, Self::AwaitReady(waiting)) => {
                waiting.on_ready(common, now, digest)
            }
            (ControlMessage::Verified { hash, pages, elapsed_us }, Self::AwaitReady(waiting))
                if waiting.comparison.is_some() =>
            {
                let took = Duration::from_micros(elapsed_us);
                waiting.on_verified(common, now, WholeHash { hash, pages }, took)
            }
            (ControlMessage::Verified { hash, pages, .. }, Self::Verifying(verifying)) => {
                verifying.on_verified(common, now, WholeHash { hash, pages })
            }
            // The message crossed WITHDRAW.
            (ControlMessage::Verified { .. }, Self::Sending(sending))
                if sending.withdrawal.is_some() =>
            {
                Self::Sending(sending)
            }
            (ControlMessage::Abort { reason }, phase) => {
                let error = MigrateError::EndedByPeer { peer: "destination", reason };
                phase.fail(common, now, error)
            }
            (ControlMessage::Running { session, .. }, phase) if session == ours => {
                phase.hand_over(common, now, SourceEvent::Running)
            }
            (ControlMessage::Aborted { session, reason }, phase) if session == ours => {
                if common.handover == SourceState::Holding {
                    let error = MigrateError::EndedByPeer { peer: "destination", reason };
                    phase.fail(common, now, error)
                } else {
                    phase.on_aborted(common, now, reason)
                }
            }
            (ControlMessage::Answer { session, word, token }, phase) if session == ours => {
                phase.on_answer(common, now, word, token)
            }
            (ControlMessage::Ping { nonce }, phase) => {
                common.act(Action::Send(ControlMessage::Pong { nonce }));
                phase
            }
            (ControlMessage::Pong { nonce }, phase) => phase.on_pong(common, now, nonce),
            (ControlMessage::Ready { .. }, phase @ (Self::Sending(_) | Self::Harvesting(_)))
                if common.stats.recalls > 0 =>
            {
                let error = MigrateError::LinkLost {
                    channel: "data".into(),
                    during: "the wait for READY",
                    detail: "the destination had loaded the state already".into(),
                };
                phase.fail(common, now, error)
            }
            // An answer that crossed a change of phase, or a hostile peer. Before COMMIT the guest
            // is safe here; after it only the messages above count.
            (message, phase) if common.handover == SourceState::Holding => {
                let reason = format!("{} does not belong in {}", message.name(), phase.name());
                phase.fail(common, now, MigrateError::protocol("control", 0, reason))
            }
            (_, phase) => phase,
        }
    }
}
