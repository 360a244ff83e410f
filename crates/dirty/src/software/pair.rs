//! Two bitmaps: writers mark one while the other is read.
//!
//! Switching is one atomic exchange: nothing is copied, allocated or cleared, regardless of the
//! slot's length. No writer ever waits, so a writer that looked up a bitmap just before a switch
//! may mark it after the bitmap was taken. Such a late mark is never lost: words are taken by
//! exchange, so the mark stays until that bitmap is switched out again, and the last harvest, with
//! no writer left, reads both bitmaps.

use std::sync::atomic::{Ordering, compiler_fence};

use super::marks::Marks;
use super::sync::{AtomicUsize, fence, fences_for_all};

/// A slot's two bitmaps.
#[derive(Debug)]
pub struct Pair {
    /// Index of the bitmap to mark, `OFF` or `ELSEWHERE`, with [`FENCED`] if writers must fence.
    active: AtomicUsize,
    /// [`FENCED`] or 0.
    fenced: usize,
    marks: [Marks; 2],
}

/// Nothing is marked.
const OFF: usize = 2;
/// Writers mark another bitmap, which is not in this pair.
const ELSEWHERE: usize = 3;
/// Writers must fence between their write and this load.
const FENCED: usize = 4;

impl Pair {
    /// A pair that marks nothing yet. The bitmaps must cover the same pages. The caller creates
    /// them and reads them in place through [`switch`](Self::switch).
    #[must_use]
    pub fn new(marks: [Marks; 2]) -> Self {
        let fenced = if fences_for_all() { 0 } else { FENCED };
        Self { active: AtomicUsize::new(OFF | fenced), fenced, marks }
    }

    /// The bitmap to mark, if any, for a write that has just been done.
    ///
    /// If the starting thread makes a full fence, either this load sees the start, or the thread
    /// that copies after the start sees the write.
    #[inline]
    #[must_use]
    pub fn active(&self) -> Option<&Marks> {
        let [first, second] = &self.marks;
        compiler_fence(Ordering::SeqCst);
        // Acquire: a mark never precedes the clearing before the start. Branches instead of an
        // index, so that the processor continues speculatively without waiting for this load.
        match self.active.load(Ordering::Acquire) {
            0 => Some(first),
            1 => Some(second),
            FENCED.. => self.active_fenced(),
            _ => None,
        }
    }

    #[cold]
    fn active_fenced(&self) -> Option<&Marks> {
        fence(Ordering::SeqCst);
        self.marks.get(self.active.load(Ordering::Acquire) & !FENCED)
    }

    /// Clears both bitmaps and starts marking. The caller must make the fence that informs writers.
    pub fn start(&self) {
        self.both().for_each(|marks| marks.take(|_, _| {}));
        self.set(0);
    }

    /// Makes writers mark the other bitmap, and returns the one that they marked until now, for its
    /// marks to be taken. `None` if nothing is being marked.
    ///
    /// One thread at a time may switch.
    #[inline]
    pub fn switch(&self) -> Option<&Marks> {
        let marked = self.active.load(Ordering::Relaxed) & !FENCED;
        let handed_over = self.marks.get(marked)?;
        self.set(1 - marked);
        Some(handed_over)
    }

    /// Both bitmaps, for the last harvest, when no writer is left.
    pub fn both(&self) -> impl Iterator<Item = &Marks> {
        self.marks.iter()
    }

    /// Makes writers mark another bitmap, which the owner of this pair provides.
    pub fn start_elsewhere(&self) {
        self.set(ELSEWHERE);
    }

    /// Whether writers mark another bitmap.
    #[must_use]
    pub fn is_elsewhere(&self) -> bool {
        self.active.load(Ordering::Acquire) & !FENCED == ELSEWHERE
    }

    /// Stops marking. Existing marks stay until the next start.
    pub fn stop(&self) {
        self.set(OFF);
    }

    #[inline]
    fn set(&self, active: usize) {
        // Release: the bitmap is clear before it is marked. Nothing here waits until writers see
        // it; the start makes a fence for that.
        self.active.store(active | self.fenced, Ordering::Release);
    }
}
