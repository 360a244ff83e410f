//! Estimates the cost of a migration without performing one. The running guest's dirty log is read
//! for some seconds, and a sample of its pages is compressed. The result is then combined with a
//! link and the user's limits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vmferry_codec::{CompressError, Compressors, Method};
use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, PageSet, is_zero};

use crate::error::MigrateError;
use crate::vmm::FIXED_COST;

/// Interval between two harvests: as long as a short round, so that a page that is written all the
/// time counts as often as in a migration.
const INTERVAL: Duration = Duration::from_millis(100);

/// Number of pages in the sample.
const SAMPLED_PAGES: u64 = 2048;

/// Measurements of a guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Estimate {
    /// The guest's memory in bytes, populated or not.
    pub memory_bytes: u64,
    /// Pages with content.
    pub populated_pages: u64,
    /// Their content; `None` if it could not be sampled. The pages are then assumed to be
    /// incompressible.
    pub contents: Option<Contents>,
    /// Duration of the measurement, in milliseconds.
    pub watched_ms: f64,
    /// The rate at which the guest dirties memory, in bytes of whole pages per second, over the
    /// intervals of the samples.
    pub dirty_bytes_per_s: f64,
    /// Bytes of all pages that were written during the measurement.
    pub hot_bytes: u64,
    /// Their content, which seldom resembles the rest; `None` as for `contents`.
    pub hot_contents: Option<Contents>,
    /// The intervals.
    pub samples: Vec<Sample>,
}

/// The content of all populated pages, estimated from a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Contents {
    /// Share of pages that are all zero, in percent.
    pub zero_percent: f64,
    /// Uncompressed bytes of the other pages divided by their size with LZ4, at least 1.
    pub compression_ratio: f64,
}

/// One interval of the measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Sample {
    /// Its length in milliseconds.
    pub ms: f64,
    /// Pages written in it.
    pub pages: u64,
}

/// Measures a running guest for some time. The log is always stopped at the end. Setting `ended`
/// ends the measurement early.
///
/// # Errors
/// Errors of the dirty log or of the memory.
pub fn watch(
    memory: &GuestMemory,
    log: &dyn DirtyLog,
    time: Duration,
    ended: &AtomicBool,
) -> Result<Estimate, MigrateError> {
    log.start()?;
    let seen = look(memory, log, time, ended);
    log.stop()?;
    seen
}

fn look(
    memory: &GuestMemory,
    log: &dyn DirtyLog,
    time: Duration,
    ended: &AtomicBool,
) -> Result<Estimate, MigrateError> {
    let populated = memory.populated()?;
    let mut estimate = Estimate {
        memory_bytes: memory.total_pages() * PAGE_SIZE as u64,
        populated_pages: populated.count(),
        ..Estimate::default()
    };
    estimate.contents = Some(sample(memory, &populated)?);
    let (mut pages, mut hot) = (PageSet::for_memory(memory), PageSet::for_memory(memory));
    // Writes during the sampling belong to no interval.
    collect(log, &mut pages)?;
    let begun = Instant::now();
    let mut last = begun;
    while last.duration_since(begun) < time && !ended.load(Ordering::Acquire) {
        std::thread::sleep(INTERVAL.min(time.saturating_sub(last.duration_since(begun))));
        collect(log, &mut pages)?;
        let now = Instant::now();
        let ms = now.duration_since(last).as_secs_f64() * 1e3;
        estimate.samples.push(Sample { ms, pages: pages.count() });
        hot.union_with(&pages);
        last = now;
    }
    estimate.watched_ms = last.duration_since(begun).as_secs_f64() * 1e3;
    estimate.hot_bytes = hot.count() * PAGE_SIZE as u64;
    estimate.dirty_bytes_per_s = rate(&estimate.samples);
    estimate.hot_contents = Some(sample(memory, &hot)?);
    Ok(estimate)
}

