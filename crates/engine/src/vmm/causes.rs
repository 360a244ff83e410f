//! Causes of a VMM's error that the engine recognizes.

use std::error::Error;

use vmferry_handover::VmError;

/// The guest has powered off by itself, so there is nothing to migrate. A VMM error with this one
/// in its chain ends the migration with this message on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest has powered off")]
pub struct PoweredOff;

/// The VMM's own post-copy has failed, and its streams with it. Its guest stays paused. A VMM error
/// with this one in its chain makes the engine [connect](vmferry_handover::Reconnect) the VMM again
/// if the guest runs at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its post-copy has failed")]
pub struct PostCopyFailed;

impl PoweredOff {
    /// Whether this error is in the chain of a VMM's error.
    pub(crate) fn is_in(error: &VmError) -> bool {
        has_cause::<Self>(error)
    }
}

impl PostCopyFailed {
    /// Whether this error is in the chain of a VMM's error.
    pub(crate) fn is_in(error: &VmError) -> bool {
        has_cause::<Self>(error)
    }
}

fn has_cause<T: Error + 'static>(error: &VmError) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&**error);
    while let Some(error) = cause {
        if error.is::<T>() {
            return true;
        }
        cause = error.source();
    }
    false
}
