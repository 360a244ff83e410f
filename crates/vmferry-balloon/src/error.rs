//! What an embedder or a saved state can do wrong.

use crate::Features;

/// An error of a balloon. What a driver does wrong is no error but a [`Warning`](crate::Warning), except for
/// its choice of features.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BalloonError {
    /// The driver accepts features that were not offered, or does without VERSION_1: FEATURES_OK must stay
    /// clear.
    #[error(
        "the driver asks for the features {asked} of {offered}, and version-1 must be among them"
    )]
    Features {
        /// What it asks for.
        asked: Features,
        /// What is offered.
        offered: Features,
    },
    /// The device was told to begin before features were negotiated.
    #[error("no features are negotiated yet")]
    NotNegotiated,
    /// The configuration asks for what can't be.
    #[error("a queue can't have {0} entries: use a power of two up to 32768")]
    QueueSize(u16),
    /// A saved state that is not one of this device.
    #[error("the balloon's saved state: {0}")]
    State(String),
}
