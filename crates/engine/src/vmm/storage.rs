//! Comparing a guest's storage at both hosts.
//!
//! The hosts of a guest must have the same disks. Where nothing that both hosts know tells whether
//! they have, as with files on a network file system or a block device without a name, the source
//! reads some blocks while the guest is paused, and the destination reads the same ones before it
//! loads the guest. A VMM that can't do this implements nothing.

use vmferry_handover::{SessionId, VmError};

/// A guest's storage at the source.
pub trait SourceStorage {
    /// The destination compares the storage. Called before the first round, for work that would
    /// cost downtime later. Returns at once.
    fn prepare(&mut self, session: SessionId);

    /// Reads the sample, in the VMM's own format, at most 64 KiB. The guest is paused, its state is
    /// saved, and all its requests have completed. Parts that can't be read are left out; empty if
    /// there is nothing to compare. Must return within a second or two, whatever the storage does.
    fn sample(&mut self) -> Vec<u8>;
}

/// A guest's storage at the destination.
pub trait DestinationStorage {
    /// Begins to compare the source's sample, before the state is loaded.
    fn compare(&mut self, sample: &[u8]) -> Comparison;
}

/// A comparison that is under way while the state is loaded. Called after that: it waits for the
/// end.
///
/// # Errors
/// The storage is not the same, or can't be read here. The guest stays at the source.
pub type Comparison = Box<dyn FnOnce() -> Result<(), VmError>>;
