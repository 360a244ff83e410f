//! What can go wrong with a dirty log.

use std::io;

use vmferry_memory::SlotId;

/// An error of a dirty log.
#[derive(Debug, thiserror::Error)]
pub enum DirtyLogError {
    /// This kernel or KVM does not have it.
    #[error("the dirty log {log} is not available: {reason}")]
    Unavailable {
        /// The log.
        log: &'static str,
        /// What is missing, and what to use instead.
        reason: String,
    },
    /// The kernel refused something for one slot.
    #[error("the dirty log {log} could not {action} {slot}")]
    Slot {
        /// The log.
        log: &'static str,
        /// What was tried.
        action: &'static str,
        /// The slot.
        slot: SlotId,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The kernel refused something for the dirty rings.
    #[error("the dirty log kvm-ring could not {action}")]
    Ring {
        /// What was tried.
        action: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// An entry of a dirty ring that is of no page that is logged.
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
        /// What is wrong with it.
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
    /// Bits that reach beyond a slot.
    #[error("pages from word {first_word} on reach beyond {slot}")]
    OutOfSlot {
        /// The slot.
        slot: SlotId,
        /// First word of the bits.
        first_word: usize,
    },
    /// Used while it does not log.
    #[error("the dirty log {log} was not started")]
    NotStarted {
        /// The log.
        log: &'static str,
    },
}
