//! `free-pages`: the time that free-page hints save, for guests that have freed most of their
//! memory.
//!
//! A guest of four vCPUs writes 8 GB of its memory and frees all but its working set. Then it is
//! idle with 256 MiB, or works on 1 GiB as a build does: it allocates, writes, reads and frees
//! buffers. It migrates twice over loopback TCP: first without hints, to a machine that receives
//! all of its memory, and from there with hints. Both migrations thus begin with the same memory,
//! populated in the same way. The pairs repeat until each case has its runs. Before each migration,
//! the memory that the destination may need is allocated once and freed. The engine measures the
//! time: from the start of the dirty log until the guest runs at the destination.

mod guest;
mod ratios;

use std::collections::BTreeMap;

use anyhow::Context;
use serde::Serialize;
use vmferry_report::published::{Figure, of_benchmark};

use self::guest::{Guest, Sample};
use crate::results::{Results, Row, least, median, most, row};

/// A guest. `vmferry_report::published` has the published figures for a similar guest, by this
/// name.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    memory_mib: u64,
    /// Memory that the guest writes once. It then frees all but the working set.
    used_mib: u64,
    work: Work,
}

/// What the guest does while it migrates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// Nothing. `mib` MiB are in use.
    Idle { mib: u64 },
    /// Allocates, writes, reads and frees buffers of `mib` MiB in total, and writes `rate` pages
    /// per second.
    Churn { mib: u64, rate: u64 },
}

/// Memory that is not the guest's heap: its kernel, and the rounding to blocks of 4 MiB.
const KERNEL_MIB: u64 = 32;

impl Case {
    /// The published total time for a similar guest, in milliseconds.
    fn published_ms(&self, hints: bool) -> Option<f64> {
        let mut figures = of_benchmark("free-pages").flat_map(|table| &table.figures);
        let says = |figure: &Figure, name: &str, value: &str| {
            figure.matching.get(name).is_some_and(|of| of == value)
        };
        let is_it = |figure: &&Figure| {
            says(figure, "guest", self.name) && says(figure, "hints", yes_or_no(hints))
        };
        figures.find(is_it)?.median()
    }

    /// The guest's kernel command line.
    fn workload(&self) -> String {
        match self.work {
            Work::Idle { mib } => {
                let freed = self.used_mib - mib - KERNEL_MIB;
                format!("fill={mib},incompressible freed={freed}")
            }
            Work::Churn { mib, rate } => {
                let freed = self.used_mib - KERNEL_MIB;
                format!("freed={freed} churn={mib},rate={rate}")
            }
        }
    }
}

fn yes_or_no(hints: bool) -> &'static str {
    if hints { "yes" } else { "no" }
}

/// Pages per second that a build writes on two cores: 80 MB/s.
const BUILD_RATE: u64 = 20_000;

const CASES: [Case; 4] = [
    Case { name: "idle_8g", memory_mib: 8 << 10, used_mib: 8 << 10, work: Work::Idle { mib: 256 } },
    Case {
        name: "busy_8g",
        memory_mib: 8 << 10,
        used_mib: 8 << 10,
        work: Work::Churn { mib: 1024, rate: BUILD_RATE },
    },
    Case {
        name: "idle_128g",
        memory_mib: 128 << 10,
        used_mib: 8 << 10,
        work: Work::Idle { mib: 256 },
    },
    Case {
        name: "busy_128g",
        memory_mib: 128 << 10,
        used_mib: 8 << 10,
        work: Work::Churn { mib: 1024, rate: BUILD_RATE },
    },
];

/// The same guests, but small: they only show that the benchmark works.
const QUICK_CASES: [Case; 2] = [
    Case { name: "idle_8g", memory_mib: 192, used_mib: 192, work: Work::Idle { mib: 16 } },
    Case {
        name: "busy_8g",
        memory_mib: 192,
        used_mib: 192,
        work: Work::Churn { mib: 32, rate: 2_000 },
    },
];

