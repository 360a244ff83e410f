//! Pages that the guest gives back to its host while it is migrated.
//!
//! A balloon or free-page reporting punches pages out of the guest's memory. They are zero from
//! then on, and no dirty log says so: the marker goes with the page. So after each harvest, whatever was
//! sent and is populated no more is sent once again, as zeros. A page that the guest takes
//! again afterwards is written, and the log has it.

use std::sync::Arc;

use vmferry_memory::{GuestMemory, MemoryError, PageSet};

/// What was sent with content, and what of it has gone since.
pub struct GivenBack {
    sent: PageSet,
    now: Arc<PageSet>,
}

impl GivenBack {
    /// Nothing sent yet.
    pub fn new(memory: &GuestMemory) -> Self {
        Self { sent: PageSet::for_memory(memory), now: Arc::new(PageSet::for_memory(memory)) }
    }

    /// Takes the pages of the first round.
    pub fn sending(&mut self, pages: &PageSet) {
        self.sent.union_with(pages);
    }

    /// Adds to `pages`, which the log has just given, those that were sent and are populated no more.
    ///
    /// # Errors
    /// What the memory says.
    pub fn find(&mut self, memory: &GuestMemory, pages: &mut PageSet) -> Result<(), MemoryError> {
        self.sent.union_with(pages);
        let populated = memory.populated()?;
        let mut gone = self.sent.clone();
        gone.subtract(&populated);
        pages.union_with(&gone);
        self.sent.subtract(&gone);
        self.now = Arc::new(gone);
        Ok(())
    }

    /// Pages of the last harvest that are zero, and must not be read.
    pub fn now(&self) -> Arc<PageSet> {
        Arc::clone(&self.now)
    }
}

#[cfg(test)]
mod tests {
    use vmferry_memory::{MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

    use super::*;

    #[test]
    fn what_was_sent_and_punched_is_sent_again_once() {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 64 }];
        let memory = GuestMemory::allocate(&layout, MemoryKind::Memfd).unwrap();
        let write = |page: u64| memory.write_at(page * PAGE_SIZE as u64, &[1]).unwrap();
        (10..20).for_each(write);
        let mut given_back = GivenBack::new(&memory);
        given_back.sending(&memory.populated().unwrap());

        memory.punch().unwrap();
        write(12);
        let mut pages = PageSet::for_memory(&memory);
        given_back.find(&memory, &mut pages).unwrap();
        let runs = |set: &PageSet| set.bitmap(SlotId(0)).runs().collect::<Vec<_>>();
        assert_eq!(runs(&pages), [(10, 2), (13, 7)]);
        assert_eq!(runs(&given_back.now()), [(10, 2), (13, 7)]);

        pages.clear_all();
        given_back.find(&memory, &mut pages).unwrap();
        assert!(pages.is_empty(), "sent as zeros, they are sent no more");
        assert!(memory.populated().unwrap().count() == 1, "nothing was populated by looking");
    }
}
