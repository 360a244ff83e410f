//! What a mark costs whoever writes, beside one bare atomic OR, on a slot of 4 GiB.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use vm_memory::bitmap::{Bitmap, NewBitmap};
use vmferry_dirty::{DirtyBitmap, SoftwareWay};
use vmferry_memory::{PAGE_SHIFT, PageBitmap};

use crate::bitmap::pattern::Random;
use crate::results::median;

const PAGES: u64 = 1 << 20;

/// How many marks each thread makes between two harvests: as many as the published loop over 1 GB.
const MARKS_PER_HARVEST: usize = 1 << 18;

/// Our mark over a bare OR.
pub struct Mark {
    pub two_threads: f64,
    pub one_thread: f64,
    /// The bare one's nanoseconds, with two threads.
    pub fetch_or_ns: f64,
}

/// With so many marks by each thread, interleaved.
pub fn measure(marks: usize, repetitions: usize) -> Mark {
    let [one, two] = [1, 2].map(|threads| compare(threads, marks, repetitions));
    Mark { two_threads: two.1 / two.0, one_thread: one.1 / one.0, fetch_or_ns: two.0 }
}

/// Nanoseconds of a bare OR and of our mark.
fn compare(threads: u64, marks: usize, repetitions: usize) -> (f64, f64) {
    let bare: Vec<AtomicU64> = (0..PAGES / 64).map(|_| AtomicU64::new(0)).collect();
    let ours = DirtyBitmap::with_len((PAGES << PAGE_SHIFT) as usize);
    let started = ours.start(SoftwareWay::Switch).is_ok();
    debug_assert!(started, "the system has just allowed it");
    let mut pages = PageBitmap::new(PAGES);
    let mut samples = (Vec::new(), Vec::new());
    for _ in 0..repetitions {
        let mut spent = (0.0, 0.0);
        for _ in 0..marks.div_ceil(MARKS_PER_HARVEST) {
            let each = marks.min(MARKS_PER_HARVEST);
            spent.0 += by_threads(threads, each, |page| {
                bare[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::SeqCst);
            });
            spent.1 += by_threads(threads, each, |page| {
                ours.mark_dirty((page << PAGE_SHIFT) as usize, 8);
            });
            // As between two rounds: both begin the next clear.
            bare.iter().for_each(|word| word.store(0, Ordering::SeqCst));
            if let Some(marked) = ours.switch() {
                marked.take_into(&mut pages);
            }
            pages.clear_all();
        }
        samples.0.push(spent.0 * 1e9 / marks as f64);
        samples.1.push(spent.1 * 1e9 / marks as f64);
    }
    (median(samples.0), median(samples.1))
}

/// Seconds until each thread has marked so many random pages: the mean of the threads, each from its own
/// begin, so that starting them does not count.
fn by_threads(threads: u64, marks: usize, mark: impl Fn(u64) + Sync) -> f64 {
    let ready = std::sync::Barrier::new(threads as usize);
    let total: f64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|seed| {
                let (mark, ready) = (&mark, &ready);
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    ready.wait();
                    let begun = Instant::now();
                    for _ in 0..marks {
                        mark(random.next() % PAGES);
                    }
                    begun.elapsed().as_secs_f64()
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap_or_default()).sum()
    });
    total / threads as f64
}