/// The rate over these intervals, in bytes of whole pages per second.
#[must_use]
pub fn rate(samples: &[Sample]) -> f64 {
    let pages: u64 = samples.iter().map(|sample| sample.pages).sum();
    let ms: f64 = samples.iter().map(|sample| sample.ms).sum();
    (pages * PAGE_SIZE as u64) as f64 / (ms / 1e3).max(1e-3)
}

/// Harvests the pages written since the last call and protects them again.
fn collect(log: &dyn DirtyLog, pages: &mut PageSet) -> Result<(), MigrateError> {
    pages.clear_all();
    log.collect(pages)?;
    for (slot, bitmap) in pages.iter() {
        let words = bitmap.words();
        for block in (0..words.len()).step_by(64) {
            let words = &words[block..words.len().min(block + 64)];
            if words.iter().any(|word| *word != 0) {
                log.rearm(slot, block, words)?;
            }
        }
    }
    Ok(())
}

/// Samples pages spread over all populated pages.
fn sample(memory: &GuestMemory, populated: &PageSet) -> Result<Contents, MigrateError> {
    let step = (populated.count() / SAMPLED_PAGES).max(1);
    let compressors = Compressors::default();
    let failed = |error: CompressError| MigrateError::Compression {
        channel: "the sample of an estimate".into(),
        source: error.into(),
    };
    let mut lz4 = compressors.make(Method::lz4()).map_err(failed)?;
    let (mut seen, mut zeros, mut content, mut packed) = (0_u64, 0_u64, 0_u64, 0_u64);
    let (mut page, mut output) = (vec![0; PAGE_SIZE], vec![0; PAGE_SIZE]);
    let mut next = 0;
    let mut before = 0;
    for run in populated.runs() {
        while next < before + run.pages {
            let first = run.first + (next - before);
            memory.copy_out(PageRun { slot: run.slot, first, pages: 1 }, &mut page)?;
            seen += 1;
            if is_zero(&page) {
                zeros += 1;
            } else {
                let length = lz4.compress(&page, &mut output).map_err(failed)?;
                content += PAGE_SIZE as u64;
                packed += length.unwrap_or(PAGE_SIZE) as u64;
            }
            next += step;
        }
        before += run.pages;
    }
    Ok(Contents {
        zero_percent: zeros as f64 * 100.0 / seen.max(1) as f64,
        compression_ratio: if packed == 0 { 1.0 } else { content as f64 / packed as f64 },
    })
}

/// The link and the limits of the estimated migration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// What the link carries, in bytes per second.
    pub link_bytes_per_s: f64,
    /// Longest accepted downtime.
    pub downtime_limit: Duration,
    /// The most rounds with the guest running.
    pub max_rounds: u32,
    /// Whether the guest must be paused during the whole migration.
    pub stands_still: bool,
}

/// The estimated cost of a migration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outlook {
    /// Whether it would finish within the limits.
    pub converges: bool,
    /// Number of rounds, including the one with the guest paused.
    pub rounds: u32,
    /// From the first page to the guest at the destination, in milliseconds.
    pub total_ms: f64,
    /// The downtime, in milliseconds.
    pub downtime_ms: f64,
    /// Bytes on the link.
    pub sent_bytes: u64,
    /// The slowest link on which it would converge, in bytes per second, if this one is too slow.
    pub needed_bytes_per_s: Option<f64>,
}

impl Estimate {
    /// The estimated cost of a migration over this link.
    #[must_use]
    pub fn outlook(&self, plan: Plan) -> Outlook {
        let mut outlook = self.run(plan);
        if !outlook.converges {
            // Doubles the rate until it suffices, then bisects between the last two values.
            let converges = |rate: f64| self.run(Plan { link_bytes_per_s: rate, ..plan }).converges;
            let fast =
                std::iter::successors(Some(plan.link_bytes_per_s * 2.0), |rate| Some(rate * 2.0));
            if let Some(fast) = fast.take(20).find(|rate| converges(*rate)) {
                let (mut slow, mut fast) = (fast / 2.0, fast);
                for _ in 0..10 {
                    let middle = f64::midpoint(slow, fast);
                    *(if converges(middle) { &mut fast } else { &mut slow }) = middle;
                }
                outlook.needed_bytes_per_s = Some(fast);
            }
        }
        outlook
    }

