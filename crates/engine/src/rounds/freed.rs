//! The source driver's side of `FreePages`: asks for free pages in each round and keeps the
//! answers.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageSet, SlotLayout};
use vmferry_wire::{ControlMessage, MAX_FREE_RUNS};

use super::hinted::Hinted;
use crate::data::source::lane::Signal;
use crate::error::MigrateError;
use crate::vmm::free_pages::{FreePageHints, FreePages, Look};

/// The sources of free pages, and their answers.
pub struct Freed {
    origins: Vec<Arc<dyn FreePages>>,
    layout: Vec<SlotLayout>,
    hinted: Arc<Hinted>,
    /// Whether hints are wanted.
    wanted: bool,
    /// Whether hints are being requested at present.
    asking: bool,
    /// Pages that were hinted at any time and were not written since, as far as the harvests show.
    /// The destination need not have the source's content of these pages.
    free: PageSet,
    /// Pages whose content was sent.
    sent: PageSet,
    /// Pages of the last harvest that are zero and must not be read.
    zero: Arc<PageSet>,
    /// The time of the last review, and the number of hints that had arrived by then.
    looked: (Instant, u64),
    /// Pages that the link carries in a second.
    link_pages_per_s: f64,
}

/// How often the flow of hints is checked while lanes wait for them.
const REVIEW_PERIOD: Duration = Duration::from_millis(2);

/// Assumed rate of a link without a cap, in bytes per second: faster than this engine sends on any
/// machine measured.
const FASTEST_LINK: u64 = 8 << 30;

impl Freed {
    /// A value in which nothing has been requested yet.
    pub fn new(
        origins: Vec<Arc<dyn FreePages>>,
        memory: &GuestMemory,
        signal: Arc<Signal>,
    ) -> Self {
        let layout = memory.layout();
        Self {
            origins,
            hinted: Arc::new(Hinted::new(&layout, signal)),
            layout,
            wanted: true,
            asking: false,
            free: PageSet::for_memory(memory),
            sent: PageSet::for_memory(memory),
            zero: Arc::new(PageSet::for_memory(memory)),
            looked: (Instant::now(), 0),
            link_pages_per_s: 0.0,
        }
    }

    /// Sets whether hints are wanted.
    pub fn hinted_if(self, wanted: bool) -> Self {
        Self { wanted, ..self }
    }

    /// The log has started. Called before the populated pages are determined.
    pub fn begin(&self) {
        self.origins.iter().for_each(|origin| origin.begin());
    }

    /// Records the pages of the first round.
    pub fn sending(&mut self, pages: &PageSet) {
        if !self.origins.is_empty() {
            self.sent.union_with(pages);
        }
    }

    /// Whether hints are wanted and any source can give them.
    pub fn can_ask(&self) -> bool {
        self.wanted && self.origins.iter().any(|origin| origin.can_hint())
    }

    /// Requests hints for the round of these pages, which the log has just reported. All of them
    /// are write-protected first. Later writes of the guest are then in the log, so a hint is valid
    /// even for a page that was reused before the hint was read. `protect` is set if the pages are
    /// not protected yet.
    ///
    /// # Errors
    /// Errors of the dirty log.
    pub fn ask(
        &mut self,
        log: &dyn DirtyLog,
        pages: &Arc<PageSet>,
        protect: bool,
    ) -> Result<(), MigrateError> {
        if protect {
            for (slot, bitmap) in pages.iter() {
                if !bitmap.is_empty() {
                    log.rearm(slot, 0, bitmap.words())?;
                }
            }
        }
        let id = self.hinted.open(Arc::clone(pages));
        for origin in self.origins.iter().filter(|origin| origin.can_hint()) {
            origin.start(FreePageHints::new(Arc::clone(&self.hinted), id));
        }
        self.asking = true;
        self.looked = (Instant::now(), 0);
        Ok(())
    }

    /// Keeps lanes from sending pages that may yet be hinted, as long as hints remove pages faster
    /// than a link of this rate in bytes per second could send them. The round does not end later
    /// for that, and fewer unneeded pages are sent. Nothing is kept back before the first hint.
    pub fn hold(&mut self, max_bandwidth: Option<u64>) {
        self.link_pages_per_s = max_bandwidth.unwrap_or(FASTEST_LINK) as f64 / PAGE_SIZE as f64;
        if self.asking && self.is_flowing() {
            self.hinted.hold();
        }
    }

    /// Releases the lanes if hints have become slow. Returns when to check again while lanes wait.
    pub fn review(&mut self) -> Option<Duration> {
        if !self.hinted.is_held() {
            return None;
        }
        if self.looked.0.elapsed() >= REVIEW_PERIOD && !self.is_flowing() {
            self.hinted.release();
            return None;
        }
        Some(REVIEW_PERIOD)
    }

