//! `dirty-log`: what a harvest costs, in cycles of the time stamp counter, with each log that there is:
//! the three published ways, `vm-memory`'s bitmap, KVM's three, and userfaultfd.
//!
//! Three tables. `gui` and `live` have the published slots: a display of 32 KiB that is redrawn beside one
//! that is not, and a guest of 4 GB under a loop that writes 1 GB. `density` has slots of 32 KiB and 4 GiB,
//! from clean to wholly dirty. KVM's logs and userfaultfd are written by a real guest; the software logs by
//! threads that mark what they would have written.

mod display;
mod guest;
mod mark;
mod software;
mod subject;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use plotters::prelude::SeriesLabelPosition;
use serde::Serialize;
use vmferry_dirty::SoftwareWay;

use self::guest::{GuestLog, GuestSubject};
use self::software::{AtomicSubject, SoftwareSubject};
use self::subject::{Sample, Subject, Unit};
use crate::bitmap::pattern::{Pattern, bitmap};
use crate::machine::clock_cycles;
use crate::plot::{Plot, number};
use crate::results::{Results, Row, median, row};

const KIB_32: u64 = 32 << 10;
const GIB_4: u64 = 4 << 30;

/// The published slots of a guest that migrates, in bytes.
const LIVE: [u64; 9] =
    [655_360, 3_757_047_808, 637_534_208, 131_072, 131_072, 131_072, 16_777_216, KIB_32, KIB_32];

/// The slot of these that the loop writes, and how much of it.
const LOOP_SLOT: usize = 1;
const LOOP_BYTES: u64 = 1 << 30;

#[derive(Serialize)]
struct LogRow {
    table: &'static str,
    slot: String,
    len: u64,
    dirty: String,
    log: &'static str,
    /// The call by which a harvest gets what is dirty.
    call_cycles: f64,
    call_cycles_min: f64,
    call_cycles_max: f64,
    /// Protecting it again, where that is not part of the call; of the ring, what the vCPUs' threads have
    /// taken from it when it was full.
    protect_cycles: f64,
    /// Going through the runs of dirty pages, and whatever is left to be taken.
    traverse_cycles: f64,
    pages: u64,
    /// Each call in order, as published.
    calls: String,
}

/// All samples of a row.
#[derive(Default)]
struct Samples(Vec<Sample>);

impl Samples {
    fn median_of(&self, part: impl Fn(&Sample) -> u64) -> f64 {
        median(self.0.iter().map(|sample| part(sample) as f64).collect())
    }

    fn call(&self) -> f64 {
        self.median_of(|sample| sample.call)
    }

    fn whole(&self) -> f64 {
        self.median_of(|sample| sample.call + sample.protect + sample.traverse)
    }

    fn row(&self, table: &'static str, unit: &Unit, dirty: &str, log: &'static str) -> LogRow {
        let calls: Vec<f64> = self.0.iter().map(|sample| sample.call as f64).collect();
        LogRow {
            table,
            slot: unit.slot.clone(),
            len: unit.bytes,
            dirty: dirty.to_owned(),
            log,
            call_cycles: self.call(),
            call_cycles_min: calls.iter().copied().fold(f64::INFINITY, f64::min),
            call_cycles_max: calls.iter().copied().fold(0.0, f64::max),
            protect_cycles: self.median_of(|sample| sample.protect),
            traverse_cycles: self.median_of(|sample| sample.traverse),
            pages: self.median_of(|sample| sample.pages) as u64,
            calls: calls.iter().map(|call| format!("{call:.0}")).collect::<Vec<_>>().join(" "),
        }
    }
}

/// The logs that are marked, for slots of these lengths in bytes.
fn marked(slots: &[u64]) -> Vec<Box<dyn Subject>> {
    let mut subjects: Vec<Box<dyn Subject>> = SoftwareSubject::all(slots);
    subjects.push(Box::new(AtomicSubject::new(slots)));
    subjects
}

/// The logs of a real guest with slots of these lengths in bytes, those that this machine has.
fn guests(slots: &[u64]) -> anyhow::Result<Vec<Box<dyn Subject>>> {
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    let memory = guest::memory(slots)?;
    for log in GuestLog::ALL {
        match GuestSubject::new(log, &memory) {
            Ok(subject) => subjects.push(Box::new(subject)),
            Err(error) => eprintln!("dirty-log: without {}: {error:#}", log.name()),
        }
    }
    Ok(subjects)
}

