//! Counts and waiting times of fetched pages.

use std::time::Duration;

use hdrhistogram::Histogram;

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchCounts {
    /// Faults of the guest.
    pub faults: u64,
    /// Faults at pages that were never populated at the source, which were placed as zeros.
    pub zero_faults: u64,
    /// Pages that were placed while a thread of the guest waited for them.
    pub fault_pages: u64,
    /// Other pages that were placed.
    pub background_pages: u64,
    /// Pages that arrived although they were there already.
    pub again_pages: u64,
}

impl FetchCounts {
    /// Pages that were missing and have arrived.
    #[must_use]
    pub fn placed_pages(&self) -> u64 {
        self.fault_pages + self.background_pages
    }
}

/// For how long threads of the guest waited for pages, from the request to the placement.
#[derive(Clone, Debug)]
pub struct PageWaits(Histogram<u64>);

/// Longer waits are recorded as this one, an hour.
const LONGEST_US: u64 = 3_600_000_000;

/// Significant decimal digits of a recorded wait.
const DIGITS: u8 = 2;

impl Default for PageWaits {
    fn default() -> Self {
        let histogram = Histogram::new_with_max(LONGEST_US, DIGITS);
        Self(histogram.expect("the bounds are constants that the histogram takes"))
    }
}

impl PageWaits {
    /// Records a wait.
    pub fn record(&mut self, wait: Duration) {
        self.0.saturating_record(u64::try_from(wait.as_micros()).unwrap_or(u64::MAX));
    }

    /// The mean in microseconds.
    #[must_use]
    pub fn mean_us(&self) -> f64 {
        self.0.mean()
    }

    /// The longest in microseconds.
    #[must_use]
    pub fn max_us(&self) -> u64 {
        self.0.max()
    }

    /// The wait in microseconds that this fraction of all waits did not exceed.
    #[must_use]
    pub fn quantile_us(&self, fraction: f64) -> u64 {
        self.0.value_at_quantile(fraction)
    }

    /// The sum of all waits.
    #[must_use]
    pub fn total(&self) -> Duration {
        Duration::from_secs_f64(self.0.mean() * self.0.len() as f64 / 1e6)
    }
}
