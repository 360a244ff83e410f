//! The source's machine from the announcement to the first round: the destination accepts or
//! refuses the guest, the dirty log starts, and the data channels are opened.

use std::time::Duration;

use vmferry_wire::{AlgorithmSet, Reason, ReasonCode, Release, Token};

use super::common::Common;
use super::io::{Action, Report};
use super::phase::{Announced, Found, Joining, Phase};
use super::pings::{FIRST_PINGS, FirstPings};
use crate::config::compression::CompressionWay;
use crate::error::MigrateError;

/// What the destination announces about itself when it accepts the guest.
#[derive(Debug)]
pub(super) struct Acceptance {
    pub(super) token: Token,
    pub(super) release: Option<Release>,
    /// Algorithms that it can decode.
    pub(super) algorithms: AlgorithmSet,
    /// Whether it hashes its memory before it loads the state.
    pub(super) verifies_placed: bool,
    /// Whether it compares a sample of the guest's storage.
    pub(super) compares_storage: bool,
    /// Whether it can run the guest before all its pages have arrived, and why not.
    pub(super) post_copy: Option<Result<(), String>>,
}

impl Announced {
    pub(super) fn on_accept(
        mut self,
        common: &mut Common,
        now: Duration,
        acceptance: Acceptance,
    ) -> Phase {
        let Acceptance {
            token,
            release,
            algorithms: known,
            verifies_placed,
            compares_storage,
            post_copy,
        } = acceptance;
        common.stats.destination = release;
        common.verification.before_load = verifies_placed;
        if let CompressionWay::Fixed(method) = common.config.compression.way
            && !known.contains(method.algorithm())
        {
            let algorithm = method.algorithm();
            let error = MigrateError::Undecodable { algorithm, known };
            return Phase::Announced(self).fail(common, now, error);
        }
        if let Err(error) = common.agree_on_post_copy(post_copy) {
            return Phase::Announced(self).fail(common, now, error);
        }
        common.act(Action::PackWith(known));
        if compares_storage {
            common.act(Action::PrepareStorageSample);
        }
        common.pace.predictor.measured_round_trip(Duration::ZERO);
        self.accepted = Some(token);
        self.open_lanes(common, now)
    }

    /// The log is running. Its start is accounted as the harvest of the first round.
    pub(super) fn on_log_started(
        mut self,
        common: &mut Common,
        now: Duration,
        pages: u64,
        stood_still: Duration,
    ) -> Phase {
        common.pace.last_harvest = now;
        let took = now.saturating_sub(common.pace.log_started);
        self.first_round = Some(Found { pages, took, stood_still });
        self.open_lanes(common, now)
    }

    /// Continues once the destination has accepted the guest and the log is running.
    fn open_lanes(self, common: &mut Common, now: Duration) -> Phase {
        let (Some(token), Some(first_round)) = (self.accepted, self.first_round) else {
            return Phase::Announced(self);
        };
        common.links.token = Some(token);
        common.begin_wait(now);
        common.act(Action::OpenLanes(token));
        Phase::Joining(Joining { first_round })
    }
}

impl Joining {
    pub(super) fn on_lanes_joined(self, common: &mut Common, now: Duration) -> Phase {
        common.pings.first = FirstPings::Awaited(FIRST_PINGS);
        common.send_ping(now);
        common.start_running_round(now, self.first_round)
    }
}

impl Common {
    pub(super) fn on_unknown_fields(&mut self, message: &'static str, fields: Vec<u16>) {
        if self.unknown_fields.note(message, &fields) {
            self.report(Report::UnknownFields { message, fields });
        }
        self.stats.unknown_fields = self.unknown_fields.count;
    }
}

/// The reason for a refusal, with the destination's release where the two may be incompatible.
pub(super) fn from_release(reason: Reason, release: Option<&Release>) -> Reason {
    match (reason.code, release) {
        (ReasonCode::Protocol | ReasonCode::Incompatible, Some(release)) => {
            Reason::new(reason.code, &format!("{reason} (it is {release})"))
        }
        _ => reason,
    }
}
