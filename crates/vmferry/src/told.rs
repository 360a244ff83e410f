//! Errors of a VMM that both hosts are told of in the VMM's own words.
//!
//! A peer is told what has failed, without this host's paths and causes. Where only the cause says
//! what an operator must change, a VMM returns a [`Told`].

use crate::VmError;

/// Why a VMM can't go on, in words for both hosts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Told {
    text: String,
    incompatible: bool,
}

impl Told {
    /// The two sides no longer fit.
    #[must_use]
    pub fn incompatible(text: String) -> Self {
        Self { text, incompatible: true }
    }

    /// Something has failed.
    #[must_use]
    pub fn failed(text: String) -> Self {
        Self { text, incompatible: false }
    }

    /// Whether the two sides no longer fit.
    #[must_use]
    pub fn is_incompatible(&self) -> bool {
        self.incompatible
    }

    /// Such an error in what a VMM has said, or among its causes.
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
