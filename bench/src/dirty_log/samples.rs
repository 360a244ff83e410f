//! The samples of one row.

use serde::Serialize;

use super::subject::{Sample, Unit};
use crate::results::{least, median, most};

#[derive(Serialize)]
pub struct LogRow {
    table: &'static str,
    slot: String,
    len: u64,
    dirty: String,
    log: &'static str,
    /// The call that fetches the dirty pages.
    call_cycles: f64,
    call_cycles_min: f64,
    call_cycles_max: f64,
    /// Write-protecting the pages again, if the call does not do that. For the dirty ring: the work
    /// of the vCPU threads on full rings.
    protect_cycles: f64,
    /// Traversing the runs of dirty pages, and fetching what the call did not.
    traverse_cycles: f64,
    pages: u64,
    /// The cycles of each call in order, as published.
    pub calls: String,
}

/// All samples of a row.
#[derive(Default)]
pub struct Samples(pub Vec<Sample>);

impl Samples {
    fn median_of(&self, part: impl Fn(&Sample) -> u64) -> f64 {
        median(self.0.iter().map(|sample| part(sample) as f64))
    }

    pub fn call(&self) -> f64 {
        self.median_of(|sample| sample.call)
    }

    pub fn whole(&self) -> f64 {
        self.median_of(|sample| sample.call + sample.protect + sample.traverse)
    }

    pub fn row(&self, table: &'static str, unit: &Unit, dirty: &str, log: &'static str) -> LogRow {
        let calls: Vec<f64> = self.0.iter().map(|sample| sample.call as f64).collect();
        LogRow {
            table,
            slot: unit.slot.clone(),
            len: unit.bytes,
            dirty: dirty.to_owned(),
            log,
            call_cycles: self.call(),
            call_cycles_min: least(calls.iter().copied()),
            call_cycles_max: most(calls.iter().copied()),
            protect_cycles: self.median_of(|sample| sample.protect),
            traverse_cycles: self.median_of(|sample| sample.traverse),
            pages: self.median_of(|sample| sample.pages) as u64,
            calls: calls.iter().map(|call| format!("{call:.0}")).collect::<Vec<_>>().join(" "),
        }
    }
}
