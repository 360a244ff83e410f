//! The simulated guest's free pages: freed, hinted late or never, and used again before anybody has said that they may be.

use std::collections::BTreeSet;

use fastrand::Rng;
use vmferry::vmm::free_pages::{FreePageHints, FreePages};
use vmferry_memory::PAGE_SIZE;

use super::{Guest, Page};

/// What the guest's balloon driver knows.
#[derive(Default)]
pub struct Balloon {
    /// Pages whose content the guest does not need.
    free: BTreeSet<Page>,
    /// Where it hints, while it is asked.
    hints: Option<FreePageHints>,
    /// Pages that were free while it was asked, on their way to the device. Some are used again meanwhile, and
    /// some are asked for no more.
    on_the_way: Vec<(Page, FreePageHints)>,
}

impl Balloon {
    /// Whether a page is of no account.
    pub fn is_free(&self, page: Page) -> bool {
        self.free.contains(&page)
    }

    /// The page is written, and so in use.
    pub fn uses(&mut self, page: Page) {
        self.free.remove(&page);
    }

    /// The page is not in use any more.
    pub fn frees(&mut self, page: Page) {
        self.free.insert(page);
    }

    /// All free pages, in order.
    pub fn pages(&self) -> impl Iterator<Item = Page> + '_ {
        self.free.iter().copied()
    }

    /// The driver does a little: it takes a free page, or passes one on to the device.
    pub fn work(&mut self, rng: &mut Rng) {
        if let Some(hints) = &self.hints
            && !self.free.is_empty()
            && rng.u32(..2) == 0
        {
            let page = self.free.iter().nth(rng.usize(..self.free.len()));
            self.on_the_way.extend(page.map(|page| (*page, hints.clone())));
        }
        if !self.on_the_way.is_empty() && rng.u32(..2) == 0 {
            let ((slot, page), hints) =
                self.on_the_way.swap_remove(rng.usize(..self.on_the_way.len()));
            hints.free((u64::from(slot) << 32) + page * PAGE_SIZE as u64, PAGE_SIZE as u64, None);
        }
    }
}

/// The device: what the driver still has on its way when it is stopped comes all the same, and too late.
impl FreePages for Guest {
    fn name(&self) -> &'static str {
        "simulated balloon"
    }

    fn can_hint(&self) -> bool {
        true
    }

    fn start(&self, hints: FreePageHints) {
        self.lock().balloon.hints = Some(hints);
    }

    fn stop(&self) {
        self.lock().balloon.hints = None;
    }
}
