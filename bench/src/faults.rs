//! `faults`: missing pages of a guest whose threads fault at random, by number of threads and of
//! descriptors.
//!
//! The guest is a process of its own with a memfd of 1 GiB. Each of its threads touches pages that
//! no other thread touches, and measures each access from before to after. This process has a
//! handler thread for each descriptor, which places a page for each fault. The pages are at hand:
//! nothing is fetched, except in the last row, where one thread of this process waits for pages
//! that come over the engine's fetch lane with TLS.
//!
//! The limits are placing without faults, and a page fetched over rustls on loopback. The latter
//! and the fault of a single thread together are the floor of a post-copy fault.

mod fetched;
mod guest;
mod handlers;
mod yardsticks;

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use serde::Serialize;
use vmferry_report::{Curves, Legend};

use self::guest::{Guest, Order};
use crate::place::warm_up;
use crate::results::{Results, Row, least, median, most, number, row};

pub use self::guest::run as run_guest;

const THREADS: [usize; 3] = [1, 8, 64];
const DESCRIPTORS: [usize; 5] = [1, 2, 4, 8, 16];

/// A row: one number of threads with one number of descriptors. The latencies are medians over the
/// runs, except for the maximum.
#[derive(Serialize)]
struct FaultsRow {
    /// `placed`: the pages are at hand. `fetched`: they come over a fetch lane with TLS.
    way: &'static str,
    threads: usize,
    descriptors: usize,
    faults_per_s: f64,
    faults_per_s_min: f64,
    faults_per_s_max: f64,
    mean_us: f64,
    p50_us: f64,
    p50_us_min: f64,
    p50_us_max: f64,
    p99_us: f64,
    max_us: f64,
    handlers_cpu_s: f64,
    handlers_cpu_us_per_fault: f64,
    runs: usize,
}

/// The result of one run.
#[derive(Clone, Copy, Debug)]
struct Sample {
    faults_per_s: f64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    handlers_cpu_s: f64,
}

/// The size of the benchmark.
struct Plan {
    pages: u64,
    /// Pages that are touched in a run.
    faults: u64,
    repetitions: usize,
    round_trips: usize,
}

const USUAL: Plan = Plan { pages: 1 << 18, faults: 1 << 16, repetitions: 9, round_trips: 10_000 };
const QUICK: Plan = Plan { pages: 1 << 16, faults: 1 << 12, repetitions: 1, round_trips: 200 };

/// Runs the benchmark. `quick` touches 4,096 pages of 256 MiB once; otherwise 65,536 pages of 1 GiB
/// are touched nine times.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let plan = if quick { QUICK } else { USUAL };
    let mut samples: BTreeMap<(usize, usize), Vec<Sample>> = BTreeMap::new();
    let mut copies = yardsticks::Copies::default();
    let mut fetched = Vec::new();
    for pass in 1..=plan.repetitions {
        for threads in THREADS {
            for descriptors in DESCRIPTORS {
                let order = Order { threads, descriptors, pages: plan.pages, faults: plan.faults };
                let sample = measure(order)
                    .with_context(|| format!("{threads} threads, {descriptors} descriptors"))?;
                samples.entry((threads, descriptors)).or_default().push(sample);
            }
        }
        copies.measure(plan.faults)?;
        fetched.push(fetched::measure(plan.faults)?);
        eprintln!("faults: pass {pass} of {}", plan.repetitions);
    }
    let mut rows = samples
        .iter()
        .map(|((threads, descriptors), samples)| {
            row(&row_of(*threads, *descriptors, plan.faults, samples))
        })
        .collect::<Result<Vec<Row>, _>>()?;
    let fetched = FaultsRow { way: "fetched", ..row_of(1, 1, plan.faults, &fetched) };
    let fetch_us = yardsticks::fetch_p50_us(plan.round_trips)?;
    let fault_us = number(find(&rows, 1, 1)?, "p50_us");
    let yardsticks = BTreeMap::from([
        ("copy_pages_per_s".to_owned(), copies.pages_per_s()),
        ("copy_in_batches_pages_per_s".to_owned(), copies.pages_per_s_in_batches()),
        ("fault_p50_us".to_owned(), fault_us),
        ("rustls_page_p50_us".to_owned(), fetch_us),
        ("post_copy_floor_p50_us".to_owned(), fault_us + fetch_us),
    ]);
    let mut ratios = ratios(&rows, copies.pages_per_s())?;
    ratios.insert("fetched_p50_over_floor".into(), fetched.p50_us / (fault_us + fetch_us));
    let plots = vec![plot(&rows)];
    rows.push(row(&fetched)?);
    Ok(Results { plots, ..Results::new("faults", rows, yardsticks, ratios) })
}