fn all(slots: &[u64]) -> anyhow::Result<Vec<Box<dyn Subject>>> {
    let mut subjects = marked(slots);
    subjects.extend(guests(slots)?);
    Ok(subjects)
}

/// Runs it. `quick` has small slots, once.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let mut rows = gui(if quick { 2 } else { 5 })?;
    rows.extend(display(if quick { 2 } else { 20 })?);
    rows.extend(live(quick)?);
    let mut ratios = BTreeMap::new();
    let large = if quick { 16 << 20 } else { GIB_4 };
    rows.extend(density(&[("32k", KIB_32), ("4g", large)], quick, &mut ratios)?);
    rows.extend(lengths(if quick { 20 } else { 2000 }, quick, &mut ratios)?);
    let mark = mark::measure(if quick { 1 << 18 } else { 1 << 22 }, if quick { 1 } else { 7 });
    ratios.insert("mark_over_fetch_or".into(), mark.two_threads);
    ratios.insert("mark_over_fetch_or_one_thread".into(), mark.one_thread);
    let yardsticks = BTreeMap::from([
        ("fetch_or_two_threads_ns".into(), mark.fetch_or_ns),
        ("clock_cycles_taken_off".into(), clock_cycles() as f64),
    ]);
    let plots = plots(&rows, large);
    Ok(Results { plots, ..Results::new("dirty-log", rows, yardsticks, ratios) })
}

/// The published display: slot 7 is redrawn between two harvests, slot 8 is not.
fn gui(rounds: usize) -> anyhow::Result<Vec<Row>> {
    let pages: Vec<u64> = (0..KIB_32 / 4096).collect();
    let mut rows = Vec::new();
    for mut subject in all(&[KIB_32, KIB_32])? {
        let mut samples: BTreeMap<usize, Samples> = BTreeMap::new();
        subject.start()?;
        for round in 0..=rounds {
            subject.write(0, &pages)?;
            for index in 0..subject.units().len() {
                let sample = subject.harvest(index)?;
                // The first one warms up.
                if round > 0 {
                    samples.entry(index).or_default().0.push(sample);
                }
            }
        }
        subject.stop()?;
        for (index, samples) in samples {
            let mut unit = subject.units()[index].clone();
            if let Ok(number) = unit.slot.parse::<usize>() {
                unit.slot = (number + 7).to_string();
            }
            let dirty = ["redrawn", "clean"][index];
            rows.push(row(&samples.row("gui", &unit, dirty, subject.name()))?);
        }
    }
    eprintln!("dirty-log: gui done");
    Ok(rows)
}

/// The same display as a guest of the microvm has it.
fn display(rounds: usize) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for log in GuestLog::ALL {
        let harvests = match display::measure(log, rounds) {
            Ok(harvests) => harvests,
            Err(error) => {
                eprintln!("dirty-log: no display with {}: {error:#}", log.name());
                continue;
            }
        };
        let of_slots = harvests.len() == 2;
        for (samples, (slot, dirty)) in
            harvests.into_iter().zip([("frame buffer", "redrawn"), ("beside it", "clean")])
        {
            let slot = if of_slots { slot } else { "all" };
            let unit = Unit { slot: slot.into(), bytes: KIB_32 };
            rows.push(row(&Samples(samples).row("display", &unit, dirty, log.name()))?);
        }
    }
    eprintln!("dirty-log: display done");
    Ok(rows)
}

/// The published migration: a loop writes 1 GB of slot 1 all the time.
fn live(quick: bool) -> anyhow::Result<Vec<Row>> {
    let slots = if quick { vec![655_360, 16 << 20, KIB_32] } else { LIVE.to_vec() };
    let pages = (slots[LOOP_SLOT].min(LOOP_BYTES)) / 4096;
    let (rounds, interval) = if quick { (1, 20) } else { (3, 700) };
    let mut rows = Vec::new();
    for mut subject in all(&slots)? {
        let name = subject.name();
        let units = subject.units().to_vec();
        let mut samples: Vec<Samples> = units.iter().map(|_| Samples::default()).collect();
        subject.start()?;
        let mut round = |subject: &mut dyn Subject| {
            for _ in 0..rounds {
                std::thread::sleep(Duration::from_millis(interval));
                for (index, samples) in samples.iter_mut().enumerate() {
                    samples.0.push(subject.harvest(index)?);
                }
            }
            Ok(())
        };
        subject.write_for_ever(LOOP_SLOT, pages, &mut round)?;
        subject.stop()?;
        for (index, (unit, samples)) in units.iter().zip(samples).enumerate() {
            let dirty = if index == LOOP_SLOT || units.len() == 1 { "write loop" } else { "clean" };
            rows.push(row(&samples.row("live", unit, dirty, name))?);
        }
    }
    eprintln!("dirty-log: live done");
    Ok(rows)
}

