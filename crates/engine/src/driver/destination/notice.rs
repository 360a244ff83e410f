//! Notifications of a destination while it listens and receives.

use serde::Serialize;
use vmferry_transport::PeerIdentity;

use crate::causes::chain;
use crate::error::MigrateError;
use crate::machine::destination::io::Report;

/// A notification of a destination.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Notice {
    /// A source whose certificate was verified wants to migrate a guest.
    Authenticated {
        /// The source's address.
        peer: String,
        /// The names in its certificate.
        names: Vec<String>,
        /// The key exchange of its channel, such as `X25519MLKEM768`.
        key_exchange: Option<String>,
    },
    /// A connection was turned away, and listening continues. There is at most one notice per
    /// address and second. It counts the connections that were turned away without a notice.
    TurnedAway {
        /// The peer's address.
        peer: String,
        /// The reason.
        reason: String,
    },
    /// An attempt failed without leaving anything behind, and listening continues.
    AttemptFailed {
        /// The reason.
        reason: String,
    },
    /// Progress of the session, which has the names of its own events.
    #[serde(untagged)]
    Session(Report),
}

impl Notice {
    pub(crate) fn authenticated(peer: &PeerIdentity) -> Self {
        Self::Authenticated {
            peer: peer.address.clone(),
            names: peer.names.clone(),
            key_exchange: peer.key_exchange.clone(),
        }
    }

    pub(crate) fn turned_away(peer: &str, error: &MigrateError) -> Self {
        Self::TurnedAway { peer: peer.to_owned(), reason: chain(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_notice_is_an_event_with_a_name() {
        let (peer, reason) = ("peer 1".to_owned(), "why".to_owned());
        let names = Vec::new();
        let authenticated = Notice::Authenticated { peer: peer.clone(), names, key_exchange: None };
        for (notice, name) in [
            (authenticated, "authenticated"),
            (Notice::TurnedAway { peer, reason: reason.clone() }, "turned-away"),
            (Notice::AttemptFailed { reason }, "attempt-failed"),
            (Notice::Session(Report::Ready), "ready"),
        ] {
            assert_eq!(serde_json::to_value(&notice).unwrap()["event"], name, "{notice:?}");
        }
    }
}