/// The floor of a post-copy fault in microseconds: the median fault of one thread whose pages are
/// at hand, plus the median time to fetch a page over raw rustls on loopback.
pub fn post_copy_floor_us(quick: bool) -> anyhow::Result<f64> {
    let plan = if quick { QUICK } else { USUAL };
    let order = Order { threads: 1, descriptors: 1, pages: plan.pages, faults: plan.faults };
    Ok(measure(order)?.p50_us + yardsticks::fetch_p50_us(plan.round_trips)?)
}

/// Runs a guest once.
fn measure(order: Order) -> anyhow::Result<Sample> {
    warm_up(order.faults)?;
    let mut guest = Guest::start(order)?;
    let ranges = guest.ranges()?;
    ensure!(ranges.shares() == order.descriptors, "the guest has {} shares", ranges.shares());
    let (found, handled) = handlers::while_handled(&ranges, || guest.fault())?;
    ensure!(found.wrong == 0, "{} pages had a wrong content", found.wrong);
    ensure!(
        handled.faults >= order.faults,
        "{} faults for {} pages: some pages were not missing",
        handled.faults,
        order.faults
    );
    Ok(Sample {
        faults_per_s: order.faults as f64 / found.total_s,
        mean_us: found.mean_us,
        p50_us: found.p50_us,
        p99_us: found.p99_us,
        max_us: found.max_us,
        handlers_cpu_s: handled.cpu_s,
    })
}

fn row_of(threads: usize, descriptors: usize, faults: u64, samples: &[Sample]) -> FaultsRow {
    let of = |value: fn(&Sample) -> f64| samples.iter().map(value);
    let handlers_cpu_s = median(of(|sample| sample.handlers_cpu_s));
    FaultsRow {
        way: "placed",
        threads,
        descriptors,
        faults_per_s: median(of(|sample| sample.faults_per_s)),
        faults_per_s_min: least(of(|sample| sample.faults_per_s)),
        faults_per_s_max: most(of(|sample| sample.faults_per_s)),
        mean_us: median(of(|sample| sample.mean_us)),
        p50_us: median(of(|sample| sample.p50_us)),
        p50_us_min: least(of(|sample| sample.p50_us)),
        p50_us_max: most(of(|sample| sample.p50_us)),
        p99_us: median(of(|sample| sample.p99_us)),
        max_us: most(of(|sample| sample.max_us)),
        handlers_cpu_s,
        handlers_cpu_us_per_fault: handlers_cpu_s * 1e6 / faults as f64,
        runs: samples.len(),
    }
}

fn find(rows: &[Row], threads: usize, descriptors: usize) -> anyhow::Result<&Row> {
    let is = |row: &Row, name: &str, value: usize| number(row, name) == value as f64;
    rows.iter()
        .find(|row| is(row, "threads", threads) && is(row, "descriptors", descriptors))
        .with_context(|| format!("no row for {threads} threads and {descriptors} descriptors"))
}

fn ratios(rows: &[Row], copies_per_s: f64) -> anyhow::Result<BTreeMap<String, f64>> {
    let mut ratios = BTreeMap::new();
    let column = |threads, name: &str| {
        let of = |descriptors| Ok(number(find(rows, threads, descriptors)?, name));
        DESCRIPTORS.into_iter().map(of).collect::<anyhow::Result<Vec<f64>>>()
    };
    for threads in THREADS {
        let (rates, p50s) = (column(threads, "faults_per_s")?, column(threads, "p50_us")?);
        let (one, best) = (rates[0], most(rates));
        let of_threads = |name: &str| name.replace("THREADS", &format!("{threads}_threads"));
        ratios.insert(of_threads("faults_THREADS_best_over_one_descriptor"), best / one);
        ratios.insert(of_threads("faults_THREADS_best_over_copy"), best / copies_per_s);
        let one_over_best = p50s[0] / least(p50s);
        ratios.insert(of_threads("p50_THREADS_one_descriptor_over_best"), one_over_best);
    }
    let collapse = column(64, "faults_per_s")?[0] / column(8, "faults_per_s")?[0];
    ratios.insert("faults_one_descriptor_64_threads_over_8_threads".into(), collapse);
    Ok(ratios)
}

/// Faults per second by number of descriptors, a line for each number of threads.
fn plot(rows: &[Row]) -> Curves {
    let line = |threads: usize| {
        let of_threads = rows.iter().filter(|row| number(row, "threads") == threads as f64);
        let point = |row: &Row| (number(row, "descriptors"), number(row, "faults_per_s"));
        let name = if threads == 1 { "1 thread".into() } else { format!("{threads} threads") };
        (name, of_threads.map(point).collect())
    };
    Curves {
        title: "Faults of a guest at random pages".into(),
        across: "descriptors, with a handler thread each",
        upwards: "faults/s",
        legend: Legend::UpperLeft,
        lines: THREADS.map(line).into(),
    }
}
