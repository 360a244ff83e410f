//! Pages that need not be sent, as reported by the guest, its balloon or the back end of its
//! memory.
//!
//! [`FreePages`] is the interface of every such source. A balloon device forwards the hints of the
//! guest's driver and the pages that the guest has given up. Memory that another process punches
//! holes into is [inspected](PunchedPages). Pages that were never populated need no hint: they are
//! not sent because [`GuestMemory::populated`] does not report them.
//!
//! # What a hint means and when it is valid
//!
//! ```text
//! harvest, protect again --> start (command id N) --> hints ...
//!     --> stop (STOP, drained) --> harvest ...
//! ```
//! A hint says that the guest does not need what the page held when `start` was called. The guest
//! may need what it writes there later: a guest that runs short of memory takes pages back before
//! the balloon returns them. So all pages of the round are write-protected before `start`, and a
//! hint removes them from that round only. A write after `start` is in the log and is found by the
//! next harvest, whatever was hinted before or after it. No hint is accepted between `stop` and the
//! next `start`, so no hint can affect what that harvest finds.

use std::sync::Arc;
use vmferry_handover::VmError;

use vmferry_memory::{GuestMemory, PageSet, SlotLayout};

use crate::rounds::hinted::Hinted;

/// A source of information about pages that need not be sent.
///
/// A migration calls `start` and `stop` alternately from one thread, and finally `end` if the guest
/// stays here.
pub trait FreePages: Send + Sync {
    /// Its name in messages, such as `virtio-balloon`.
    fn name(&self) -> &'static str;

    /// Whether the guest would answer [`start`](Self::start) with hints: its driver has negotiated
    /// the feature.
    fn can_hint(&self) -> bool {
        false
    }

    /// Whether hints may refer to pages of this slot. Pages that can't be hinted are sent first.
    fn covers(&self, slot: &SlotLayout) -> bool {
        let _ = slot;
        true
    }

    /// The dirty log has started, and the populated pages are determined next. Pages that were
    /// given up before this call must not be reported by [`zeroed`](Self::zeroed): they may have
    /// been written since, and no log records that.
    fn begin(&self) {}

    /// Asks the guest for free pages and forwards its hints until [`stop`](Self::stop). Does not
    /// wait for an answer.
    fn start(&self, hints: FreePageHints) {
        drop(hints);
    }

    /// Stops asking. On return no earlier hint is still in flight. Idempotent.
    fn stop(&self) {}

    /// The migration is over and the guest runs here: it may use the hinted pages again.
    fn end(&self) {}

    /// Adds to `zero` the pages that contain only zeros because they were given up: the balloon was
    /// inflated by them, or they were punched out of the memory's file. No dirty log reports that.
    /// Called after each harvest. A page that is written after the harvest may still be added.
    ///
    /// # Errors
    /// The pages can't be determined. The migration ends.
    fn zeroed(&self, look: &Look<'_>, zero: &mut PageSet) -> Result<(), VmError> {
        let _ = (look, zero);
        Ok(())
    }
}

/// The pages that `FreePages::zeroed` is asked about after a harvest.
#[derive(Debug)]
pub struct Look<'a> {
    /// Pages whose content was sent before. Other pages need not be reported.
    pub sent: &'a PageSet,
    /// Pages that this harvest found written.
    pub written: &'a PageSet,
}

/// Receives the hints of one [`start`](FreePages::start). After [`stop`](FreePages::stop), hints
/// are dropped.
#[derive(Clone, Debug)]
pub struct FreePageHints {
    hinted: Arc<Hinted>,
    id: u64,
}

impl FreePageHints {
    pub(crate) fn new(hinted: Arc<Hinted>, id: u64) -> Self {
        Self { hinted, id }
    }

    /// The guest does not need the content of the `bytes` bytes from guest-physical address `gpa`.
    /// Only whole pages within memory slots count.
    ///
    /// `poison` is the value that the guest expects in each 32-bit word of its free pages, which
    /// may be 0; `None` if it expects none.
    pub fn free(&self, gpa: u64, bytes: u64, poison: Option<u32>) {
        self.hinted.free(self.id, gpa, bytes, poison);
    }

    /// The guest has hinted all of its free pages.
    pub fn complete(&self) {
        self.hinted.complete(self.id);
    }
}

/// Pages that another process punches out of the guest's memory, as QEMU's balloon does. They are
/// found by looking for pages that are no longer populated.
#[derive(Debug)]
pub struct PunchedPages(GuestMemory);

impl PunchedPages {
    /// Inspects this memory.
    #[must_use]
    pub fn new(memory: GuestMemory) -> Self {
        Self(memory)
    }
}

impl FreePages for PunchedPages {
    fn name(&self) -> &'static str {
        "punched"
    }

    fn zeroed(&self, look: &Look<'_>, zero: &mut PageSet) -> Result<(), VmError> {
        let mut gone = look.sent.clone();
        // Pages that were written and then punched are included, because reading them would
        // populate them.
        gone.union_with(look.written);
        gone.subtract(&self.0.populated()?);
        zero.union_with(&gone);
        Ok(())
    }
}
