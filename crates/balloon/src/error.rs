//! Errors caused by an embedder or a saved state.

use crate::Features;

/// An error of a balloon. A driver's mistake is not an error but a [`Warning`](crate::Warning),
/// except in its choice of features.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BalloonError {
    /// The driver accepts features that were not offered, or does not accept VERSION_1: FEATURES_OK
    /// must stay clear.
    #[error(
        "the driver asks for the features {asked} of {offered}, and version-1 must be among them"
    )]
    Features {
        /// The features that the driver accepts.
        asked: Features,
        /// The features that were offered.
        offered: Features,
    },
    /// The device was activated before features were negotiated.
    #[error("no features are negotiated yet")]
    NotNegotiated,
    /// The configuration has an invalid queue size.
    #[error("a queue can't have {0} entries: use a power of two up to 32768")]
    QueueSize(u16),
    /// A saved state that this device cannot have.
    #[error("the balloon's saved state: {0}")]
    State(String),
}
