//! The simulated guest's dirty log, which write-protects pages as a kernel's log does.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use vmferry_dirty::{DirtyLog, DirtyLogError};
use vmferry_memory::{PageSet, SlotId};

use super::Page;

/// A log of every page that the guest writes. It sees the first write to a page, and no further
/// write until the page is write-protected again, just before it is read.
#[derive(Default)]
pub struct WriteLog(Mutex<LogState>);

#[derive(Default)]
struct LogState {
    logging: bool,
    pages: BTreeSet<Page>,
    /// Pages whose writes are not seen.
    unprotected: BTreeSet<Page>,
    forgets: bool,
}

impl WriteLog {
    /// The guest writes a page.
    pub fn mark(&self, page: Page) {
        let mut state = self.0.lock();
        if state.logging && state.unprotected.insert(page) {
            state.pages.insert(page);
        }
    }

    /// From now on the log loses a page at each harvest.
    pub fn forget(&self) {
        self.0.lock().forgets = true;
    }
}

impl DirtyLog for WriteLog {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        let mut state = self.0.lock();
        state.pages.clear();
        state.unprotected.clear();
        state.logging = true;
        Ok(())
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        let mut state = self.0.lock();
        if state.forgets {
            state.pages.pop_last();
        }
        for (slot, page) in std::mem::take(&mut state.pages) {
            into.bitmap_mut(SlotId(slot)).or_words((page / 64) as usize, &[1 << (page % 64)]);
        }
        Ok(())
    }

    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        let mut state = self.0.lock();
        state.unprotected.retain(|&(its_slot, page)| {
            let word = (page / 64) as usize;
            let bits = word.checked_sub(first_word).and_then(|word| words.get(word));
            its_slot != slot.0 || bits.is_none_or(|bits| bits >> (page % 64) & 1 == 0)
        });
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.0.lock().logging = false;
        Ok(())
    }
}
