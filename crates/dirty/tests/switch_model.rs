//! The switch of the software log, model-checked with every order of its threads' steps and every
//! value that the memory model permits them to see. The log's own source is compiled against loom's
//! atomics.
//!
//! A writer writes data, then marks; the harvester switches, takes, then copies. At the end every
//! write must be in the copy. Each model has a negative control: a rule is left out, and loom finds
//! the loss.

use loom::sync::Arc;
use loom::sync::atomic::Ordering;
use vmferry_memory::PageBitmap;

use self::marks::Marks;
use self::pair::Pair;
use self::sync::AtomicU64;

mod sync {
    use loom::sync::atomic::Ordering;
    pub use loom::sync::atomic::{AtomicU64, AtomicUsize, fence};

    std::thread_local! {
        /// Set to false by a negative control. Loom runs a model's threads on one thread of the
        /// system.
        pub static FENCES: std::cell::Cell<bool> = const { std::cell::Cell::new(true) };
    }

    /// As on machines on which an atomic read-modify-write is not a fence.
    pub fn fence_after_rmw() {
        if FENCES.get() {
            fence(Ordering::SeqCst);
        }
    }

    /// Without membarrier, which loom cannot model: writers then fence themselves.
    pub fn fences_for_all() -> bool {
        false
    }
}

#[allow(dead_code)]
#[path = "../src/software/marks.rs"]
mod marks;

#[allow(dead_code)]
#[path = "../src/software/pair.rs"]
mod pair;

/// Two words of one block.
const PAGES: u64 = 128;

/// The two pages that are written, in different words or in the same word.
const APART: [u64; 2] = [0, 64];
const TOGETHER: [u64; 2] = [0, 1];

struct Guest {
    pair: Pair,
    pages: [u64; 2],
    data: [AtomicU64; 2],
}

impl Guest {
    fn new(pages: [u64; 2]) -> Arc<Self> {
        let pair = Pair::new([Marks::new(PAGES), Marks::new(PAGES)]);
        Arc::new(Self { pair, pages, data: [AtomicU64::new(0), AtomicU64::new(0)] })
    }

    /// As in `vm-memory`: the write, then the mark.
    fn write(&self, page: usize, value: u64) {
        self.data[page].store(value, Ordering::Relaxed);
        if let Some(marks) = self.pair.active() {
            marks.mark(self.pages[page]);
        }
    }

    fn harvest(&self, shadow: &mut [u64; 2]) {
        if let Some(marks) = self.pair.switch() {
            self.copy(marks, shadow);
        }
    }

    /// The last harvest, with no writer left.
    fn harvest_rest(&self, shadow: &mut [u64; 2]) {
        self.pair.both().for_each(|marks| self.copy(marks, shadow));
    }

    fn copy(&self, marks: &Marks, shadow: &mut [u64; 2]) {
        let mut pages = PageBitmap::new(PAGES);
        marks.take_into(&mut pages);
        for (first, count) in pages.runs() {
            for found in first..first + count {
                let page = self.pages.iter().position(|page| *page == found);
                let page = page.expect("a page that was written");
                shadow[page] = self.data[page].load(Ordering::Relaxed);
            }
        }
    }

    fn start(&self) {
        self.pair.start();
        // As `heavy_fence`.
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    fn content(&self) -> [u64; 2] {
        [0, 1].map(|page| self.data[page].load(Ordering::Relaxed))
    }
}

/// Checks every order of steps with at most four preemptions, or at most five with
/// `VMFERRY_TEST_ALL`.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    let all = std::env::var_os("VMFERRY_TEST_ALL").is_some();
    builder.preemption_bound = Some(if all { 5 } else { 4 });
    builder.check(model);
}

/// Two writers and two switches in between.
fn writers_and_switches(
    pages: [u64; 2],
    last: impl Fn(&Guest, &mut [u64; 2]) + Copy + Sync + Send + 'static,
) {
    check(move || {
        let guest = Guest::new(pages);
        guest.start();
        let writers = [0, 1].map(|page| {
            let guest = Arc::clone(&guest);
            loom::thread::spawn(move || guest.write(page, 1))
        });
        let mut shadow = [0; 2];
        guest.harvest(&mut shadow);
        guest.harvest(&mut shadow);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        last(&guest, &mut shadow);
        assert_eq!(shadow, guest.content(), "a write was lost");
    });
}

#[test]
fn switch_loses_no_write_at_any_moment() {
    writers_and_switches(APART, Guest::harvest_rest);
    writers_and_switches(TOGETHER, Guest::harvest_rest);
}

#[test]
#[should_panic(expected = "a write was lost")]
fn single_bitmap_loses_a_mark_after_the_last_harvest() {
    writers_and_switches(APART, Guest::harvest);
}

/// Two pages of one block: while the mark of one is taken, the summary must still cover the
/// other's.
#[test]
#[should_panic(expected = "a write was lost")]
fn mark_without_its_fence_is_lost_to_the_summary() {
    sync::FENCES.set(false);
    writers_and_switches(APART, Guest::harvest_rest);
}

/// A write concurrent with the start is in the first copy or in the log.
fn start_beside_a_writer(start: impl Fn(&Guest) + Copy + Sync + Send + 'static) {
    check(move || {
        let guest = Guest::new(APART);
        let writer = {
            let guest = Arc::clone(&guest);
            loom::thread::spawn(move || guest.write(0, 1))
        };
        start(&guest);
        let mut shadow = guest.content();
        writer.join().unwrap();
        guest.harvest_rest(&mut shadow);
        assert_eq!(shadow, guest.content(), "a write was lost");
    });
}

#[test]
fn write_during_the_start_is_copied_or_logged() {
    start_beside_a_writer(Guest::start);
}

#[test]
#[should_panic(expected = "a write was lost")]
fn start_without_its_fence_loses_a_write() {
    start_beside_a_writer(|guest| guest.pair.start());
}
