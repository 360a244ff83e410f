//! The cost of marking a page dirty, compared with a plain atomic OR, on a slot of 4 GiB.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use fastrand::Rng;
use vm_memory::bitmap::{Bitmap, NewBitmap};
use vmferry_dirty::{DirtyBitmap, SoftwareWay};
use vmferry_memory::{PAGE_SHIFT, PageBitmap};

use crate::results::median;

const PAGES: u64 = 1 << 20;

/// Marks per thread between two harvests, as in the published loop over 1 GB.
const MARKS_PER_HARVEST: usize = 1 << 18;

/// The cost of vmferry's mark relative to a plain atomic OR.
pub struct Mark {
    pub two_threads: f64,
    pub one_thread: f64,
    /// Nanoseconds of the plain OR with two threads.
    pub fetch_or_ns: f64,
}

/// Measures `marks` marks by each thread, interleaved.
pub fn measure(marks: usize, repetitions: usize) -> Mark {
    let [one, two] = [1, 2].map(|threads| compare(threads, marks, repetitions));
    Mark { two_threads: two.ratio(), one_thread: one.ratio(), fetch_or_ns: two.fetch_or }
}

/// Nanoseconds of a plain OR and of vmferry's mark.
struct Nanoseconds {
    fetch_or: f64,
    mark: f64,
}

impl Nanoseconds {
    fn ratio(&self) -> f64 {
        self.mark / self.fetch_or
    }
}

/// Measures both with this number of threads.
fn compare(threads: u64, marks: usize, repetitions: usize) -> Nanoseconds {
    let bare: Vec<AtomicU64> = (0..PAGES / 64).map(|_| AtomicU64::new(0)).collect();
    let ours = DirtyBitmap::with_len((PAGES << PAGE_SHIFT) as usize);
    let started = ours.start(SoftwareWay::Switch).is_ok();
    debug_assert!(started, "the software log was started just before");
    let mut pages = PageBitmap::new(PAGES);
    let (mut fetch_or, mut mark) = (Vec::new(), Vec::new());
    for _ in 0..repetitions {
        let mut spent = Nanoseconds { fetch_or: 0.0, mark: 0.0 };
        for _ in 0..marks.div_ceil(MARKS_PER_HARVEST) {
            let each = marks.min(MARKS_PER_HARVEST);
            spent.fetch_or += 1e9
                * by_threads(threads, each, |page| {
                    bare[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::SeqCst);
                });
            spent.mark += 1e9
                * by_threads(threads, each, |page| {
                    ours.mark_dirty((page << PAGE_SHIFT) as usize, 8);
                });
            // Both bitmaps are cleared, as between two rounds.
            bare.iter().for_each(|word| word.store(0, Ordering::SeqCst));
            if let Some(marked) = ours.switch() {
                marked.take_into(&mut pages);
            }
            pages.clear_all();
        }
        fetch_or.push(spent.fetch_or / marks as f64);
        mark.push(spent.mark / marks as f64);
    }
    Nanoseconds { fetch_or: median(fetch_or), mark: median(mark) }
}

/// Returns the seconds in which each thread marks `marks` random pages: the mean over the threads.
/// Each thread measures from its own start, so starting the threads is not counted.
fn by_threads(threads: u64, marks: usize, mark: impl Fn(u64) + Sync) -> f64 {
    let ready = std::sync::Barrier::new(threads as usize);
    let total: f64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|seed| {
                let (mark, ready) = (&mark, &ready);
                scope.spawn(move || {
                    let mut random = Rng::with_seed(seed);
                    ready.wait();
                    let begun = Instant::now();
                    for _ in 0..marks {
                        mark(random.u64(..PAGES));
                    }
                    begun.elapsed().as_secs_f64()
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap_or_default()).sum()
    });
    total / threads as f64
}
