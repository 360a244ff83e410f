//! The pages that the guest has hinted free in the present round.
//!
//! Hints arrive on a device's thread while the lanes check each block of pages before they send it.
//! Both use bitmaps of atomic words. Parts of a bitmap are allocated only where a page of the round
//! was hinted.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use vmferry_memory::traverse::{BLOCK_PAGES, BLOCK_WORDS, WORD_BITS};
use vmferry_memory::{PAGE_SIZE, PageBitmap, PageSet, SlotId, SlotLayout};

use crate::data::source::lane::Signal;

/// Words per part, for 128 MiB of guest memory.
const PART_WORDS: usize = 512;
const PART_BLOCKS: usize = PART_WORDS / BLOCK_WORDS;
const PAGE: u64 = PAGE_SIZE as u64;

/// Not a 32-bit word: the guest expects no poison.
const NO_POISON: u64 = u64::MAX;

/// Hinted pages of all slots.
pub struct Hinted {
    slots: Vec<HintedSlot>,
    /// Locked while a hint is processed, so that none is accepted after the round has been closed.
    gate: Mutex<Gate>,
    /// The poison that the guest expects in free pages of this round, or [`NO_POISON`]. Written
    /// before any bit is set.
    poison: AtomicU64,
    /// Pages of the round that were hinted.
    useful: AtomicU64,
    /// Lanes must not yet send pages that may be hinted.
    held: AtomicBool,
    /// Wakes the lanes.
    signal: Arc<Signal>,
}

#[derive(Default)]
struct Gate {
    /// The number of rounds with hints so far.
    id: u64,
    /// The pages of the round, while hints are accepted.
    pages: Option<Arc<PageSet>>,
    /// The poison that the guest expects in free pages, if any. Known from the first hint of the
    /// round.
    poison: Option<Option<u32>>,
    /// Whether the guest has reported the end of its hints.
    complete: bool,
}

struct HintedSlot {
    gpa: u64,
    pages: u64,
    parts: Vec<OnceLock<Box<Part>>>,
}

type Part = [AtomicU64; PART_WORDS];

impl Hinted {
    /// An empty set. `signal` is raised when lanes that were [held](Self::is_held) may continue.
    pub fn new(layout: &[SlotLayout], signal: Arc<Signal>) -> Self {
        let slot = |slot: &SlotLayout| HintedSlot {
            gpa: slot.gpa,
            pages: slot.pages,
            parts: (0..slot.pages.div_ceil(PART_WORDS as u64 * WORD_BITS))
                .map(|_| OnceLock::new())
                .collect(),
        };
        Self {
            slots: layout.iter().map(slot).collect(),
            gate: Mutex::default(),
            poison: AtomicU64::new(NO_POISON),
            useful: AtomicU64::new(0),
            held: AtomicBool::new(false),
            signal,
        }
    }

    /// Starts accepting hints for a round of these write-protected pages, and returns the ID that
    /// the hints must carry.
    pub fn open(&self, pages: Arc<PageSet>) -> u64 {
        let mut gate = self.gate.lock();
        gate.id += 1;
        gate.pages = Some(pages);
        (gate.poison, gate.complete) = (None, false);
        self.useful.store(0, Ordering::Relaxed);
        gate.id
    }

    /// Stops accepting hints and drains this round's hints into `into`.
    pub fn close(&self, into: &mut PageSet) {
        let mut gate = self.gate.lock();
        gate.pages = None;
        self.release();
        for (slot, hinted) in (0..).map(SlotId).zip(&self.slots) {
            for (number, part) in hinted.parts.iter().enumerate() {
                let Some(part) = part.get() else { continue };
                let words: Vec<u64> =
                    part.iter().map(|word| word.swap(0, Ordering::Relaxed)).collect();
                into.bitmap_mut(slot).or_words(number * PART_WORDS, &words);
            }
        }
        self.poison.store(NO_POISON, Ordering::Relaxed);
    }

    /// See [`FreePageHints::free`](crate::vmm::free_pages::FreePageHints::free).
    /// `id` is what [`open`](Self::open) returned.
    pub fn free(&self, id: u64, gpa: u64, bytes: u64, poison: Option<u32>) {
        let mut gate = self.gate.lock();
        let gate = &mut *gate;
        let Some(pages) = gate.pages.as_ref().filter(|_| gate.id == id) else { return };
        if *gate.poison.get_or_insert(poison) != poison {
            // A guest has one poison value. Which of the two it expects is unknown.
            return;
        }
        self.poison.store(poison.map_or(NO_POISON, u64::from), Ordering::Relaxed);
        let mut useful = 0;
        let end = gpa.saturating_add(bytes);
        for (slot, hinted) in (0..).map(SlotId).zip(&self.slots) {
            // Whole pages of the slot within the range.
            let slot_end = hinted.gpa + hinted.pages * PAGE;
            let first = gpa.max(hinted.gpa).next_multiple_of(PAGE) - hinted.gpa;
            let last = (end.min(slot_end) / PAGE * PAGE).saturating_sub(hinted.gpa);
            if first >= last {
                continue;
            }
            useful += hinted.set(first / PAGE, last / PAGE, pages.bitmap(slot));
        }
        self.useful.fetch_add(useful, Ordering::Relaxed);
    }

