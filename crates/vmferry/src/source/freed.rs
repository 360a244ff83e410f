//! What the driver of the source does with those who know of free pages: asks them, round by round, and
//! keeps what they have said.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageSet, SlotLayout};
use vmferry_wire::{ControlMessage, MAX_FREE_RUNS};

use super::hinted::Hinted;
use super::signal::Signal;
use crate::error::MigrateError;
use crate::free_pages::{FreePageHints, FreePages, Look};

/// Those who know, and what they have said.
pub struct Freed {
    origins: Vec<Arc<dyn FreePages>>,
    layout: Vec<SlotLayout>,
    hinted: Arc<Hinted>,
    /// Whether hints are wanted.
    wanted: bool,
    /// Whether they are being asked for.
    asking: bool,
    /// Pages hinted at any time and not written since, as far as harvests know: the destination need not have
    /// what the source has there.
    free: PageSet,
    /// Pages whose content was sent.
    sent: PageSet,
    /// Pages of the last harvest that are zero, and must not be read.
    zero: Arc<PageSet>,
    /// When it was last looked how many hints have come, and how many had.
    looked: (Instant, u64),
    /// Pages that the link carries in a second.
    link_pages_per_s: f64,
}

/// How often it is looked whether hints still come, while lanes wait for them.
const REVIEW_PERIOD: Duration = Duration::from_millis(2);

/// A link without a cap, in bytes per second: faster than this engine sends on any machine that it was measured on.
const FASTEST_LINK: u64 = 8 << 30;

impl Freed {
    /// Nothing asked yet.
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

    /// The same, and hints are asked for or not.
    pub fn hinted_if(self, wanted: bool) -> Self {
        Self { wanted, ..self }
    }

    /// The log has begun. Before it is found out what is populated.
    pub fn begin(&self) {
        self.origins.iter().for_each(|origin| origin.begin());
    }

    /// Takes the pages of the first round.
    pub fn sending(&mut self, pages: &PageSet) {
        if !self.origins.is_empty() {
            self.sent.union_with(pages);
        }
    }

    /// Whether hints are wanted, and any origin would give some.
    pub fn can_ask(&self) -> bool {
        self.wanted && self.origins.iter().any(|origin| origin.can_hint())
    }

    /// Asks for hints for the round of these pages, which the log has just given. All of them are protected
    /// again first: what the guest writes from then on is in the log, so that a hint can be trusted even of a page that
    /// was taken into use again before the hint was read. `protect`: they are not protected yet.
    ///
    /// # Errors
    /// What the log says.
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

    /// Keeps lanes from sending what may be hinted yet, for as long as hints take out more than a link of so many
    /// bytes per second could send: the round ends no later for it, and nothing is sent that nobody needs. Without
    /// hints so far nothing is kept back.
    pub fn hold(&mut self, max_bandwidth: Option<u64>) {
        self.link_pages_per_s = max_bandwidth.unwrap_or(FASTEST_LINK) as f64 / PAGE_SIZE as f64;
        if self.asking && self.is_flowing() {
            self.hinted.hold();
        }
    }

    /// Lets lanes go on if hints have become few. Says when to look again, while lanes wait.
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

    /// Asks no more. Before every harvest.
    pub fn stop(&mut self) {
        if std::mem::take(&mut self.asking) {
            self.origins.iter().for_each(|origin| origin.stop());
            self.hinted.close(&mut self.free);
        }
    }

    /// Takes the pages that the log has just given, and adds those that were given up and must be sent as zeros,
    /// as the destination has something there.
    ///
    /// # Errors
    /// What an origin says.
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
        // Where nothing was sent the destination has zeros already.
        let mut zero = PageSet::for_layout(&self.layout);
        zero.set_to_intersection(&known, &self.sent);
        pages.union_with(&zero);
        self.sent.subtract(&zero);
        self.zero = Arc::new(zero);
        Ok(())
    }

    /// The guest stays here, and gets its pages back.
    pub fn end(&mut self) {
        self.stop();
        self.origins.iter().for_each(|origin| origin.end());
    }

    /// The hints of the round that is being sent, while they are asked for.
    pub fn hinted(&self) -> Option<Arc<Hinted>> {
        self.asking.then(|| Arc::clone(&self.hinted))
    }

    /// Pages that are sent as zeros, without being read.
    pub fn zero(&self) -> Option<Arc<PageSet>> {
        (!self.origins.is_empty()).then(|| Arc::clone(&self.zero))
    }

    /// Pages that the destination need not have as the source has them.
    pub fn free(&self) -> &PageSet {
        &self.free
    }

    /// Adds those of `pages` to `into` that may be hinted, and so are not sent before others.
    pub fn may_be_hinted(&self, pages: &PageSet, into: &mut PageSet) {
        for slot in &self.layout {
            if self.origins.iter().any(|origin| origin.can_hint() && origin.covers(slot)) {
                into.bitmap_mut(slot.slot).union_with(pages.bitmap(slot.slot));
            }
        }
    }
}

/// What tells the destination of these pages.
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
    use crate::free_pages::PunchedPages;

    #[test]
    fn what_was_sent_and_punched_is_sent_again_once() {
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
