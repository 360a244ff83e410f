//! Several logs of the same memory, used as one.

use std::sync::Arc;

use parking_lot::Mutex;
use vmferry_memory::{PageSet, SlotId};

use crate::{DirtyLog, DirtyLogError};

/// Logs every page that any of its logs reports, such as the guest's writes from KVM and the
/// devices' from software. Its name is that of the first log.
pub struct UnionLog {
    logs: Vec<Arc<dyn DirtyLog>>,
    given_back: Mutex<Option<PageSet>>,
}

impl UnionLog {
    /// A union of these logs. Without any it logs nothing.
    #[must_use]
    pub fn new(logs: Vec<Arc<dyn DirtyLog>>) -> Self {
        Self { logs, given_back: Mutex::new(None) }
    }
}

impl DirtyLog for UnionLog {
    fn name(&self) -> &'static str {
        self.logs.first().map_or("none", |log| log.name())
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        for (started, log) in self.logs.iter().enumerate() {
            if let Err(error) = log.start() {
                for log in &self.logs[..started] {
                    // The caller must get the error of the failed start.
                    let _ = log.stop();
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        if let Some(pages) = self.given_back.lock().take() {
            into.union_with(&pages);
        }
        self.logs.iter().try_for_each(|log| log.collect(into))
    }

    fn collect_last(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        if let Some(pages) = self.given_back.lock().take() {
            into.union_with(&pages);
        }
        self.logs.iter().try_for_each(|log| log.collect_last(into))
    }

    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        self.logs.iter().try_for_each(|log| log.rearm(slot, first_word, words))
    }

    fn give_back(&self, pages: &PageSet) {
        match &mut *self.given_back.lock() {
            Some(kept) => kept.union_with(pages),
            none => *none = Some(pages.clone()),
        }
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        // All logs are stopped, even if one of them fails.
        self.logs.iter().map(|log| log.stop()).fold(Ok(()), Result::and)
    }
}
