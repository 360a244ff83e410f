//! A witness that one process of a host provides to the others at a Unix socket with mode 0600, so
//! that only that process needs access to the store.
//!
//! Each connection carries one question, a line of JSON, and its answer.

mod client;
mod server;

use serde::{Deserialize, Serialize};
use vmferry::witness::{Register, WitnessId, WitnessRequest};
use vmferry_handover::{GuestIdentity, SessionId};

pub use client::{SocketWitness, WitnessSocketError};
pub use server::WitnessServer;

/// Maximum length of a question and of an answer, in bytes.
const MAX_LINE_BYTES: u64 = 8 << 10;

/// A question.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Question {
    /// The witness's name.
    Name,
    /// Open the register of a session that begins.
    Open {
        /// The witness that the session has: another one must not answer.
        witness: WitnessId,
        session: SessionId,
        guest: GuestIdentity,
    },
    /// A session's register, after a request.
    Register {
        /// The witness that the session has.
        witness: WitnessId,
        session: SessionId,
        request: Option<HostRequest>,
    },
}

/// What the processes of a host may ask for. Reports and fencing are for those that have access to
/// the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum HostRequest {
    Claim,
    TakeBack,
}

impl From<HostRequest> for WitnessRequest {
    fn from(request: HostRequest) -> Self {
        match request {
            HostRequest::Claim => Self::Claim,
            HostRequest::TakeBack => Self::TakeBack,
        }
    }
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Reply {
    Name(WitnessId),
    Register(Register),
    Error(String),
}

#[cfg(test)]
mod tests;
