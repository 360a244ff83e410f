//! Errors of dirty logs.

use std::io;

use vmferry_memory::{MemoryError, SlotId};

/// An error of a dirty log.
#[derive(Debug, thiserror::Error)]
pub enum DirtyLogError {
    /// This kernel or KVM does not support the log.
    #[error("the dirty log {log} is not available: {reason}")]
    Unavailable {
        /// The log.
        log: &'static str,
        /// What is missing, and what to use instead.
        reason: String,
    },
    /// The kernel refused an operation on a slot.
    #[error("the dirty log {log} could not {action} {slot}")]
    Slot {
        /// The log.
        log: &'static str,
        /// The operation.
        action: &'static str,
        /// The slot.
        slot: SlotId,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel refused an operation on the dirty rings.
    #[error("the dirty log kvm-ring could not {action}")]
    Ring {
        /// The operation.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A dirty ring has an entry for a page that is not logged.
    #[error(
        "the dirty ring of vCPU {vcpu} names page {page:#x} of KVM's slot {kvm_slot}, {problem}"
    )]
    RingEntry {
        /// The vCPU.
        vcpu: usize,
        /// KVM's number of the slot.
        kvm_slot: u32,
        /// The page within the slot.
        page: u64,
        /// Why the entry is wrong.
        problem: String,
    },
    /// A slot that the log does not have.
    #[error("the dirty log {log} has no {slot}")]
    NoSuchSlot {
        /// The log.
        log: &'static str,
        /// The slot.
        slot: SlotId,
    },
    /// Bits beyond the end of a slot.
    #[error("pages from word {first_word} on reach beyond {slot}")]
    OutOfSlot {
        /// The slot.
        slot: SlotId,
        /// First word of the bits.
        first_word: usize,
    },
    /// A mapping of guest memory that cannot be logged, or no longer. If a collect returns this,
    /// the migration must end.
    #[error("the dirty log {log} can't follow {slot} at {start:#x}..{end:#x}: {why}")]
    Mapping {
        /// The log.
        log: &'static str,
        /// The slot that is mapped there.
        slot: SlotId,
        /// First address, in the address space of the writing process.
        start: u64,
        /// First address after the range.
        end: u64,
        /// What happened, and what to do.
        why: String,
    },
    /// The writing process has ended, so its last writes are unknown.
    #[error(
        "the dirty log {log} can't follow process {pid}: it has ended, or runs another program now"
    )]
    ProcessGone {
        /// The log.
        log: &'static str,
        /// The process.
        pid: u32,
    },
    /// The populated pages of the memory could not be found.
    #[error("the dirty log {log} could not find the populated pages")]
    Populated {
        /// The log.
        log: &'static str,
        /// The error of the memory.
        #[source]
        source: MemoryError,
    },
    /// The log was used while it was not started.
    #[error("the dirty log {log} was not started")]
    NotStarted {
        /// The log.
        log: &'static str,
    },
}