    /// Simulates the rounds of the engine: each takes as long as its pages need, and leaves the
    /// pages that the guest dirties in that time.
    fn run(&self, plan: Plan) -> Outlook {
        let link = plan.link_bytes_per_s.max(1.0);
        // The bytes on the link for these bytes of pages.
        let on_the_link = |pages: f64, contents: Option<Contents>| {
            let known = contents.unwrap_or(Contents { zero_percent: 0.0, compression_ratio: 1.0 });
            pages * (1.0 - known.zero_percent / 100.0) / known.compression_ratio.max(1.0)
        };
        let populated = self.populated_pages as f64 * PAGE_SIZE as f64;
        let mut pending = on_the_link(populated, self.contents);
        let (mut total, mut sent, mut rounds) = (0.0, 0.0, 0);
        let spare = plan.downtime_limit.saturating_sub(FIXED_COST).as_secs_f64();
        loop {
            let took = pending / link;
            let fits = (rounds > 0 || plan.stands_still) && took <= spare;
            let over = fits || rounds >= plan.max_rounds || plan.stands_still;
            rounds += 1;
            total += took;
            sent += pending;
            if over {
                let downtime = FIXED_COST.as_secs_f64() + took;
                return Outlook {
                    converges: fits && spare > 0.0,
                    rounds,
                    total_ms: (total + FIXED_COST.as_secs_f64()) * 1e3,
                    downtime_ms: downtime * 1e3,
                    sent_bytes: sent as u64,
                    needed_bytes_per_s: None,
                };
            }
            pending = on_the_link(self.dirtied_in(took), self.hot_contents);
        }
    }

