//! A dirty log whose harvests a test sees and changes.

use std::sync::Arc;

use vmferry_dirty::{DirtyLog, DirtyLogError};
use vmferry_memory::{PageRun, PageSet, SlotId};

/// A dirty log that passes each harvest to a filter.
///
/// A filter that clears pages makes a negative control: a test of dirty logs must detect that.
pub struct FilteredLog {
    log: Arc<dyn DirtyLog>,
    filter: Box<dyn Fn(&mut PageSet) + Send + Sync>,
}

impl FilteredLog {
    /// Passes each harvest of `log` to `filter`, the last one included.
    pub fn new(
        log: Arc<dyn DirtyLog>,
        filter: impl Fn(&mut PageSet) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { log, filter: Box::new(filter) })
    }

    /// Loses every write to these pages.
    pub fn losing(log: Arc<dyn DirtyLog>, lost: PageRun) -> Arc<Self> {
        Self::new(log, move |dirty| dirty.bitmap_mut(lost.slot).clear_run(lost.first, lost.pages))
    }
}

impl DirtyLog for FilteredLog {
    fn name(&self) -> &'static str {
        self.log.name()
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        self.log.start()
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        self.log.collect(into)?;
        (self.filter)(into);
        Ok(())
    }

    fn collect_last(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        self.log.collect_last(into)?;
        (self.filter)(into);
        Ok(())
    }

    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        self.log.rearm(slot, first_word, words)
    }

    fn give_back(&self, pages: &PageSet) {
        self.log.give_back(pages);
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.log.stop()
    }
}
