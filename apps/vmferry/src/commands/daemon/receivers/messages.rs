//! What a daemon and the process that starts its receivers say to each other.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmferry_handover::SessionId;
use vmferry_wire::GuestIdentity;

/// A receiver that the daemon wants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// The name of its template.
    pub template: String,
    /// The guest that it receives.
    pub guest: GuestIdentity,
    /// The session.
    pub session: SessionId,
    /// The name in the source's certificate, if it has one.
    pub source: Option<String>,
}

/// The daemon's message.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ask {
    /// Is repeated in the answer.
    pub number: u64,
    /// The receiver.
    pub order: Order,
}

/// A message to the daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Said {
    /// A receiver waits for its source, or there is none.
    Answer {
        /// Of the question.
        number: u64,
        /// Why there is none: the number of a [`vmferry_wire::ReasonCode`], and a text.
        refusal: Option<(u16, String)>,
    },
    /// A receiver has printed an event.
    Event {
        /// Its guest's name.
        guest: String,
        /// Its session.
        session: SessionId,
        /// The event.
        said: Value,
    },
}
