//! The balloon as a source of free pages for the migration engine: the pages that the guest hints
//! and discards during a migration.

use std::sync::Arc;

use parking_lot::Mutex;
use vmferry::VmError;
use vmferry::vmm::free_pages::{FreePageHints, FreePages, Look};
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, PageSet, SlotLayout};

use super::Balloon;
use super::host::BalloonListener;
use crate::kvm::{DISPLAY, STILL};

/// The balloon of a guest that migrates. Dropping it lets the guest use the hinted pages again.
pub(crate) struct BalloonPages {
    balloon: Balloon,
    collector: Arc<PageCollector>,
}

/// Collects the pages that the device reports.
struct PageCollector {
    memory: GuestMemory,
    state: Mutex<State>,
}

struct State {
    /// The destination of hints, during a round of hints.
    hints: Option<FreePageHints>,
    /// Pages that were discarded since the last call of `zeroed`.
    discarded: PageSet,
}

impl BalloonPages {
    /// Starts to listen to a balloon.
    pub(crate) fn new(balloon: Balloon, memory: &GuestMemory) -> Self {
        let discarded = PageSet::for_memory(memory);
        let state = Mutex::new(State { hints: None, discarded });
        let collector = Arc::new(PageCollector { memory: memory.clone(), state });
        balloon.set_listener(Some(Arc::clone(&collector) as Arc<dyn BalloonListener>));
        Self { balloon, collector }
    }
}

impl Drop for BalloonPages {
    fn drop(&mut self) {
        self.balloon.set_listener(None);
        self.balloon.finish_hints();
    }
}

impl FreePages for BalloonPages {
    fn name(&self) -> &'static str {
        "virtio-balloon"
    }

    fn can_hint(&self) -> bool {
        self.balloon.can_hint()
    }

    /// The driver knows only RAM, so it never hints pages of the display's slots.
    fn covers(&self, slot: &SlotLayout) -> bool {
        !matches!(slot.gpa, DISPLAY | STILL)
    }

    fn begin(&self) {
        self.collector.state.lock().discarded.clear_all();
    }

    fn start(&self, hints: FreePageHints) {
        // Set before the guest can answer. If there is no driver any more, the round ends at once.
        self.collector.state.lock().hints = Some(hints.clone());
        if self.balloon.start_hints().is_none() {
            hints.complete();
        }
    }

    fn stop(&self) {
        self.balloon.stop_hints();
        self.collector.state.lock().hints = None;
    }

    fn end(&self) {
        self.balloon.finish_hints();
    }

    fn zeroed(&self, look: &Look<'_>, zero: &mut PageSet) -> Result<(), VmError> {
        let mut state = self.collector.state.lock();
        // A page that was also written may have been written after it was discarded.
        state.discarded.subtract(look.written);
        zero.union_with(&state.discarded);
        state.discarded.clear_all();
        Ok(())
    }
}

impl BalloonListener for PageCollector {
    fn hint(&self, run: PageRun, poison: Option<u32>) {
        let Ok(slot) = self.memory.slot(run.slot) else { return };
        if let Some(hints) = &self.state.lock().hints {
            let page = PAGE_SIZE as u64;
            hints.free(slot.gpa().0 + run.first * page, run.pages * page, poison);
        }
    }

    fn discarded(&self, run: PageRun) {
        if self.memory.check_run(run).is_ok() {
            self.state.lock().discarded.bitmap_mut(run.slot).set_run(run.first, run.pages);
        }
    }

    fn complete(&self) {
        if let Some(hints) = &self.state.lock().hints {
            hints.complete();
        }
    }
}
