//! The result of one migration.

use anyhow::Context;
use serde_json::Value;
use vmferry_memory::PAGE_SIZE;

/// The result of one migration with post-copy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Pages that the guest lacked when it started at the destination.
    pub missing_pages: f64,
    /// Faults that waited for a page.
    pub waits: f64,
    pub wait_mean_us: f64,
    pub wait_p50_us: f64,
    pub wait_p99_us: f64,
    pub wait_max_us: f64,
    /// From the guest's start until the last page had arrived.
    pub fetch_ms: f64,
    /// The first round's pages per second, in bytes.
    pub precopy_mb_per_s: Option<f64>,
    pub downtime_ms: f64,
    /// Pages that the guest has checked within the window after its start.
    pub guest_work: Option<f64>,
}

impl Sample {
    /// Missing pages per second, in bytes.
    pub fn fetch_mb_per_s(&self) -> f64 {
        mb(self.missing_pages) / (self.fetch_ms / 1e3)
    }

    /// vmferry's figures, from the statistics of both sides. The downtime is the engine's own.
    pub fn of(source: &Value, destination: &Value) -> anyhow::Result<Self> {
        let number = |of: &Value, name: &str| {
            of[name].as_f64().with_context(|| format!("the statistics have no {name}: {of}"))
        };
        let (fetch, first) = (&destination["fetch"], &source["rounds"][0]);
        let fetched = |name: &str| number(fetch, name);
        Ok(Self {
            missing_pages: fetched("missing_pages")?,
            waits: fetched("faults")? - fetched("zero_faults")?,
            wait_mean_us: fetched("wait_mean_us")?,
            wait_p50_us: fetched("wait_p50_us")?,
            wait_p99_us: fetched("wait_p99_us")?,
            wait_max_us: fetched("wait_max_us")?,
            fetch_ms: fetched("fetch_ms")?,
            precopy_mb_per_s: Some(mb(number(first, "pages")?) / (number(first, "ms")? / 1e3)),
            downtime_ms: number(source, "downtime_ms")?,
            guest_work: None,
        })
    }
}

fn mb(pages: f64) -> f64 {
    pages * PAGE_SIZE as f64 / 1e6
}