/// The call that switches a clean slot, by the slot's length: by turns, and each after the same work has
/// taken the slot out of the nearest cache, as everything that comes between two harvests does.
fn lengths(
    passes: usize,
    quick: bool,
    ratios: &mut BTreeMap<String, f64>,
) -> anyhow::Result<Vec<Row>> {
    let slots: &[u64] = if quick { &[KIB_32, GIB_4] } else { &[KIB_32, 16 << 20, GIB_4, 1 << 40] };
    let mut subject = SoftwareSubject::new(SoftwareWay::Switch, slots);
    subject.start()?;
    let work: Vec<u64> = vec![1; (256 << 10) / 8];
    let mut samples: Vec<Samples> = slots.iter().map(|_| Samples::default()).collect();
    for _ in 0..passes {
        for (unit, samples) in samples.iter_mut().enumerate() {
            std::hint::black_box(std::hint::black_box(&work).iter().sum::<u64>());
            samples.0.push(subject.harvest(unit)?);
        }
    }
    subject.stop()?;
    let call =
        |bytes| slots.iter().position(|slot| *slot == bytes).map(|unit| samples[unit].call());
    let over = call(GIB_4).zip(call(KIB_32)).context("no such lengths")?;
    ratios.insert("switch_clean_4g_over_32k".into(), over.0 / over.1);
    let rows = subject.units().iter().zip(&samples).map(|(unit, samples)| {
        let mut columns = samples.row("length", unit, "clean", "switch");
        // Thousands.
        columns.calls.clear();
        row(&columns)
    });
    rows.collect()
}

/// How often a guest's log is harvested at a density: writing it takes a guest seconds.
fn repetitions(pattern: Pattern, large: bool, quick: bool) -> usize {
    match pattern {
        _ if quick => 1,
        _ if !large => 15,
        Pattern::Clean => 7,
        Pattern::Full => 1,
        _ if pattern.percent() > 5.0 => 2,
        _ => 5,
    }
}

/// So many harvests of a marked log.
const MARKED_REPETITIONS: usize = 25;

