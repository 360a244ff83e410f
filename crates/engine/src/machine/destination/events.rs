//! The destination's machine: which phase takes which event.

use std::time::Duration;

use vmferry_faults::FaultError;
use vmferry_wire::{ControlMessage, ReasonCode};

use super::announcement::Announcement;
use super::common::{Common, protocol};
use super::io::{Action, Input, LinkId};
use super::phase::{Final, Phase};
use crate::error::MigrateError;
use crate::vmm::GuestDescription;
use vmferry_handover::{DestinationEvent, DestinationState};

impl Phase {
    /// Processes an event, and returns the phase that follows.
    pub(super) fn on_input(self, common: &mut Common, now: Duration, input: Input) -> Self {
        match input {
            Input::Control { link, message } => {
                if link == LinkId::CONTROL {
                    common.last_heard = now;
                }
                self.on_message(common, now, link, message)
            }
            Input::UnknownFields { message, fields } => {
                common.on_unknown_fields(message, fields);
                self
            }
            Input::LinkLost(error) => self.on_control_lost(common, now, error),
            Input::Resumed => self.on_resumed(common, now),
            Input::LaneLost { lane, error, .. } => self.on_lane_lost(common, now, lane, error),
            Input::LaneJoined { lane } => self.on_lane_joined(common, now, lane),
            Input::Superseded => self.on_superseded(common, now),
            Input::Failed(MigrateError::Faults(FaultError::ProcessGone { .. }))
                if common.handover.is_fetching() =>
            {
                self.on_guest_ended(common, now, false)
            }
            Input::GuestEnded { in_order } if common.handover.is_fetching() => {
                self.on_guest_ended(common, now, in_order)
            }
            Input::GuestEnded { .. } => {
                let (action, source) = ("receive the guest", "the VMM has ended".into());
                self.fail(common, now, MigrateError::Vm { action, source })
            }
            Input::Failed(error) => self.fail(common, now, error),
            // The guest runs here, so there is nothing to cancel.
            Input::Cancel if common.handover.may_run() => self,
            Input::Cancel => {
                let during = self.name();
                self.fail(common, now, MigrateError::Cancelled { during })
            }
            Input::Prepared(result) => self.on_prepared(common, result),
            Input::Opened(result) => self.on_opened(common, result),
            Input::LaneEnded { lane, sequence } => self.on_lane_ended(common, lane, sequence),
            Input::Digest(digest) => match self {
                Self::Summing(summing) => summing.on_digest(common, now, digest),
                phase => phase,
            },
            Input::Loaded(result) => self.on_loaded(common, now, result),
            Input::Hashed(hash, took) => self.on_hashed(common, hash, took),
            Input::Claimed(answer) => self.on_claimed(common, now, answer),
            Input::IntentWritten(result) => {
                let written = DestinationEvent::IntentWritten(common.kind);
                self.on_journal(common, now, result, written).go_on_fetching(common, now)
            }
            Input::Fetched => {
                common.has_fetched = true;
                self.go_on_fetching(common, now)
            }
            Input::FetchedWritten(Err(error)) | Input::EndedWritten(Err(error)) => {
                self.on_fetched_failed(common, now, &error)
            }
            Input::FetchedWritten(written) => {
                self.on_journal(common, now, written, DestinationEvent::FetchedWritten)
            }
            Input::EndedWritten(written) => {
                self.on_journal(common, now, written, DestinationEvent::EndedWritten)
            }
            Input::AbortWritten(result) => {
                self.on_journal(common, now, result, DestinationEvent::AbortWritten)
            }
            Input::Started(result) => self.on_started(common, now, result),
            Input::Arriving => self.on_arriving(now),
            Input::Away { took } => {
                common.on_away(now, took);
                self
            }
            Input::StreamRefused | Input::RequestsEnded | Input::VmmGone | Input::Tick => self,
        }
    }

    fn on_message(
        self,
        common: &mut Common,
        now: Duration,
        link: LinkId,
        message: ControlMessage,
    ) -> Self {
        let ours = self.session_id();
        match (message, self) {
            (
                ControlMessage::Begin {
                    session,
                    guest: identity,
                    vmm,
                    config,
                    layout,
                    lanes,
                    verify,
                    reconnect_ms,
                    release,
                    streams,
                    used_bytes,
                    fetch_lanes,
                    witness,
                },
                Self::AwaitBegin(waiting),
            ) => {
                let guest = GuestDescription { identity, vmm, config, layout };
                let reconnect = Duration::from_millis(reconnect_ms.into());
                let begin = Announcement {
                    session,
                    guest,
                    lanes,
                    verify,
                    reconnect,
                    release,
                    streams,
                    used_bytes,
                    fetch_lanes,
                    witness,
                };
                waiting.on_begin(common, begin)
            }
            (
                ControlMessage::Final {
                    lane_sequences,
                    digest,
                    state,
                    paused,
                    kind,
                    storage_sample,
                },
                Self::Receiving(session),
            ) => {
                let last = Final { digest, state, paused, kind, storage_sample };
                session.on_final(common, now, lane_sequences, last)
            }
            (
                ControlMessage::Withdraw {},
                phase
                @ (Self::Receiving(_) | Self::Placing(_) | Self::Hashing(_) | Self::PutOff(_)),
            ) => phase.withdraw(common),
            (ControlMessage::Lacking { slot, first, bits }, Self::Receiving(session)) => {
                session.on_lacking(common, now, (slot, first), &bits)
            }
            (ControlMessage::Verify {}, phase) if phase.takes_verify(common) => {
                phase.on_verify(common)
            }
            (ControlMessage::Free { slot, runs }, phase) if phase.takes_verify(common) => {
                phase.on_free(common, now, slot, &runs)
            }
            // The guest is not complete here, and a source that follows the protocol knows that.
            (ControlMessage::Commit { session }, phase)
                if Some(session) == ours && common.handover == DestinationState::Receiving =>
            {
                let reason = format!("COMMIT does not belong in {}", phase.name());
                phase.fail(common, now, protocol(reason))
            }
            (ControlMessage::Commit { session }, phase) if Some(session) == ours => {
                phase.on_commit(common, now, link)
            }
            (ControlMessage::Query { session, offer: Some(offer) }, phase)
                if Some(session) == ours && common.handover.is_fetching() =>
            {
                common.links.keep_fetch_lanes(offer);
                common.act(Action::UseOffer { link, offer });
                phase
            }
            (ControlMessage::Query { session, .. }, phase) if Some(session) == ours => {
                phase.hand_over(common, now, link, DestinationEvent::Query)
            }
            // A source that was restarted did not know yet that the guest runs here.
            (ControlMessage::Abort { reason }, phase)
                if common.handover.is_fetching() && reason.code != ReasonCode::PagesLost =>
            {
                phase
            }
            (ControlMessage::Abort { reason }, phase) => {
                let error = MigrateError::EndedByPeer { peer: "source", reason };
                phase.fail(common, now, error)
            }
            (ControlMessage::Ping { nonce }, phase) => {
                common.act(Action::Send { link, message: ControlMessage::Pong { nonce } });
                phase
            }
            (ControlMessage::Pong { .. }, phase) => phase,
            (message, phase) => {
                let reason = format!("{} does not belong in {}", message.name(), phase.name());
                phase.fail(common, now, protocol(reason))
            }
        }
    }
}
