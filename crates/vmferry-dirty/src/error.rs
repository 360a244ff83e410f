//! What can go wrong with a dirty log.

use std::io;

use vmferry_memory::{MemoryError, SlotId};

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
    /// A mapping of guest memory that can't be logged, or not any more. After a collect that says so,
    /// the migration must end.
    #[error("the dirty log {log} can't follow {slot} at {start:#x}..{end:#x}: {why}")]
    Mapping {
        /// The log.
        log: &'static str,
        /// The slot that is mapped there.
        slot: SlotId,
        /// First address, in the process that writes.
        start: u64,
        /// Address after the last.
        end: u64,
        /// What happened, and what to do.
        why: String,
    },
    /// The process that writes is there no more, so nobody knows what it wrote last.
    #[error(
        "the dirty log {log} can't follow process {pid}: it has ended, or runs another program now"
    )]
    ProcessGone {
        /// The log.
        log: &'static str,
        /// The process.
        pid: u32,
    },
    /// The memory itself could not be asked what is populated.
    #[error("the dirty log {log} could not find the populated pages")]
    Populated {
        /// The log.
        log: &'static str,
        /// Why.
        #[source]
        source: MemoryError,
    },
    /// Used while it does not log.
    #[error("the dirty log {log} was not started")]
    NotStarted {
        /// The log.
        log: &'static str,
    },
}