/// Samples by the slot's name and density, and the log.
type Kept = BTreeMap<(String, &'static str), Samples>;

/// One slot alone, at each density.
fn density(
    slots: &[(&str, u64)],
    quick: bool,
    ratios: &mut BTreeMap<String, f64>,
) -> anyhow::Result<Vec<Row>> {
    const PATTERNS: [Pattern; 6] = [
        Pattern::Clean,
        Pattern::Clustered(0.01),
        Pattern::Scattered(0.01),
        Pattern::Clustered(0.1),
        Pattern::Scattered(0.1),
        Pattern::Full,
    ];
    let mut rows = Vec::new();
    let mut kept = Kept::new();
    for pattern in PATTERNS {
        // All lengths together, so that a slot's length is all that differs.
        let mut runs: Vec<Run> = Vec::new();
        for &(name, bytes) in slots {
            let repetitions = if quick { 1 } else { MARKED_REPETITIONS };
            runs.extend(
                marked(&[bytes]).into_iter().map(|s| Run::new(s, name, pattern, repetitions)),
            );
        }
        harvest(&mut runs, &mut rows, &mut kept)?;
    }
    for &(name, bytes) in slots {
        let mut subjects = guests(&[bytes])?;
        for pattern in PATTERNS {
            let repetitions = repetitions(pattern, bytes > KIB_32, quick);
            let mut runs: Vec<Run> = subjects
                .drain(..)
                .map(|subject| Run::new(subject, name, pattern, repetitions))
                .collect();
            harvest(&mut runs, &mut rows, &mut kept)?;
            subjects.extend(runs.into_iter().map(|run| run.subject));
            eprintln!("dirty-log: density of {name}, {:.0} %, done", pattern.percent());
        }
    }
    add_ratios(ratios, &kept)?;
    Ok(rows)
}

/// A whole harvest of the large slot, by density.
fn plots(rows: &[Row], large: u64) -> Vec<Plot> {
    let plot = |pattern: &str| {
        let title = format!("A harvest of a slot of {} GiB, {pattern} pages", large >> 30);
        let empty = Plot {
            title,
            across: "dirty, % (clean at the left)",
            upwards: "cycles",
            legend: SeriesLabelPosition::LowerRight,
            lines: Vec::new(),
        };
        let is = |row: &Row, name: &str, value: &str| row.get(name).is_some_and(|v| v == value);
        let dirty = |row: &Row| {
            let text = row.get("dirty").and_then(|dirty| dirty.as_str()).unwrap_or_default();
            let percent = text.split(' ').next().and_then(|percent| percent.parse().ok());
            (percent.unwrap_or(0.0), text.contains('d') && !text.contains(pattern))
        };
        let wanted = |row: &Row| {
            is(row, "table", "density") && number(row, "len") == large as f64 && !dirty(row).1
        };
        empty.of_rows(rows, "log", 0.1, wanted, |row| {
            let parts = ["call_cycles", "protect_cycles", "traverse_cycles"];
            (dirty(row).0, parts.map(|part| number(row, part)).iter().sum())
        })
    };
    vec![plot("clustered"), plot("scattered")]
}

/// A log at one density.
struct Run {
    subject: Box<dyn Subject>,
    name: String,
    pages: Vec<u64>,
    dirty: String,
    repetitions: usize,
    samples: Samples,
}

impl Run {
    fn new(subject: Box<dyn Subject>, name: &str, pattern: Pattern, repetitions: usize) -> Self {
        let dirty = format!("{:.0} % {}", pattern.percent(), pattern.name()).trim_end().to_owned();
        let pages = bitmap(subject.units()[0].bytes / 4096, pattern, 1);
        let pages = pages.runs().flat_map(|(first, count)| first..first + count).collect();
        Self { subject, name: name.into(), pages, dirty, repetitions, samples: Samples::default() }
    }
}

/// Interleaved: one harvest of each, then the next of each. The first one of each warms up and does not
/// count, unless it is the only one.
fn harvest(runs: &mut [Run], rows: &mut Vec<Row>, kept: &mut Kept) -> anyhow::Result<()> {
    runs.iter_mut().try_for_each(|run| run.subject.start())?;
    let passes = runs.iter().map(|run| run.repetitions).max().unwrap_or(0) + 1;
    for pass in 0..passes {
        for run in &mut *runs {
            let warm_up = usize::from(run.repetitions > 1);
            if pass >= run.repetitions + warm_up {
                continue;
            }
            run.subject.write(0, &run.pages)?;
            let sample = run.subject.harvest(0)?;
            ensure!(
                sample.pages >= run.pages.len() as u64,
                "{} has found {} of {} pages",
                run.subject.name(),
                sample.pages,
                run.pages.len()
            );
            if pass >= warm_up {
                run.samples.0.push(sample);
            }
        }
    }
    for run in runs {
        run.subject.stop()?;
        let log = run.subject.name();
        rows.push(row(&run.samples.row("density", &run.subject.units()[0], &run.dirty, log))?);
        let samples = std::mem::take(&mut run.samples);
        kept.insert((format!("{} {}", run.name, run.dirty), log), samples);
    }
    Ok(())
}

/// A harvest is compared whole where `vm-memory`'s is, and the published call alone where the published
/// ones are. Where nothing is said of how the dirty pages lie they lie in runs, as a loop that writes leaves
/// them.
fn add_ratios(ratios: &mut BTreeMap<String, f64>, samples: &Kept) -> anyhow::Result<()> {
    let of = |case: &str, log: &'static str| {
        samples.get(&(case.to_owned(), log)).with_context(|| format!("no `{case}` of {log}"))
    };
    let call = |case: &str, log| of(case, log).map(Samples::call);
    let whole = |case: &str, log| of(case, log).map(Samples::whole);
    let (clean, one, scattered) = ("4g 0 %", "4g 1 % clustered", "4g 1 % scattered");
    let org = |case| Ok::<_, anyhow::Error>(call(case, "get.org")? / call(case, "switch")?);
    let opt = |case| Ok::<_, anyhow::Error>(call(case, "get.opt")? / call(case, "switch")?);
    let atomic =
        |case| Ok::<_, anyhow::Error>(whole(case, "AtomicBitmap")? / whole(case, "switch")?);
    for (name, ratio) in [
        ("get_org_over_switch_clean_4g", org(clean)?),
        ("get_opt_over_switch_1pct_4g", opt(one)?),
        ("atomic_bitmap_over_switch_clean_4g", atomic(clean)?),
        ("atomic_bitmap_over_switch_1pct_4g", atomic(one)?),
        ("atomic_bitmap_over_switch_1pct_scattered_4g", atomic(scattered)?),
    ] {
        ratios.insert(name.to_owned(), ratio);
    }
    Ok(())
}