/// A row: one guest, with or without hints, over all its runs.
#[derive(Serialize)]
struct FreePagesRow {
    guest: &'static str,
    hints: &'static str,
    total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    downtime_ms: f64,
    rounds: f64,
    sent_mb: f64,
    /// Guest pages sent with their content.
    sent_pages_mb: f64,
    /// Populated pages that the guest counted as in use when it was paused.
    nonfree_mb: f64,
    /// Free pages in blocks of 4 MiB that are partly in use. The balloon driver does not hint
    /// those.
    fragments_mb: f64,
    /// Pages skipped because they were hinted.
    hinted_mb: f64,
    /// The guest's work per second before the migration and during it.
    work_per_s_before: f64,
    work_per_s_during: f64,
    /// The same over the time of the migration without hints.
    work_per_s_in_span: f64,
    source_cpu_s: f64,
    destination_cpu_s: f64,
    published_ms: f64,
    runs: usize,
}

/// Runs the benchmark. `quick` migrates two small guests once.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let (cases, pairs): (&[Case], _) = if quick { (&QUICK_CASES, 1) } else { (&CASES, 3) };
    let mut samples: BTreeMap<(usize, bool), Vec<Sample>> = BTreeMap::new();
    for pair in 1..=pairs {
        for (index, case) in cases.iter().enumerate() {
            let mut guest = Guest::start(case).with_context(|| format!("guest {}", case.name))?;
            // The duration of the migration without hints. The guest's loss is comparable only over
            // the same time.
            let mut span = 0.0;
            for hints in [false, true] {
                let (next, sample) = guest
                    .move_on(hints, span)
                    .with_context(|| format!("guest {}, hints: {hints}", case.name))?;
                (guest, span) = (next, sample.span_s);
                eprintln!("free-pages: {}, hints: {hints}: {:.0} ms", case.name, sample.total_ms);
                samples.entry((index, hints)).or_default().push(sample);
            }
            guest.check().with_context(|| format!("guest {}, migrated twice", case.name))?;
            eprintln!("free-pages: {}, pair {pair} of {pairs}", case.name);
        }
    }
    let mut rows = Vec::new();
    for ((index, hints), samples) in &samples {
        rows.push(as_row(&cases[*index], *hints, samples)?);
    }
    let ratios = ratios::of(cases, &samples);
    let mut results = Results::new("free-pages", rows, BTreeMap::new(), ratios.values);
    let aims = ratios.aims.iter().map(row).collect::<anyhow::Result<Vec<Row>>>()?;
    results.more.insert("aims", aims);
    Ok(results)
}

fn as_row(case: &Case, hints: bool, samples: &[Sample]) -> anyhow::Result<Row> {
    let mid = |part: fn(&Sample) -> f64| median(samples.iter().map(part));
    let totals = || samples.iter().map(|sample| sample.total_ms);
    row(&FreePagesRow {
        guest: case.name,
        hints: yes_or_no(hints),
        total_ms: mid(|sample| sample.total_ms),
        total_ms_min: least(totals()),
        total_ms_max: most(totals()),
        downtime_ms: mid(|sample| sample.downtime_ms),
        rounds: mid(|sample| sample.rounds),
        sent_mb: mid(|sample| sample.sent_bytes) / 1e6,
        sent_pages_mb: mid(|sample| sample.page_bytes) / 1e6,
        nonfree_mb: mid(|sample| sample.nonfree_bytes) / 1e6,
        fragments_mb: mid(|sample| sample.fragments_bytes) / 1e6,
        hinted_mb: mid(|sample| sample.hinted_bytes) / 1e6,
        work_per_s_before: mid(|sample| sample.work_per_s_before),
        work_per_s_during: mid(|sample| sample.work_per_s_during),
        work_per_s_in_span: mid(|sample| sample.work_per_s_in_span),
        source_cpu_s: mid(|sample| sample.source_cpu_s),
        destination_cpu_s: mid(|sample| sample.destination_cpu_s),
        published_ms: case
            .published_ms(hints)
            .context("there is no published figure for this guest")?,
        runs: samples.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_published_figures() {
        for case in CASES.iter().chain(&QUICK_CASES) {
            let [with, without] = [true, false].map(|hints| case.published_ms(hints).unwrap());
            assert!(with < without, "{}", case.name);
        }
    }
}
