//! The errors of this log, in words.

use std::io;
use std::ops::Range;

use vmferry_memory::SlotId;

use super::NAME;
use crate::DirtyLogError;

/// What is wrong with a range of addresses.
pub(super) fn mapping_error(slot: SlotId, range: &Range<u64>, why: String) -> DirtyLogError {
    DirtyLogError::Mapping { log: NAME, slot, start: range.start, end: range.end, why }
}

/// What the kernel refused for a slot.
pub(super) fn failed(action: &'static str, slot: SlotId, source: io::Error) -> DirtyLogError {
    DirtyLogError::Slot { log: NAME, action, slot, source }
}

/// Why there can be no such log here.
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