    /// See [`FreePageHints::complete`](crate::vmm::free_pages::FreePageHints::complete).
    pub fn complete(&self, id: u64) {
        let mut gate = self.gate.lock();
        if gate.id == id && gate.pages.is_some() {
            gate.complete = true;
            self.release();
        }
    }

    /// Removes hinted pages from a block of 512, and returns the number of pages removed. Nothing
    /// is removed if pages have to be [filled](Self::poison).
    pub fn take_out(&self, slot: SlotId, block: usize, words: &mut [u64; BLOCK_WORDS]) -> u64 {
        let Some(hinted) = self.block(slot, block) else { return 0 };
        // The poison is read after the bits, which are set after it.
        let bits: [u64; BLOCK_WORDS] =
            std::array::from_fn(|word| hinted[word].load(Ordering::Acquire));
        if self.poison().is_some() {
            return 0;
        }
        let mut taken = 0;
        for (word, bits) in words.iter_mut().zip(bits) {
            taken += u64::from((*word & bits).count_ones());
            *word &= !bits;
        }
        taken
    }

    /// Whether a page was hinted.
    pub fn is_set(&self, slot: SlotId, page: u64) -> bool {
        let block = self.block(slot, (page / BLOCK_PAGES) as usize);
        block.is_some_and(|words| {
            let word = words[(page % BLOCK_PAGES / WORD_BITS) as usize].load(Ordering::Acquire);
            word >> (page % WORD_BITS) & 1 == 1
        })
    }

    /// The value that the guest expects in every 32-bit word of the hinted pages, if any. The pages
    /// must be sent with this content.
    pub fn poison(&self) -> Option<u32> {
        u32::try_from(self.poison.load(Ordering::Relaxed)).ok()
    }

    /// The number of pages of the round that were hinted so far.
    pub fn useful(&self) -> u64 {
        self.useful.load(Ordering::Relaxed)
    }

    /// Keeps lanes from sending pages that may yet be hinted, unless the guest has reported the end
    /// of its hints.
    pub fn hold(&self) {
        let gate = self.gate.lock();
        self.held.store(gate.pages.is_some() && !gate.complete, Ordering::Relaxed);
    }

    /// Whether lanes must wait.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Lets lanes continue.
    pub fn release(&self) {
        if self.held.swap(false, Ordering::Relaxed) {
            self.signal.raise();
        }
    }

    fn block(&self, slot: SlotId, block: usize) -> Option<&[AtomicU64]> {
        let part = self.slots.get(usize::from(slot.0))?.parts.get(block / PART_BLOCKS)?.get()?;
        let first = block % PART_BLOCKS * BLOCK_WORDS;
        part.get(first..first + BLOCK_WORDS)
    }
}

impl HintedSlot {
    /// Sets the pages from `first` to `end` that are in `wanted`, and returns how many were newly
    /// set. Pages outside `wanted` are not sent anyway.
    fn set(&self, first: u64, end: u64, wanted: &PageBitmap) -> u64 {
        let mut news = 0;
        let mut page = first;
        while page < end {
            let word = (page / WORD_BITS) as usize;
            let block = word / BLOCK_WORDS;
            if !wanted.may_hold(block) {
                page = (block as u64 + 1) * BLOCK_PAGES;
                continue;
            }
            let bits = (end - page).min(WORD_BITS - page % WORD_BITS);
            let mask = (u64::MAX >> (WORD_BITS - bits)) << (page % WORD_BITS);
            let mask = mask & wanted.block(block)[word % BLOCK_WORDS];
            if mask != 0 {
                let part = self.parts[word / PART_WORDS]
                    .get_or_init(|| Box::new(std::array::from_fn(|_| AtomicU64::new(0))));
                let before = part[word % PART_WORDS].fetch_or(mask, Ordering::Release);
                news += u64::from((mask & !before).count_ones());
            }
            page += bits;
        }
        news
    }
}