    fn is_flowing(&mut self) -> bool {
        let (now, useful) = (Instant::now(), self.hinted.useful());
        let (since, before) = std::mem::replace(&mut self.looked, (now, useful));
        (useful - before) as f64 > self.link_pages_per_s * (now - since).as_secs_f64()
    }

    /// Stops requesting hints. Called before every harvest.
    pub fn stop(&mut self) {
        if std::mem::take(&mut self.asking) {
            self.origins.iter().for_each(|origin| origin.stop());
            self.hinted.close(&mut self.free);
        }
    }

    /// Processes the pages that the log has just reported. Adds pages that were given up and must
    /// be sent as zeros because the destination has other content there.
    ///
    /// # Errors
    /// Errors of a source of free pages.
    pub fn harvested(&mut self, pages: &mut PageSet) -> Result<(), MigrateError> {
        if self.origins.is_empty() {
            return Ok(());
        }
        self.free.subtract(pages);
        let mut known = PageSet::for_layout(&self.layout);
        let look = Look { sent: &self.sent, written: pages };
        for origin in &self.origins {
            origin.zeroed(&look, &mut known).map_err(|source| MigrateError::Vm {
                action: "find the pages that its guest has given up",
                source,
            })?;
        }
        self.sent.union_with(pages);
        // Pages that were never sent are zero at the destination already.
        let mut zero = PageSet::for_layout(&self.layout);
        zero.set_to_intersection(&known, &self.sent);
        pages.union_with(&zero);
        self.sent.subtract(&zero);
        self.zero = Arc::new(zero);
        Ok(())
    }

    /// The guest stays here and may use its free pages again.
    pub fn end(&mut self) {
        self.stop();
        self.origins.iter().for_each(|origin| origin.end());
    }

    /// The hints of the present round, while they are requested.
    pub fn hinted(&self) -> Option<Arc<Hinted>> {
        self.asking.then(|| Arc::clone(&self.hinted))
    }

    /// Pages to send as zeros without reading them.
    pub fn zero(&self) -> Option<Arc<PageSet>> {
        (!self.origins.is_empty()).then(|| Arc::clone(&self.zero))
    }

    /// Pages whose content the destination need not have.
    pub fn free(&self) -> &PageSet {
        &self.free
    }

    /// Adds to `into` those of `pages` that may be hinted, and are therefore sent last.
    pub fn may_be_hinted(&self, pages: &PageSet, into: &mut PageSet) {
        for slot in &self.layout {
            if self.origins.iter().any(|origin| origin.can_hint() && origin.covers(slot)) {
                into.bitmap_mut(slot.slot).union_with(pages.bitmap(slot.slot));
            }
        }
    }
}

/// Messages that report these pages to the destination.
pub fn free_messages(pages: &PageSet) -> Vec<ControlMessage> {
    let mut messages = Vec::new();
    for (slot, bitmap) in pages.iter() {
        let runs: Vec<(u64, u64)> = bitmap.runs().collect();
        let message = |runs: &[(u64, u64)]| ControlMessage::Free { slot, runs: runs.to_vec() };
        messages.extend(runs.chunks(MAX_FREE_RUNS).map(message));
    }
    messages
}

impl fmt::Debug for Freed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.origins.iter().map(|origin| origin.name()).collect();
        f.debug_struct("Freed").field("origins", &names).field("asking", &self.asking).finish()
    }
}

#[cfg(test)]
mod tests {
    use vmferry_memory::{MemoryKind, SlotId};

    use super::*;
    use crate::vmm::free_pages::PunchedPages;

    #[test]
    fn freed_page_that_was_sent_is_sent_again_once() {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 64 }];
        let memory = GuestMemory::allocate(&layout, MemoryKind::Memfd).unwrap();
        let write = |page: u64| memory.write_at(page * PAGE_SIZE as u64, &[1]).unwrap();
        (10..20).for_each(write);
        let origin = Arc::new(PunchedPages::new(memory.clone()));
        let mut freed = Freed::new(vec![origin], &memory, Arc::default());
        freed.sending(&memory.populated().unwrap());

        memory.punch().unwrap();
        write(12);
        let mut pages = PageSet::for_memory(&memory);
        freed.harvested(&mut pages).unwrap();
        let runs = |set: &PageSet| set.bitmap(SlotId(0)).runs().collect::<Vec<_>>();
        assert_eq!(runs(&pages), [(10, 2), (13, 7)]);
        assert_eq!(runs(&freed.zero().unwrap()), [(10, 2), (13, 7)]);

        pages.clear_all();
        freed.harvested(&mut pages).unwrap();
        assert!(pages.is_empty(), "sent as zeros, they are sent no more");
        assert!(memory.populated().unwrap().count() == 1, "nothing was populated by looking");
    }
}
