//! Two bitmaps, of which writers mark one while the other is read.
//!
//! Switching is one atomic exchange: nothing is copied, allocated or cleared, whatever the slot's
//! length. No writer ever waits, so one that has looked up the bitmap just before a switch marks it just
//! after, when it has been taken already. Such a late mark is never lost: words are taken by exchange,
//! so it stays until that bitmap is handed over again, and the last harvest, with no writer left, reads
//! both.

use std::sync::atomic::Ordering;

use super::marks::Marks;
use super::sync::AtomicUsize;

/// A slot's two bitmaps.
#[derive(Debug)]
pub struct Pair {
    /// Which one is marked; another number if none is.
    active: AtomicUsize,
    marks: [Marks; 2],
}

/// Nothing is marked.
const OFF: usize = 2;

impl Pair {
    /// Marks nothing yet. The bitmaps are of the same pages; whoever makes them decides where they come
    /// from, and reads them through [`switch`](Self::switch) in place.
    #[must_use]
    pub fn new(marks: [Marks; 2]) -> Self {
        Self { active: AtomicUsize::new(OFF), marks }
    }

    /// The bitmap to mark, if any is.
    #[inline]
    #[must_use]
    pub fn active(&self) -> Option<&Marks> {
        // Acquire: a mark never comes before the clearing that came before the start.
        self.marks.get(self.active.load(Ordering::Acquire))
    }

    /// Begins with both bitmaps clear. The caller makes the fence that lets writers know.
    pub fn start(&self) {
        self.both().for_each(|marks| marks.take(|_, _| {}));
        self.active.store(0, Ordering::SeqCst);
    }

    /// Lets writers mark the other bitmap, and hands over the one that they marked until now, to be
    /// taken. `None` if nothing is marked.
    ///
    /// One thread at a time may switch.
    #[inline]
    pub fn switch(&self) -> Option<&Marks> {
        let marked = self.active.load(Ordering::Relaxed);
        let handed_over = self.marks.get(marked)?;
        self.active.store(1 - marked, Ordering::SeqCst);
        Some(handed_over)
    }

    /// Both: what the last harvest reads, when no writer is left.
    pub fn both(&self) -> impl Iterator<Item = &Marks> {
        self.marks.iter()
    }

    /// Ends marking. Marks that are there stay until the next start.
    pub fn stop(&self) {
        self.active.store(OFF, Ordering::SeqCst);
    }
}
