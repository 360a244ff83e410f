//! The source's machine and what the destination says of itself: what it is, and what it can do.

use std::time::Duration;

use vmferry_wire::{AlgorithmSet, Reason, ReasonCode, Release, Token};

use super::Source;
use crate::compression::CompressionWay;
use crate::error::MigrateError;
use crate::source::io::{Action, Report};

impl Source {
    /// The destination takes the guest, and can decode so much.
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

/// Why the destination refuses, with what it is where the two may be too different.
pub(super) fn from_release(reason: Reason, release: Option<&Release>) -> Reason {
    match (reason.code, release) {
        (ReasonCode::Protocol | ReasonCode::Incompatible, Some(release)) => {
            Reason::new(reason.code, &format!("{reason} (it is {release})"))
        }
        _ => reason,
    }
}