impl fmt::Debug for Hinted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hinted")
            .field("useful", &self.useful)
            .field("poison", &self.poison)
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLOT: u64 = 40_000;

    fn layout() -> Vec<SlotLayout> {
        vec![
            SlotLayout { slot: SlotId(0), gpa: 0, pages: SLOT },
            SlotLayout { slot: SlotId(1), gpa: SLOT * PAGE, pages: 100 },
            SlotLayout { slot: SlotId(2), gpa: 1 << 32, pages: SLOT },
        ]
    }

    fn all() -> Arc<PageSet> {
        let mut set = PageSet::for_layout(&layout());
        for slot in layout() {
            set.bitmap_mut(slot.slot).set_run(0, slot.pages);
        }
        Arc::new(set)
    }

    fn hinted() -> Hinted {
        Hinted::new(&layout(), Arc::default())
    }

    fn closed(hinted: &Hinted) -> PageSet {
        let mut set = PageSet::for_layout(&layout());
        hinted.close(&mut set);
        set
    }

    proptest! {
        /// Compares with a naive interpretation of hints, byte by byte of a page.
        #[test]
        fn hints_count_for_whole_pages_within_slots(
            hints in prop::collection::vec((
                prop_oneof![
                    0..SLOT * PAGE + (200 << 12),
                    (1_u64 << 32)..(1 << 32) + SLOT * PAGE,
                    any::<u64>()
                ],
                prop_oneof![0_u64..10_000, 0_u64..(8 << 20), any::<u64>()],
            ), 0..6),
        ) {
            let hinted = hinted();
            let id = hinted.open(all());
            for (gpa, bytes) in &hints {
                hinted.free(id, *gpa, *bytes, None);
            }
            let mut expected = PageSet::for_layout(&layout());
            for slot in layout() {
                for page in 0..slot.pages {
                    let begin = u128::from(slot.gpa + page * PAGE);
                    let is_in = |(gpa, bytes): &(u64, u64)| {
                        u128::from(*gpa) <= begin
                            && begin + u128::from(PAGE) <= u128::from(gpa.saturating_add(*bytes))
                    };
                    if hints.iter().any(is_in) {
                        expected.bitmap_mut(slot.slot).set(page);
                    }
                }
            }
            prop_assert_eq!(hinted.useful(), expected.count());
            let mut taken = 0;
            for (slot, bitmap) in expected.iter() {
                for block in 0..(bitmap.pages().div_ceil(BLOCK_PAGES) as usize) {
                    let mut words = [u64::MAX; BLOCK_WORDS];
                    taken += hinted.take_out(slot, block, &mut words);
                    for (word, expected) in words.iter().zip(bitmap.block(block)) {
                        prop_assert_eq!(*word, !expected);
                    }
                }
                for page in [0, 1, 511, 512, bitmap.pages() - 1, bitmap.pages()] {
                    prop_assert_eq!(hinted.is_set(slot, page), bitmap.is_set(page));
                }
            }
            prop_assert_eq!(taken, expected.count());
            prop_assert_eq!(closed(&hinted), expected);
            prop_assert!(closed(&hinted).is_empty(), "once");
        }
    }

    #[test]
    fn hint_counts_in_its_round_only() {
        let hinted = hinted();
        hinted.free(0, 0, PAGE, None);
        let first = hinted.open(all());
        hinted.free(first, 0, PAGE, None);
        assert_eq!(closed(&hinted).count(), 1);
        hinted.free(first, 0, PAGE, None);
        let second = hinted.open(all());
        hinted.free(first, 0, PAGE, None);
        assert!(!hinted.is_set(SlotId(0), 0), "stale");
        hinted.free(second, PAGE, PAGE, None);
        assert!(hinted.is_set(SlotId(0), 1));
    }

    #[test]
    fn hinted_pages_with_poison_are_sent_filled() {
        let hinted = hinted();
        let id = hinted.open(all());
        assert_eq!(hinted.poison(), None);
        hinted.free(id, 0, PAGE, Some(0xaaaa_aaaa));
        hinted.free(id, PAGE, PAGE, Some(0x5555_5555));
        assert_eq!(hinted.poison(), Some(0xaaaa_aaaa));
        let mut words = [u64::MAX; BLOCK_WORDS];
        assert_eq!(hinted.take_out(SlotId(0), 0, &mut words), 0);
        assert_eq!(words, [u64::MAX; BLOCK_WORDS]);
        assert!(hinted.is_set(SlotId(0), 0) && !hinted.is_set(SlotId(0), 1), "of one poison only");
        closed(&hinted);
        let id = hinted.open(all());
        hinted.free(id, PAGE, PAGE, None);
        assert_eq!(hinted.poison(), None, "of the next round");
    }

    #[test]
    fn hint_with_a_poison_of_zero_is_poisoned() {
        let hinted = hinted();
        let id = hinted.open(all());
        hinted.free(id, 0, PAGE, Some(0));
        hinted.free(id, PAGE, PAGE, None);
        assert_eq!(hinted.poison(), Some(0));
        let mut words = [u64::MAX; BLOCK_WORDS];
        assert_eq!(hinted.take_out(SlotId(0), 0, &mut words), 0, "its content counts");
        assert!(hinted.is_set(SlotId(0), 0) && !hinted.is_set(SlotId(0), 1), "of one poison only");
    }

    #[test]
    fn hinting_blocks_lanes_until_the_guest_is_done() {
        let hinted = hinted();
        hinted.hold();
        assert!(!hinted.is_held(), "nobody hints");
        let id = hinted.open(all());
        hinted.hold();
        assert!(hinted.is_held());
        hinted.complete(id + 1);
        assert!(hinted.is_held(), "not this round's");
        hinted.complete(id);
        assert!(!hinted.is_held());
        hinted.hold();
        assert!(!hinted.is_held(), "it has said everything");
    }
}
