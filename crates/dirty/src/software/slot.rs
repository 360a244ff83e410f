//! A slot of the table: the bitmaps that writers mark, and the three published ways to read them.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};
use vmferry_memory::{PAGE_SHIFT, PAGE_SIZE, PageBitmap};

use super::marks::Marks;
use super::pair::Pair;
use super::{SoftwareWay, sync};
use crate::DirtyLogError;

/// One slot's part of the software log, used as `vm-memory`'s bitmap of that region. Clones share
/// it. While nothing is logged, a mark costs one load.
#[derive(Clone, Debug)]
pub struct DirtyBitmap(Arc<Slot>);

#[derive(Debug)]
struct Slot {
    /// For [`SoftwareWay::Switch`] and [`SoftwareWay::GetOpt`].
    pair: Pair,
    /// For [`SoftwareWay::GetOrg`]: the published bitmap, which writers mark if the pair is
    /// elsewhere.
    published: ArcSwapOption<Marks>,
    pages: u64,
}

impl DirtyBitmap {
    /// A slot whose writers mark these bitmaps alternately.
    ///
    /// # Panics
    /// If the bitmaps do not cover the same pages.
    #[must_use]
    pub fn over(marks: [Marks; 2]) -> Self {
        let pages = marks[0].pages();
        assert_eq!(pages, marks[1].pages(), "two bitmaps of one slot");
        let published = ArcSwapOption::empty();
        Self(Arc::new(Slot { pair: Pair::new(marks), published, pages }))
    }

    /// Number of pages of the slot.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.0.pages
    }

    /// Starts marking, to be read in this way.
    ///
    /// # Errors
    /// If the system refuses the fence that informs writers.
    pub fn start(&self, way: SoftwareWay) -> Result<(), DirtyLogError> {
        self.stop();
        match way {
            SoftwareWay::GetOrg => {
                self.0.published.store(Some(Arc::new(Marks::new(self.0.pages))));
                self.0.pair.start_elsewhere();
            }
            SoftwareWay::GetOpt | SoftwareWay::Switch => self.0.pair.start(),
        }
        // `vm-memory` marks after the write: either the mark is set, or the first round copies the
        // written content (`Pair::active`).
        if sync::heavy_fence() {
            return Ok(());
        }
        self.stop();
        let reason = "the system refuses membarrier(2), which it had allowed".into();
        Err(DirtyLogError::Unavailable { log: super::NAME, reason })
    }

    /// Stops marking.
    pub fn stop(&self) {
        self.0.pair.stop();
        self.0.published.store(None);
    }

    /// `get.org`: allocates and publishes a bitmap, waits until no writer can hold the old one, and
    /// copies that out. Does nothing unless the slot was started in this way.
    pub fn get_org(&self, into: &mut PageBitmap) {
        if !self.0.pair.is_elsewhere() {
            return;
        }
        let fresh = Arc::new(Marks::new(self.0.pages));
        let Some(mut old) = self.0.published.swap(Some(fresh)) else { return };
        let marks = loop {
            // A writer holds a reference to the old bitmap only for the duration of one mark.
            match Arc::try_unwrap(old) {
                Ok(marks) => break marks,
                Err(held) => old = held,
            }
            std::thread::yield_now();
        };
        marks.copy_out(into);
    }

    /// `get.opt`: returns at once if nothing is marked. Otherwise makes writers mark the other
    /// bitmap, copies this one out and clears it.
    pub fn get_opt(&self, into: &mut PageBitmap) {
        if self.0.pair.active().is_none_or(Marks::is_clear) {
            return;
        }
        if let Some(marks) = self.0.pair.switch() {
            marks.copy_out(into);
        }
    }

    /// `switch`: makes writers mark the other bitmap, and returns this one for its marks to be
    /// taken in place. `None` unless the slot was started in this way. Only one thread at a time
    /// may call it.
    #[inline]
    #[must_use]
    pub fn switch(&self) -> Option<&Marks> {
        self.0.pair.switch()
    }

    /// All remaining marks when no writer is left, including late marks in a bitmap that was
    /// already taken.
    pub fn get_rest(&self, into: &mut PageBitmap) {
        self.get_org(into);
        self.0.pair.both().for_each(|marks| marks.take_into(into));
    }

    /// The rare cases: a write to several pages, or to a slot that does not use the pair.
    #[cold]
    fn mark_through(&self, first: u64, last: u64) {
        if let Some(marks) = self.0.pair.active() {
            marks.mark_through(first, last);
        } else if self.0.pair.is_elsewhere() {
            self.0.published.load().iter().for_each(|marks| marks.mark_through(first, last));
        }
    }
}

impl<'a> WithBitmapSlice<'a> for DirtyBitmap {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for DirtyBitmap {
    /// `vm-memory` calls this after the write.
    #[inline(always)]
    fn mark_dirty(&self, offset: usize, len: usize) {
        let first = (offset >> PAGE_SHIFT) as u64;
        let last = (offset.saturating_add(len).wrapping_sub(1) >> PAGE_SHIFT) as u64;
        match self.0.pair.active() {
            Some(marks) if first == last && len > 0 => marks.mark(first),
            None if !self.0.pair.is_elsewhere() => {}
            _ if len > 0 => self.mark_through(first, last),
            _ => {}
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = (offset >> PAGE_SHIFT) as u64;
        let published = self.0.published.load();
        self.0.pair.both().any(|marks| marks.is_marked(page))
            || published.as_ref().is_some_and(|marks| marks.is_marked(page))
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

impl NewBitmap for DirtyBitmap {
    fn with_len(len: usize) -> Self {
        let pages = len.div_ceil(PAGE_SIZE) as u64;
        Self::over([Marks::new(pages), Marks::new(pages)])
    }
}

impl Default for DirtyBitmap {
    /// A bitmap of no pages.
    fn default() -> Self {
        Self::with_len(0)
    }
}
