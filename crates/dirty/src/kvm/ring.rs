//! The log over KVM's dirty rings.

use std::sync::Arc;

use vmferry_memory::PageSet;

use super::rings::{DirtyRings, NAME};
use crate::{DirtyLog, DirtyLogError};

/// The log over a machine's [`DirtyRings`] (`KVM_CAP_DIRTY_LOG_RING`, Linux 5.11).
///
/// The cost of a collect depends on the pages written, not on the size of memory, which suits huge
/// guests that write little. A guest that writes much is slowed down by full rings.
///
/// On a processor with PML, up to 512 writes of each running vCPU may be missing from a collect.
/// Their pages are in a later one, at the latest in the one after every vCPU has left `KVM_RUN`.
pub struct KvmRingLog {
    rings: Arc<DirtyRings>,
}

impl KvmRingLog {
    /// A log over these rings.
    #[must_use]
    pub fn new(rings: Arc<DirtyRings>) -> Self {
        Self { rings }
    }
}

impl DirtyLog for KvmRingLog {
    fn name(&self) -> &'static str {
        NAME
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        let mut state = self.rings.state();
        if !state.has_rings() {
            let reason = "the ring of no vCPU has been mapped".into();
            return Err(DirtyLogError::Unavailable { log: NAME, reason });
        }
        // Entries that an earlier log left must not be reported, nor fill the rings. Logging is
        // turned off in between, because only turning it on protects every page again.
        self.rings.slots().set_logging(false)?;
        state.drain(self.rings.slots())?;
        self.rings.slots().set_logging(true)?;
        state.logging = true;
        Ok(())
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        let mut state = self.rings.state();
        // If the harvest of a vCPU thread failed, logging is off, and that failure is reported.
        state.check_started()?;
        state.collect(self.rings.slots(), into)
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        let mut state = self.rings.state();
        state.logging = false;
        let stopped = self.rings.slots().set_logging(false);
        // No entries follow now. A ring that stayed full would block its vCPU for ever.
        stopped.and(state.drain(self.rings.slots()))
    }
}
