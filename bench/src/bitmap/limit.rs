//! The limit set by memory bandwidth. The bitmaps are larger than any cache in total, so each
//! traversal reads from memory.

use std::hint::black_box;
use std::time::Instant;

use anyhow::ensure;
use vmferry_memory::PageBitmap;
use vmferry_memory::traverse::next_nonzero;

use crate::results::median;

/// Total size of the bitmaps that take turns.
const TOGETHER_BYTES: u64 = 1 << 30;

/// Throughput in GB (1e9 bytes) of bitmap per second.
pub struct Limit {
    /// Memory read and summed: the fastest that one thread can read a bitmap.
    pub read_gb_per_s: f64,
    /// Memory combined with other memory by OR.
    pub or_gb_per_s: f64,
    pub flat_clean_gb_per_s: f64,
    /// Union of two full bitmaps.
    pub union_gb_per_s: f64,
    pub subtract_gb_per_s: f64,
}

/// Measures with bitmaps of `pages` pages.
pub fn measure(pages: u64, repetitions: usize) -> anyhow::Result<Limit> {
    let words = (pages / 64) as usize;
    let turns = (TOGETHER_BYTES / (pages / 8)).clamp(2, 32) as usize;
    let mut clean: Vec<Vec<u64>> = (0..turns).map(|_| vec![1; words]).collect();
    // Written twice, so that each bitmap has its own memory instead of the kernel's zero page.
    clean.iter_mut().for_each(|words| words.fill(0));
    let mut full: Vec<PageBitmap> = (0..turns).map(|_| PageBitmap::new(pages)).collect();
    full.iter_mut().for_each(PageBitmap::set_all);
    let mut samples: [Vec<f64>; 5] = Default::default();
    for _ in 0..repetitions {
        for (index, words) in clean.iter().enumerate() {
            let other = &clean[(index + turns / 2) % turns];
            let begun = Instant::now();
            black_box(black_box(words).iter().fold(0, |sum: u64, word| sum.wrapping_add(*word)));
            samples[0].push(begun.elapsed().as_secs_f64());
            let begun = Instant::now();
            ensure!(
                next_nonzero(black_box(other), 0) == other.len(),
                "a clean bitmap is not clean"
            );
            samples[1].push(begun.elapsed().as_secs_f64());
        }
        for index in 0..turns / 2 {
            let (left, right) = clean.split_at_mut(turns / 2);
            let begun = Instant::now();
            for (ours, theirs) in left[index].iter_mut().zip(black_box(&right[index])) {
                *ours |= theirs;
            }
            samples[2].push(begun.elapsed().as_secs_f64());
            let (left, right) = full.split_at_mut(turns / 2);
            let begun = Instant::now();
            left[index].union_with(black_box(&right[index]));
            samples[3].push(begun.elapsed().as_secs_f64());
        }
        for index in 0..turns / 2 {
            let (left, right) = full.split_at_mut(turns / 2);
            let begun = Instant::now();
            left[index].subtract(black_box(&right[index]));
            samples[4].push(begun.elapsed().as_secs_f64());
            left[index].set_all();
        }
    }
    let [read, flat, or, union, subtract] =
        samples.map(|samples| pages as f64 / 8.0 / median(samples) / 1e9);
    Ok(Limit {
        read_gb_per_s: read,
        or_gb_per_s: or,
        flat_clean_gb_per_s: flat,
        union_gb_per_s: union,
        subtract_gb_per_s: subtract,
    })
}
