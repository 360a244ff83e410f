//! KVM's dirty ring as a log.

use std::sync::Arc;

use vmferry_memory::PageSet;

use super::rings::{DirtyRings, NAME};
use crate::{DirtyLog, DirtyLogError};

/// The log over a machine's [`DirtyRings`] (`KVM_CAP_DIRTY_LOG_RING`, Linux 5.11).
///
/// A collect costs what was written, not what the memory is large: the log for huge guests that
/// write little. A guest that writes much is held up by full rings.
///
/// On a processor with PML, up to 512 writes of each running vCPU may be missing from a collect:
/// their pages come out of a later one, at the latest out of the one after every vCPU has left
/// `KVM_RUN`.
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
        // What an earlier log left must not be taken for news, nor fill the rings. Logging is off
        // in between, since only turning it on protects every page anew.
        self.rings.slots().set_logging(false)?;
        state.drain(self.rings.slots())?;
        self.rings.slots().set_logging(true)?;
        state.logging = true;
        Ok(())
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        let mut state = self.rings.state();
        // A failed harvest by a vCPU thread has turned logging off, and is what is to be told.
        state.check_started()?;
        state.collect(self.rings.slots(), into)
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        let mut state = self.rings.state();
        state.logging = false;
        let stopped = self.rings.slots().set_logging(false);
        // Now nothing comes after, and a ring that stayed full would hold its vCPU up for ever.
        stopped.and(state.drain(self.rings.slots()))
    }
}
