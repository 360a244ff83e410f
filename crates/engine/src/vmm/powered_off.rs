//! The error of a VMM whose guest has ended.

use vmferry_handover::VmError;

/// The guest has powered off by itself, so there is nothing to migrate. A VMM error with this one
/// in its chain ends the migration with this message on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest has powered off")]
pub struct PoweredOff;

impl PoweredOff {
    /// Whether this error is in the chain of a VMM's error.
    pub(crate) fn is_in(error: &VmError) -> bool {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&**error);
        while let Some(error) = cause {
            if error.is::<Self>() {
                return true;
            }
            cause = error.source();
        }
        false
    }
}
