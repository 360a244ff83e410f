//! Which pages are dirty.

use vmferry_memory::PageBitmap;

/// How much is dirty, and how it lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    Clean,
    /// Part of the pages, in runs of 64 to 1,024 pages as buffers have them.
    Clustered(f64),
    /// Part of the pages, each by itself.
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

/// Numbers that look random, the same in each run.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// SplitMix64.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}

/// A bitmap of so many pages in which that part is set, as near as whole pages allow: another one for each
/// seed.
pub fn bitmap(pages: u64, pattern: Pattern, seed: u64) -> PageBitmap {
    let mut bitmap = PageBitmap::new(pages);
    let mut random = Random::new(seed);
    let wanted = (pages as f64 * pattern.percent() / 100.0).round() as u64;
    match pattern {
        Pattern::Clean => {}
        Pattern::Full => bitmap.set_all(),
        Pattern::Scattered(_) => {
            let mut left = wanted;
            while left > 0 {
                let page = random.below(pages);
                if !bitmap.is_set(page) {
                    bitmap.set(page);
                    left -= 1;
                }
            }
        }
        Pattern::Clustered(_) => {
            let mut left = wanted;
            while left > 0 {
                let length = (64 + random.below(961)).min(left);
                let first = random.below(pages - length + 1);
                // Where another one is already, less is added; what is missing is added elsewhere.
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
    fn as_many_are_set_as_are_wanted() {
        for pattern in Pattern::ALL {
            for pages in [8, 131_072] {
                let wanted = (pages as f64 * pattern.percent() / 100.0).round() as u64;
                assert_eq!(bitmap(pages, pattern, 7).count(), wanted, "{pattern:?} of {pages}");
            }
        }
    }
}
