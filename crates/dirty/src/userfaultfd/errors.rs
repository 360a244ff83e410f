//! Constructors for the errors of this log.

use std::io;
use std::ops::Range;

use vmferry_memory::SlotId;

use super::NAME;
use crate::DirtyLogError;

/// The error for a range of addresses that cannot be logged.
pub(super) fn mapping_error(slot: SlotId, range: &Range<u64>, why: String) -> DirtyLogError {
    DirtyLogError::Mapping { log: NAME, slot, start: range.start, end: range.end, why }
}

/// The error for an operation on a slot that the kernel refused.
pub(super) fn failed(action: &'static str, slot: SlotId, source: io::Error) -> DirtyLogError {
    DirtyLogError::Slot { log: NAME, action, slot, source }
}

/// The error if this log is not available, with the reason.
pub(super) fn unavailable(error: io::Error) -> DirtyLogError {
    let reason = match error.raw_os_error() {
        Some(libc::EINVAL) => {
            "it needs Linux 6.7 with asynchronous write protection; use a KVM log".to_owned()
        }
        Some(libc::EPERM | libc::ENOSYS) => {
            format!("userfaultfd is forbidden here ({error}); use a KVM log")
        }
        _ => error.to_string(),
    };
    DirtyLogError::Unavailable { log: NAME, reason }
}
