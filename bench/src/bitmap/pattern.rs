//! Patterns of dirty pages.

use fastrand::Rng;
use vmferry_memory::PageBitmap;

/// The number of dirty pages and their distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    Clean,
    /// This fraction of the pages, in runs of 64 to 1,024 pages, as buffers have them.
    Clustered(f64),
    /// This fraction of the pages, each at random.
    Scattered(f64),
    Full,
}

impl Pattern {
    pub const ALL: [Self; 10] = [
        Self::Clean,
        Self::Clustered(0.0001),
        Self::Scattered(0.0001),
        Self::Clustered(0.01),
        Self::Scattered(0.01),
        Self::Clustered(0.1),
        Self::Scattered(0.1),
        Self::Clustered(0.5),
        Self::Scattered(0.5),
        Self::Full,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Clean | Self::Full => "",
            Self::Clustered(_) => "clustered",
            Self::Scattered(_) => "scattered",
        }
    }

    pub fn percent(self) -> f64 {
        match self {
            Self::Clean => 0.0,
            Self::Clustered(part) | Self::Scattered(part) => part * 100.0,
            Self::Full => 100.0,
        }
    }
}

/// Makes a bitmap of `pages` pages with this pattern, rounded to whole pages. The seed selects the
/// positions.
pub fn bitmap(pages: u64, pattern: Pattern, seed: u64) -> PageBitmap {
    let mut bitmap = PageBitmap::new(pages);
    let mut random = Rng::with_seed(seed);
    let wanted = (pages as f64 * pattern.percent() / 100.0).round() as u64;
    match pattern {
        Pattern::Clean => {}
        Pattern::Full => bitmap.set_all(),
        Pattern::Scattered(_) => {
            let mut left = wanted;
            while left > 0 {
                let page = random.u64(..pages);
                if !bitmap.is_set(page) {
                    bitmap.set(page);
                    left -= 1;
                }
            }
        }
        Pattern::Clustered(_) => {
            let mut left = wanted;
            while left > 0 {
                let length = (64 + random.u64(..961)).min(left);
                let first = random.u64(..pages - length + 1);
                // Pages that were already set do not count; the loop adds the missing ones
                // elsewhere.
                let fresh = (first..first + length).filter(|page| !bitmap.is_set(*page)).count();
                bitmap.set_run(first, length);
                left -= fresh as u64;
            }
        }
    }
    bitmap
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmap_sets_the_requested_fraction() {
        for pattern in Pattern::ALL {
            for pages in [8, 131_072] {
                let wanted = (pages as f64 * pattern.percent() / 100.0).round() as u64;
                assert_eq!(bitmap(pages, pattern, 7).count(), wanted, "{pattern:?} of {pages}");
            }
        }
    }
}
