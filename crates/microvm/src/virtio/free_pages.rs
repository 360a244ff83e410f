//! The balloon, as the engine knows it: what the guest hints and gives up while it migrates.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmferry::VmError;
use vmferry::vmm::free_pages::{FreePageHints, FreePages, Look};
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, PageSet, SlotLayout};

use super::Balloon;
use super::host::BalloonListener;
use crate::kvm::{DISPLAY, STILL};

/// A balloon whose guest migrates. Dropping it lets the guest use again what it has hinted.
pub(crate) struct BalloonPages {
    balloon: Balloon,
    told: Arc<Told>,
}

/// What the device has told.
struct Told {
    memory: GuestMemory,
    state: Mutex<State>,
}

struct State {
    /// Where hints go, while they are asked for.
    hints: Option<FreePageHints>,
    /// Pages that have lost their content since the last look.
    discarded: PageSet,
}

impl BalloonPages {
    /// Listens to a balloon from now on.
    pub(crate) fn new(balloon: Balloon, memory: &GuestMemory) -> Self {
        let discarded = PageSet::for_memory(memory);
        let state = Mutex::new(State { hints: None, discarded });
        let told = Arc::new(Told { memory: memory.clone(), state });
        balloon.set_listener(Some(Arc::clone(&told) as Arc<dyn BalloonListener>));
        Self { balloon, told }
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

    /// The display's slots are no RAM, which is all that a driver knows of.
    fn covers(&self, slot: &SlotLayout) -> bool {
        !matches!(slot.gpa, DISPLAY | STILL)
    }

    fn begin(&self) {
        self.told.lock().discarded.clear_all();
    }

    fn start(&self, hints: FreePageHints) {
        // Before the guest can answer. A driver that has gone meanwhile never will.
        self.told.lock().hints = Some(hints.clone());
        if self.balloon.start_hints().is_none() {
            hints.complete();
        }
    }

    fn stop(&self) {
        self.balloon.stop_hints();
        self.told.lock().hints = None;
    }

    fn end(&self) {
        self.balloon.finish_hints();
    }

    fn zeroed(&self, look: &Look<'_>, zero: &mut PageSet) -> Result<(), VmError> {
        let mut state = self.told.lock();
        // What was written too may have been written afterwards.
        state.discarded.subtract(look.written);
        zero.union_with(&state.discarded);
        state.discarded.clear_all();
        Ok(())
    }
}

impl BalloonListener for Told {
    fn hint(&self, run: PageRun, poison: Option<u32>) {
        let Ok(slot) = self.memory.slot(run.slot) else { return };
        if let Some(hints) = &self.lock().hints {
            let page = PAGE_SIZE as u64;
            hints.free(slot.gpa().0 + run.first * page, run.pages * page, poison);
        }
    }

    fn discarded(&self, run: PageRun) {
        if self.memory.check_run(run).is_ok() {
            self.lock().discarded.bitmap_mut(run.slot).set_run(run.first, run.pages);
        }
    }

    fn complete(&self) {
        if let Some(hints) = &self.lock().hints {
            hints.complete();
        }
    }
}

impl Told {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
