//! Two bitmaps, of which writers mark one while the other is read.
//!
//! Switching is one atomic exchange: nothing is copied, allocated or cleared, whatever the slot's
//! length. No writer ever waits, so one that has looked up the bitmap just before a switch marks it just
//! after, when it has been taken already. Such a late mark is never lost: words are taken by exchange,
//! so it stays until that bitmap is handed over again, and the last harvest, with no writer left, reads
//! both.

use std::sync::atomic::{Ordering, compiler_fence};

use super::marks::Marks;
use super::sync::{AtomicUsize, fence, fences_for_all};

/// A slot's two bitmaps.
#[derive(Debug)]
pub struct Pair {
    /// Which one is marked, or another number if none of them is, and [`FENCED`] if writers must fence.
    active: AtomicUsize,
    /// [`FENCED`] or 0.
    fenced: usize,
    marks: [Marks; 2],
}

/// Nothing is marked.
const OFF: usize = 2;
/// Writers are to look elsewhere.
const ELSEWHERE: usize = 3;
/// Writers must fence between their write and this look.
const FENCED: usize = 4;

impl Pair {
    /// Marks nothing yet. The bitmaps are of the same pages; whoever makes them decides where they come
    /// from, and reads them through [`switch`](Self::switch) in place.
    #[must_use]
    pub fn new(marks: [Marks; 2]) -> Self {
        let fenced = if fences_for_all() { 0 } else { FENCED };
        Self { active: AtomicUsize::new(OFF | fenced), fenced, marks }
    }

    /// The bitmap to mark, if any is, for a write that was just made.
    ///
    /// With a full fence by whoever starts, either this look comes after the start, or what was written
    /// before it is seen by whoever copies after the start.
    #[inline]
    #[must_use]
    pub fn active(&self) -> Option<&Marks> {
        let [first, second] = &self.marks;
        compiler_fence(Ordering::SeqCst);
        // Acquire: a mark never comes before the clearing that came before the start. Branches, not an
        // index: a processor goes on with the one that it expects, without waiting for this load.
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

    /// Begins with both bitmaps clear. The caller makes the fence that lets writers know.
    pub fn start(&self) {
        self.both().for_each(|marks| marks.take(|_, _| {}));
        self.set(0);
    }

    /// Lets writers mark the other bitmap, and hands over the one that they marked until now, to be
    /// taken. `None` if nothing is marked.
    ///
    /// One thread at a time may switch.
    #[inline]
    pub fn switch(&self) -> Option<&Marks> {
        let marked = self.active.load(Ordering::Relaxed) & !FENCED;
        let handed_over = self.marks.get(marked)?;
        self.set(1 - marked);
        Some(handed_over)
    }

    /// Both: what the last harvest reads, when no writer is left.
    pub fn both(&self) -> impl Iterator<Item = &Marks> {
        self.marks.iter()
    }

    /// Has writers mark something else, which whoever has this pair knows.
    pub fn start_elsewhere(&self) {
        self.set(ELSEWHERE);
    }

    /// Whether writers mark something else.
    #[must_use]
    pub fn is_elsewhere(&self) -> bool {
        self.active.load(Ordering::Acquire) & !FENCED == ELSEWHERE
    }

    /// Ends marking. Marks that are there stay until the next start.
    pub fn stop(&self) {
        self.set(OFF);
    }

    #[inline]
    fn set(&self, active: usize) {
        // Release: the bitmap is clear before it is marked. Nothing here waits until writers see it; a start
        // makes a fence for that.
        self.active.store(active | self.fenced, Ordering::Release);
    }
}
