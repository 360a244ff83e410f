//! Why streams fail.

use std::time::Duration;

/// Why a stream ended before its time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamFailure {
    /// No link for too long.
    #[error("no link to {peer} for {} s: {last}", waited.as_secs())]
    LinkLost {
        /// The other daemon.
        peer: String,
        /// How long.
        waited: Duration,
        /// The last failure.
        last: String,
    },
    /// The other daemon refuses the stream.
    #[error("{peer} refuses the stream: {reason}")]
    Refused {
        /// The other daemon.
        peer: String,
        /// Its reason.
        reason: String,
    },
    /// The stream failed at the other daemon.
    #[error("the stream failed at the other host: {reason}")]
    Peer {
        /// Its reason.
        reason: String,
    },
    /// The other daemon breaks the protocol.
    #[error("the other daemon breaks the protocol: {problem}")]
    Protocol {
        /// How.
        problem: String,
    },
    /// The local socket failed, or its bytes break the rules of its protocol.
    #[error("the local connection failed: {problem}")]
    Local {
        /// How.
        problem: String,
    },
    /// The program at the other host has closed its connection, which the local one must not see.
    #[error("the program at the other host closed its connection before its answer")]
    Deserted,
    /// The daemon ends.
    #[error("the daemon ends")]
    Ending,
}
