//! The VMM's own writes, marked by `vm-memory` at each write through it.
//!
//! KVM logs what the guest writes and not what a device of the VMM writes through the mapping. A
//! VMM whose memory is `GuestMemoryMmap<DirtyBitmap>` has these marked here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap};
use vmferry_memory::{PAGE_SHIFT, PAGE_SIZE, PageSet, SlotId};

use crate::{DirtyLog, DirtyLogError};

/// One bit for each page of a memory region; clones share it. A mark costs a load while nothing
/// is logged.
#[derive(Clone, Debug, Default)]
pub struct DirtyBitmap(Arc<Bits>);

#[derive(Debug, Default)]
struct Bits {
    logging: AtomicBool,
    words: Vec<AtomicU64>,
}

impl DirtyBitmap {
    /// Takes all marks, one word at a time, and hands each word that has any to `found`.
    fn take(&self, mut found: impl FnMut(usize, u64)) {
        for (index, word) in self.0.words.iter().enumerate() {
            // A look first: most words are clear, and their cache lines stay shared.
            if word.load(Ordering::Relaxed) != 0 {
                // Acquire: the write that was marked is seen by the copy that follows.
                found(index, word.swap(0, Ordering::AcqRel));
            }
        }
    }
}

impl<'a> WithBitmapSlice<'a> for DirtyBitmap {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for DirtyBitmap {
    /// `vm-memory` calls this after the write.
    fn mark_dirty(&self, offset: usize, len: usize) {
        // The write before must not be overtaken by this look: with one on each side (here and in
        // `start`), either the mark is made, or the first round copies what was written.
        fence(Ordering::SeqCst);
        if len == 0 || !self.0.logging.load(Ordering::Relaxed) {
            return;
        }
        let last = offset.saturating_add(len - 1) >> PAGE_SHIFT;
        for page in offset >> PAGE_SHIFT..=last {
            match self.0.words.get(page / 64) {
                Some(word) => word.fetch_or(1 << (page % 64), Ordering::Release),
                None => return,
            };
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = offset >> PAGE_SHIFT;
        self.0
            .words
            .get(page / 64)
            .is_some_and(|word| word.load(Ordering::Acquire) >> (page % 64) & 1 == 1)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

impl NewBitmap for DirtyBitmap {
    fn with_len(len: usize) -> Self {
        let words = len.div_ceil(PAGE_SIZE).div_ceil(64);
        let words = std::iter::repeat_with(AtomicU64::default).take(words).collect();
        Self(Arc::new(Bits { logging: AtomicBool::new(false), words }))
    }
}

/// The log over the bitmaps of a VMM's memory.
#[derive(Debug)]
pub struct SoftwareLog {
    slots: Vec<DirtyBitmap>,
}

impl SoftwareLog {
    /// The log of a memory's regions, numbered by ascending address as
    /// `vmferry_memory::GuestMemory::from_vm_memory` does.
    #[must_use]
    pub fn new(memory: &GuestMemoryMmap<DirtyBitmap>) -> Self {
        let slots = memory.iter().map(|region| region.get_mmap().bitmap().clone()).collect();
        Self { slots }
    }
}

impl DirtyLog for SoftwareLog {
    fn name(&self) -> &'static str {
        "software"
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        for bitmap in &self.slots {
            bitmap.take(|_, _| {});
            bitmap.0.logging.store(true, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        for (slot, bitmap) in self.slots.iter().enumerate() {
            let pages = into.bitmap_mut(SlotId(slot as u16));
            bitmap.take(|word, bits| pages.or_words(word, &[bits]));
        }
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        for bitmap in &self.slots {
            bitmap.0.logging.store(false, Ordering::SeqCst);
        }
        Ok(())
    }
}

#[cfg(test)]
mod unit_tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};
    use vmferry_memory::{GuestMemory, MemoryKind, SlotLayout, map_slots};

    use super::*;

    proptest! {
        #[test]
        fn every_page_of_a_write_is_marked_once(
            writes in prop::collection::vec((0_u64..300 * 4096, 1_usize..10_000), 0..20)
        ) {
            let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 310 }];
            let memory = map_slots::<DirtyBitmap>(&layout, MemoryKind::Private).unwrap();
            let log = SoftwareLog::new(&memory);
            memory.write_slice(b"before", GuestAddress(0)).unwrap();
            log.start().unwrap();
            let mut expected = PageSet::for_layout(&layout);
            for (at, length) in writes {
                memory.write_slice(&vec![1; length], GuestAddress(at)).unwrap();
                let (first, last) = (at / 4096, (at + length as u64 - 1) / 4096);
                expected.bitmap_mut(SlotId(0)).set_run(first, last - first + 1);
            }
            let mut found = PageSet::for_layout(&layout);
            log.collect(&mut found).unwrap();
            prop_assert_eq!(&found, &expected);
            found.clear_all();
            log.collect(&mut found).unwrap();
            prop_assert!(found.is_empty());
            log.stop().unwrap();
            memory.write_slice(b"after", GuestAddress(0)).unwrap();
            log.collect(&mut found).unwrap();
            prop_assert!(found.is_empty());
        }
    }

    #[test]
    fn slots_are_numbered_as_in_guest_memory() {
        let layout = [
            SlotLayout { slot: SlotId(0), gpa: 0, pages: 4 },
            SlotLayout { slot: SlotId(1), gpa: 1 << 32, pages: 4 },
        ];
        let mapped = map_slots::<DirtyBitmap>(&layout, MemoryKind::Private).unwrap();
        let memory = GuestMemory::from_vm_memory(&mapped).unwrap();
        let log = SoftwareLog::new(&mapped);
        log.start().unwrap();
        mapped.write_obj(1_u8, GuestAddress((1 << 32) + 4096)).unwrap();
        let mut found = PageSet::for_memory(&memory);
        log.collect(&mut found).unwrap();
        assert!(found.bitmap(SlotId(1)).is_set(1));
        assert_eq!(found.count(), 1);
    }
}
