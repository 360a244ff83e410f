//! Errors of a VMM whose text is sent to the peer.
//!
//! A peer normally receives what has failed, without this host's paths and causes. Where only the
//! cause says what an operator must change, a VMM returns a [`Told`].

use crate::VmError;

/// Why a VMM can't go on, in words that both hosts may see.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Told {
    text: String,
    incompatible: bool,
}

impl Told {
    /// The two sides are no longer compatible.
    #[must_use]
    pub fn incompatible(text: String) -> Self {
        Self { text, incompatible: true }
    }

    /// Any other failure.
    #[must_use]
    pub fn failed(text: String) -> Self {
        Self { text, incompatible: false }
    }

    /// Whether the two sides are no longer compatible.
    #[must_use]
    pub fn is_incompatible(&self) -> bool {
        self.incompatible
    }

    /// The `Told` in a VMM's error or among its causes, if there is one.
    #[must_use]
    pub fn of(error: &VmError) -> Option<&Self> {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&**error);
        while let Some(error) = cause {
            if let Some(told) = error.downcast_ref() {
                return Some(told);
            }
            cause = error.source();
        }
        None
    }
}