    /// Bytes of pages that the guest dirties in this time. The curve starts at the measured rate
    /// and approaches the size of the written set, because the guest writes pages again.
    fn dirtied_in(&self, seconds: f64) -> f64 {
        let hot = self.hot_bytes as f64;
        if hot <= 0.0 {
            return 0.0;
        }
        // The rate was measured over intervals in which some pages were already written twice.
        let watched: f64 = self.samples.iter().map(|sample| sample.ms / 1e3).sum();
        let interval = match self.samples.len() {
            0 => INTERVAL.as_secs_f64(),
            intervals => watched / intervals as f64,
        };
        let share = (self.dirty_bytes_per_s * interval / hot).min(0.999);
        let rate = -(1.0 - share).ln() / interval;
        hot * (1.0 - (-rate * seconds).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(dirty_bytes_per_s: f64, hot_bytes: u64) -> Estimate {
        Estimate {
            memory_bytes: 1 << 30,
            populated_pages: 100_000,
            contents: None,
            hot_contents: None,
            watched_ms: 5000.0,
            dirty_bytes_per_s,
            hot_bytes,
            samples: Vec::new(),
        }
    }

    fn plan(link_bytes_per_s: f64) -> Plan {
        let downtime_limit = Duration::from_millis(300);
        Plan { link_bytes_per_s, downtime_limit, max_rounds: 30, stands_still: false }
    }

    #[test]
    fn estimate_of_an_idle_guest_is_the_time_of_its_memory() {
        let outlook = guest(0.0, 0).outlook(plan(100e6));
        assert!(outlook.converges && outlook.rounds == 2, "{outlook:?}");
        assert!((outlook.total_ms - 4100.0).abs() < 1.0, "{outlook:?}");
        assert_eq!(outlook.sent_bytes, 409_600_000);
        assert_eq!(outlook.downtime_ms, 4.0);
    }

    #[test]
    fn estimate_names_the_bandwidth_that_a_busy_guest_needs() {
        let slow = guest(500e6, 200_000_000).outlook(plan(100e6));
        assert!(!slow.converges && slow.rounds == 31, "{slow:?}");
        let needed = slow.needed_bytes_per_s.unwrap();
        // The whole written set within the downtime limit.
        assert!((200e6..700e6).contains(&needed), "{needed}");
        assert!(guest(500e6, 200_000_000).outlook(plan(needed)).converges);
        assert!(!guest(500e6, 200_000_000).outlook(plan(needed * 0.9)).converges);
    }

    #[test]
    fn estimate_counts_zeros_and_compression() {
        let mut guest = guest(0.0, 0);
        guest.contents = Some(Contents { zero_percent: 50.0, compression_ratio: 4.0 });
        let outlook = guest.outlook(plan(100e6));
        assert!((outlook.total_ms - 516.0).abs() < 1.0, "{outlook:?}");
        assert_eq!(outlook.sent_bytes, 51_200_000);
    }

    /// Compressible text around an incompressible hot set. The hot set determines the length of the
    /// last round.
    #[test]
    fn estimate_uses_the_ratio_of_hot_pages_for_hot_pages() {
        let mut guest = guest(500e6, 20_000_000);
        guest.contents = Some(Contents { zero_percent: 0.0, compression_ratio: 10.0 });
        let plain = Contents { zero_percent: 0.0, compression_ratio: 1.0 };
        guest.hot_contents = Some(plain);
        let outlook = guest.outlook(plan(100e6));
        assert!((outlook.downtime_ms - 204.0).abs() < 1.0, "{outlook:?}");
        guest.hot_contents = Some(Contents { compression_ratio: 2.0, ..plain });
        let outlook = guest.outlook(plan(100e6));
        assert!((outlook.downtime_ms - 104.0).abs() < 1.0, "{outlook:?}");
    }

    #[test]
    fn estimate_of_a_paused_guest_is_one_round_of_downtime() {
        let plan = Plan { stands_still: true, ..plan(100e6) };
        let outlook = guest(500e6, 200_000_000).outlook(plan);
        assert!(!outlook.converges && outlook.rounds == 1, "{outlook:?}");
        assert_eq!(outlook.downtime_ms, outlook.total_ms);
        assert_eq!(outlook.sent_bytes, 409_600_000);
        // All of memory in 296 ms.
        let needed = outlook.needed_bytes_per_s.unwrap();
        assert!((1.38e9..1.40e9).contains(&needed), "{needed}");
    }

    #[test]
    fn estimate_bounds_writes_by_the_hot_pages() {
        let guest = guest(100e6, 20_000_000);
        assert!((guest.dirtied_in(0.1) - 10e6).abs() < 1e5, "as it was seen");
        assert!(guest.dirtied_in(0.2) < 16e6, "pages are written again");
        assert!(guest.dirtied_in(100.0) <= 20e6);
    }

    /// The same guest measured over longer intervals, in which more pages are written twice.
    #[test]
    fn estimate_does_not_depend_on_the_interval_length() {
        let seen = |ms: f64, bytes: f64| {
            let pages = (bytes / PAGE_SIZE as f64) as u64;
            let samples = vec![Sample { ms, pages }; 3];
            Estimate { samples: samples.clone(), ..guest(rate(&samples), 40_000_000) }
        };
        // A page stays clean for 100 ms with probability 0.7, and for 200 ms with 0.49.
        let short = seen(100.0, 12e6).dirtied_in(0.05);
        let long = seen(200.0, 20.4e6).dirtied_in(0.05);
        assert!((short - long).abs() < 1e4, "{short} {long}");
    }

    #[test]
    fn estimate_of_an_unreachable_limit_names_no_link() {
        let plan = Plan { downtime_limit: Duration::from_millis(1), ..plan(100e6) };
        let outlook = guest(10e6, 20_000_000).outlook(plan);
        assert!(!outlook.converges && outlook.needed_bytes_per_s.is_none(), "{outlook:?}");
    }
}
