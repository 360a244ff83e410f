//! The simulated guest's free pages: freed, hinted late or never, and used again before the host
//! allows it.

use std::collections::BTreeSet;

use fastrand::Rng;
use vmferry::vmm::free_pages::{FreePageHints, FreePages};
use vmferry_memory::PAGE_SIZE;

use super::{Guest, Page};

/// The state of the guest's balloon driver.
#[derive(Default)]
pub struct Balloon {
    /// Pages whose content the guest does not need.
    free: BTreeSet<Page>,
    /// Where it sends hints while hinting is active.
    hints: Option<FreePageHints>,
    /// Pages that were free during hinting and are on their way to the device. Some are used again
    /// meanwhile, and some hints arrive after hinting has stopped.
    on_the_way: Vec<(Page, FreePageHints)>,
}

impl Balloon {
    /// Whether a page's content does not matter.
    pub fn is_free(&self, page: Page) -> bool {
        self.free.contains(&page)
    }

    /// The page is written, and so it is in use.
    pub fn uses(&mut self, page: Page) {
        self.free.remove(&page);
    }

    /// The page is no longer in use.
    pub fn frees(&mut self, page: Page) {
        self.free.insert(page);
    }

    /// All free pages, in order.
    pub fn pages(&self) -> impl Iterator<Item = Page> + '_ {
        self.free.iter().copied()
    }

    /// Does one step of the driver: takes a free page, or passes one on to the device.
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

/// The device. Hints that are still on their way when hinting stops arrive too late.
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
