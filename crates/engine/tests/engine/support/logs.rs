//! A dirty log that is as strict as its contract allows.

use std::sync::Mutex;

use vmferry_dirty::{DirtyLog, DirtyLogError, UffdLog};
use vmferry_memory::{GuestMemory, PageSet, SlotId};

/// A log that sees writes to a harvested page only once it was re-armed, as the contract of
/// [`DirtyLog::rearm`] allows. No real log is as hard on the engine.
pub struct LateLog {
    log: UffdLog,
    unarmed: Mutex<PageSet>,
}

impl LateLog {
    pub fn new(memory: &GuestMemory) -> Self {
        let unarmed = Mutex::new(PageSet::for_memory(memory));
        Self { log: UffdLog::new(memory).unwrap(), unarmed }
    }
}

impl DirtyLog for LateLog {
    fn name(&self) -> &'static str {
        "late"
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        self.log.start()
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        let mut unarmed = self.unarmed.lock().unwrap();
        let mut seen = unarmed.clone();
        seen.clear_all();
        self.log.collect(&mut seen)?;
        seen.subtract(&unarmed);
        unarmed.union_with(&seen);
        into.union_with(&seen);
        Ok(())
    }

    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        let mut unarmed = self.unarmed.lock().unwrap();
        let pages = unarmed.bitmap_mut(slot);
        for (index, word) in (first_word..).zip(words) {
            (0..64).filter(|bit| word >> bit & 1 == 1).for_each(|bit| {
                pages.clear(index as u64 * 64 + bit);
            });
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.log.stop()
    }
}
