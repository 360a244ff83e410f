//! Estimates how much a guest writes that can't be attached, by QEMU's own measurement.
//!
//! QEMU hashes a sample of the guest's pages before and after some time (`calc-dirty-rate`, page
//! sampling). It misses pages that were rewritten with the same content, and skips blocks of less
//! than 128 MiB. Source: QEMU `migration/dirtyrate.c` and `dirtyrate.h`, `qapi/migration.json`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use vmferry::estimate::{Estimate, Sample, rate};
use vmferry_memory::PAGE_SIZE;

use super::source::CarriedSource;
use crate::error::QemuError;
use crate::qmp::Version;

/// From this version on, the time can be given in milliseconds.
const TAKES_MILLISECONDS: Version = Version { major: 8, minor: 2, micro: 0 };

/// A short interval, so that few pages are written twice. QEMU takes 50 ms at least.
const SHORT: Duration = Duration::from_millis(100);

/// The number of these intervals.
const SHORT_INTERVALS: usize = 5;

/// The shortest interval for a QEMU that takes seconds.
const SECOND: Duration = Duration::from_secs(1);

/// The longest interval that QEMU takes.
const LONGEST: Duration = Duration::from_secs(60);

/// Pages that QEMU hashes each time, for the whole guest.
const SAMPLED_PAGES: u64 = 1 << 16;

/// The range that QEMU takes, in pages per GiB.
const SAMPLES_OF_A_GIB: std::ops::RangeInclusive<u64> = 128..=16_384;

/// How often QEMU is asked whether it is done.
const POLL_PERIOD: Duration = Duration::from_millis(20);

/// How much longer than the interval it may take, as it hashes before and after.
const PATIENCE: Duration = Duration::from_secs(30);

impl CarriedSource {
    /// Has QEMU measure what its guest writes: for several short intervals, and once for the rest
    /// of `time`, which gives the size of the written set. `ended` stops it early. QEMU then
    /// measures to the end of the interval, which does no harm.
    ///
    /// # Errors
    /// QMP errors; QEMU serves one measurement at a time.
    pub fn estimate(&self, time: Duration, ended: &AtomicBool) -> Result<Estimate, QemuError> {
        let (interval, intervals) = match self.version() >= TAKES_MILLISECONDS {
            true => (SHORT, SHORT_INTERVALS),
            false => (SECOND, 1),
        };
        let begun = Instant::now();
        let memory_bytes = self.memory_bytes();
        let mut estimate = Estimate {
            memory_bytes,
            populated_pages: self.resident_bytes()?.min(memory_bytes) / PAGE_SIZE as u64,
            ..Estimate::default()
        };
        for _ in 0..intervals {
            let Some(bytes) = self.written_in(interval, ended)? else { break };
            let pages = bytes / PAGE_SIZE as u64;
            estimate.samples.push(Sample { ms: interval.as_secs_f64() * 1e3, pages });
        }
        let rest = time.saturating_sub(begun.elapsed()).clamp(SECOND, LONGEST);
        let hot = self.written_in(Duration::from_secs(rest.as_secs()), ended)?.unwrap_or_default();
        let most = estimate.samples.iter().map(|sample| sample.pages).max().unwrap_or_default();
        estimate.hot_bytes = hot.max(most * PAGE_SIZE as u64);
        estimate.dirty_bytes_per_s = rate(&estimate.samples);
        estimate.watched_ms = begun.elapsed().as_secs_f64() * 1e3;
        Ok(estimate)
    }

    /// Bytes of the pages that the guest writes in `time`; each page counts once. `None` if it was
    /// stopped early.
    fn written_in(&self, time: Duration, ended: &AtomicBool) -> Result<Option<u64>, QemuError> {
        if ended.load(Ordering::Acquire) {
            // QEMU may still be measuring, and would refuse another measurement.
            return Ok(None);
        }
        let gib = self.memory_bytes().div_ceil(1 << 30).max(1);
        let (least, most) = SAMPLES_OF_A_GIB.into_inner();
        let samples = (SAMPLED_PAGES / gib).clamp(least, most);
        let order = if time < SECOND {
            let ms = time.as_millis() as u64;
            json!({ "calc-time": ms, "calc-time-unit": "millisecond", "sample-pages": samples })
        } else {
            json!({ "calc-time": time.as_secs(), "sample-pages": samples })
        };
        let begun = Instant::now();
        self.monitor.orders().execute("calc-dirty-rate", order)?;
        while begun.elapsed() < time + PATIENCE {
            std::thread::sleep(POLL_PERIOD);
            if ended.load(Ordering::Acquire) {
                return Ok(None);
            }
            let said = self.monitor.orders().execute("query-dirty-rate", json!({}))?;
            if said["status"] == "measured" {
                // In MiB per second.
                let rate = said["dirty-rate"].as_u64().unwrap_or_default();
                return Ok(Some((time.as_secs_f64() * (rate << 20) as f64) as u64));
            }
        }
        let late =
            self.monitor.orders().timed_out("measure what its guest writes", time + PATIENCE);
        Err(late.into())
    }

    /// The memory of the process, in bytes: the guest's populated pages and QEMU's own.
    fn resident_bytes(&self) -> Result<u64, QemuError> {
        let path = || self.monitor.orders().path().to_owned();
        let pid = self.pid().ok_or_else(|| QemuError::Unseen { path: path() })?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).map_err(|source| {
            QemuError::Process { action: "read how much memory it has", pid, source }
        })?;
        let kib = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
        let counted = ["RssAnon:", "RssFile:", "RssShmem:", "VmSwap:", "HugetlbPages:"];
        let lines = status.lines().filter(|line| counted.iter().any(|name| line.starts_with(name)));
        Ok(lines.filter_map(kib).sum::<u64>() << 10)
    }
}
