//! The source's machine: what the destination announces about itself.

use std::time::Duration;

use vmferry_wire::{AlgorithmSet, Reason, ReasonCode, Release, Token};

use super::Source;
use super::io::{Action, Report};
use crate::config::compression::CompressionWay;
use crate::error::MigrateError;

impl Source {
    /// The destination accepts the guest and can decode these algorithms.
    pub(super) fn on_accept(&mut self, now: Duration, token: Token, known: AlgorithmSet) {
        if let CompressionWay::Fixed(method) = self.config.compression.way
            && !known.contains(method.algorithm())
        {
            let algorithm = method.algorithm();
            return self.fail(now, MigrateError::Undecodable { algorithm, known });
        }
        self.act(Action::PackWith(known));
        self.predictor.measured_round_trip(Duration::ZERO);
        self.links.set_token(token);
        self.accepted = true;
        self.open_lanes(now);
    }

    pub(super) fn on_unknown_fields(&mut self, message: &'static str, fields: Vec<u16>) {
        if self.unknown_fields.note(message, &fields) {
            self.act(Action::Report(Report::UnknownFields { message, fields }));
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
