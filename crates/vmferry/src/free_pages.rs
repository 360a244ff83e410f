//! Pages that need not be sent: what the guest, its balloon or what its memory is made of says of them.
//!
//! [`FreePages`] is one interface for all who know: a balloon device passes on what the guest's driver hints, and
//! what the guest has given up; memory that another process punches holes into is [looked at](PunchedPages).
//! Pages that were never populated are no matter of this: they are not sent because
//! [`GuestMemory::populated`] does not find them.
//!
//! # What a hint means, and when it counts
//!
//! ```text
//!  harvest, protect again --> start (command id N) --> hints ... --> stop (STOP, drained) --> harvest ...
//! ```
//! A hint says: the guest does not need what the page held when `start` was called. It may need what it
//! writes there afterwards: a guest that runs short of memory takes pages back before it is told to. So all pages of
//! the round are protected before `start`, and a hint takes them out of that round only: a write after
//! `start` is in the log, and comes with the next harvest, whatever was hinted before or after it. No
//! hint is taken between `stop` and the next `start`, so none can touch what that next harvest finds.

use std::sync::Arc;

use vmferry_memory::{GuestMemory, PageSet, SlotLayout};

use crate::source::hinted::Hinted;
use crate::vm::VmError;

/// Somebody who knows of pages that need not be sent.
///
/// A migration calls `start` and `stop` in turns, from one thread, and at last `end` if the guest stays.
pub trait FreePages: Send + Sync {
    /// Its name in messages, such as `virtio-balloon`.
    fn name(&self) -> &'static str;

    /// Whether the guest would answer [`start`](Self::start) with hints: it has a driver that has agreed to.
    fn can_hint(&self) -> bool {
        false
    }

    /// Whether hints may be about pages of this slot. What can't be free is sent first.
    fn covers(&self, slot: &SlotLayout) -> bool {
        let _ = slot;
        true
    }

    /// The dirty log has begun, and the populated pages are found out next: what was given up before is no news any
    /// more, and [`zeroed`](Self::zeroed) must not tell it. It may have been written since, and no log says so.
    fn begin(&self) {}

    /// Asks the guest for pages that are free, and passes on what it says until [`stop`](Self::stop). Does not wait
    /// for an answer.
    fn start(&self, hints: FreePageHints) {
        drop(hints);
    }

    /// Asks no more. On return no hint that was given before is on its way. Idempotent.
    fn stop(&self) {}

    /// The migration is over, and the guest runs here: it may use again what it has hinted.
    fn end(&self) {}

    /// Adds to `zero` pages that hold zeros and nothing else, because they were given up: a balloon was inflated
    /// by them, or they were punched out of the memory's file. No log tells that. Called after each harvest; a page
    /// that is written after it may be added all the same.
    ///
    /// # Errors
    /// Whatever keeps it from knowing. The migration ends.
    fn zeroed(&self, look: &Look<'_>, zero: &mut PageSet) -> Result<(), VmError> {
        let _ = (look, zero);
        Ok(())
    }
}

/// What is asked after a harvest.
#[derive(Debug)]
pub struct Look<'a> {
    /// Pages whose content was sent before: of others nothing needs to be said.
    pub sent: &'a PageSet,
    /// Pages that this harvest has found written.
    pub written: &'a PageSet,
}

/// Where the hints of one [`start`](FreePages::start) go. After [`stop`](FreePages::stop) nothing comes through any
/// more.
#[derive(Clone, Debug)]
pub struct FreePageHints {
    hinted: Arc<Hinted>,
    id: u64,
}

impl FreePageHints {
    pub(crate) fn new(hinted: Arc<Hinted>, id: u64) -> Self {
        Self { hinted, id }
    }

    /// The guest does not need what `bytes` bytes from guest-physical address `gpa` on hold. Whole pages within memory
    /// slots count, the rest does not.
    ///
    /// `poison` is what the guest expects in each 32-bit word of its free pages, which may be 0;
    /// `None` if it expects nothing.
    pub fn free(&self, gpa: u64, bytes: u64, poison: Option<u32>) {
        self.hinted.free(self.id, gpa, bytes, poison);
    }

    /// The guest has no more free pages than it has said.
    pub fn complete(&self) {
        self.hinted.complete(self.id);
    }
}

/// Pages that somebody punches out of the guest's memory, as QEMU's balloon does: found by looking for what is
/// populated no more.
#[derive(Debug)]
pub struct PunchedPages(GuestMemory);

impl PunchedPages {
    /// Those of this memory.
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
        // Also what was written and punched since: reading it would populate it.
        gone.union_with(look.written);
        gone.subtract(&self.0.populated()?);
        zero.union_with(&gone);
        Ok(())
    }
}
