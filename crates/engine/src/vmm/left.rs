//! Guests in VMMs that have outlived the process which migrated them, at both hosts.

use vmferry_faults::FaultRanges;
use vmferry_memory::GuestMemory;

use super::streamed::LateStreams;
use super::{DestinationVm, Resume, VmError};
use vmferry_handover::Reconnect;

/// A VMM process, apart from the receiver's, whose guest was started with post-copy. Only
/// [`run`](DestinationVm::run) is used of the supertrait: it must do nothing if the guest has run
/// here before.
pub trait LeftVm: DestinationVm {
    /// How the guest's pages arrive.
    ///
    /// # Errors
    /// The VMM or its userfaultfd is gone or out of reach.
    fn adopt(&mut self) -> Result<LeftGuest, VmError>;
}

/// A guest that lacks pages, and whose receiver has died.
#[derive(Debug)]
pub enum LeftGuest {
    /// This engine fetches them.
    Memory(LeftMemory),
    /// Its VMM does, by its own streams, which begin again when the source asks.
    Streams {
        /// The guest was paused at the source, and stays paused.
        stays_paused: bool,
    },
}

/// The memory of a guest that lacks pages.
#[derive(Debug)]
pub struct LeftMemory {
    /// All of it. A page is missing if it is not [populated](GuestMemory::populated).
    pub memory: GuestMemory,
    /// Where it is registered, with a duplicate of the userfaultfd that the VMM has kept open all
    /// the time. If it was closed, missing pages read as zeros since, and the guest is lost.
    pub ranges: FaultRanges,
    /// The guest was paused at the source, and stays paused.
    pub stays_paused: bool,
}

/// A VMM process at the source that the migrating process has left, because it has died.
pub trait AbandonedVm: Resume + Reconnect<Streams = LateStreams> {
    /// The guest's memory, to read the pages that the destination lacks; `None` if the VMM sends
    /// them itself. Called only if the guest was promised to a destination with post-copy.
    ///
    /// # Errors
    /// The VMM does not answer, or its memory is out of reach.
    fn memory(&mut self) -> Result<Option<GuestMemory>, VmError>;
}
