//! What the destination keeps from the greeting to the end, in every phase.

use std::collections::VecDeque;
use std::time::Duration;

use vmferry_wire::{ControlMessage, Token};

use super::io::{Action, LinkId, Report};
use super::losses::Links;
use crate::causes::chain;
use crate::config::Timeouts;
use crate::error::MigrateError;
use crate::machine::peer::{DestinationSide, UnknownFields};
use crate::stats::DestinationStats;
use vmferry_handover::{DestinationState, SessionKind, VmError};

/// The state that outlives the phases.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) timeouts: Timeouts,
    /// What the data channels must present.
    pub(super) token: Token,
    pub(super) our_side: DestinationSide,
    pub(super) handover: DestinationState,
    pub(super) kind: SessionKind,
    /// When to claim the guest again, if the witness has not answered.
    pub(super) claim_retry: Option<Duration>,
    /// Why it has not answered.
    pub(super) claim_failure: Option<VmError>,
    /// Pages that only the source has when the state is loaded.
    pub(super) missing_pages: u64,
    /// The last missing page was placed, possibly before the guest runs.
    pub(super) has_fetched: bool,
    /// The guest has ended while it lacked pages.
    pub(super) guest_ended: bool,
    /// When to try again to write FETCHED, if that has failed.
    pub(super) fetched_retry: Option<Duration>,
    /// Why pages did not arrive, as reported last.
    pub(super) fetching_failure: Option<String>,
    /// Why the session ended without the guest, or why the guest crashed, as far as that is known.
    pub(super) failure: Option<MigrateError>,
    /// When the source last sent a message.
    pub(super) last_heard: Duration,
    pub(super) links: Links,
    pub(super) stats: DestinationStats,
    pub(super) unknown_fields: UnknownFields,
    pub(super) actions: VecDeque<Action>,
}

impl Common {
    pub(super) fn new(
        timeouts: Timeouts,
        token: Token,
        our_side: DestinationSide,
        now: Duration,
    ) -> Self {
        Self {
            timeouts,
            token,
            handover: DestinationState::Receiving,
            kind: SessionKind::PreCopy,
            claim_retry: None,
            claim_failure: None,
            missing_pages: 0,
            has_fetched: false,
            guest_ended: false,
            fetched_retry: None,
            fetching_failure: None,
            failure: None,
            last_heard: now,
            links: Links::default(),
            stats: DestinationStats { protocol: our_side.protocol, ..DestinationStats::default() },
            unknown_fields: UnknownFields::default(),
            actions: VecDeque::new(),
            our_side,
        }
    }

    pub(super) fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    pub(super) fn report(&mut self, report: Report) {
        self.act(Action::Report(report));
    }

    /// Reports why pages do not arrive, unless that was the last report of this kind.
    pub(super) fn report_fetching_failure(&mut self, error: &MigrateError) {
        let reason = chain(error);
        if self.fetching_failure.as_ref() != Some(&reason) {
            self.fetching_failure = Some(reason.clone());
            self.report(Report::FetchingFailed { reason });
        }
    }

    /// Sends a message on the session's control channel.
    pub(super) fn send(&mut self, message: ControlMessage) {
        self.act(Action::Send { link: LinkId::CONTROL, message });
    }
}

/// The source breaks the protocol.
pub(super) fn protocol(reason: String) -> MigrateError {
    MigrateError::protocol("control", 0, reason)
}

/// Microseconds, as in messages.
pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
