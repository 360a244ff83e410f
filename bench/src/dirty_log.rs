//! `dirty-log`: the cost of a harvest in time stamp counter cycles, for each dirty log.
//!
//! The logs are the three published methods, `vm-memory`'s bitmap, KVM's three logs, and
//! userfaultfd.
//!
//! The tables `gui` and `live` have the published slots: a display of 32 KiB that is redrawn next
//! to one that is not, and a guest of 4 GB in which a loop writes 1 GB. `display` is the same
//! display in a real guest. `length` has clean slots from 32 KiB to 1 TiB. `density` has slots of
//! 32 KiB and 4 GiB, from clean to fully dirty. A real guest writes for KVM's logs and userfaultfd.
//! For the software logs, threads mark the pages that they would have written.

mod density;
mod display;
mod guest;
mod mark;
mod samples;
mod software;
mod subject;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use vmferry_dirty::SoftwareWay;
use vmferry_report::{Curves, Legend};

use self::guest::{GuestLog, GuestSubject};
use self::samples::Samples;
use self::software::{AtomicSubject, SoftwareSubject};
use self::subject::{Subject, Unit};
use crate::machine::clock_cycles;
use crate::results::{Results, Row, curves_of, number, row};

const KIB_32: u64 = 32 << 10;
const GIB_4: u64 = 4 << 30;

/// Slot sizes of the published guest that migrates, in bytes.
const LIVE: [u64; 9] =
    [655_360, 3_757_047_808, 637_534_208, 131_072, 131_072, 131_072, 16_777_216, KIB_32, KIB_32];

/// The slot that the loop writes, and the bytes it writes there.
const LOOP_SLOT: usize = 1;
const LOOP_BYTES: u64 = 1 << 30;

/// The software logs, for slots of these lengths in bytes.
fn software_logs(slots: &[u64]) -> Vec<Box<dyn Subject>> {
    let mut subjects: Vec<Box<dyn Subject>> = SoftwareSubject::all(slots);
    subjects.push(Box::new(AtomicSubject::new(slots)));
    subjects
}

/// The logs of a real guest that work on this machine, for slots of these lengths in bytes.
fn guest_logs(slots: &[u64]) -> anyhow::Result<Vec<Box<dyn Subject>>> {
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    let memory = guest::memory(slots)?;
    for log in GuestLog::ALL {
        match GuestSubject::new(log, &memory) {
            Ok(subject) => subjects.push(Box::new(subject)),
            Err(error) => eprintln!("dirty-log: {} is not available: {error:#}", log.name()),
        }
    }
    Ok(subjects)
}

fn all_logs(slots: &[u64]) -> anyhow::Result<Vec<Box<dyn Subject>>> {
    let mut subjects = software_logs(slots);
    subjects.extend(guest_logs(slots)?);
    Ok(subjects)
}

/// Runs the benchmark. `quick` uses small slots and runs once.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let mut rows = gui(if quick { 2 } else { 5 })?;
    rows.extend(display(if quick { 2 } else { 20 })?);
    rows.extend(live(quick)?);
    let mut ratios = BTreeMap::new();
    let large = if quick { 16 << 20 } else { GIB_4 };
    rows.extend(density::measure(&[("32k", KIB_32), ("4g", large)], quick, &mut ratios)?);
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
    for mut subject in all_logs(&[KIB_32, KIB_32])? {
        let mut samples: BTreeMap<usize, Samples> = BTreeMap::new();
        subject.start()?;
        for round in 0..=rounds {
            subject.write(0, &pages)?;
            for index in 0..subject.units().len() {
                let sample = subject.harvest(index)?;
                // The first round warms up and is not counted.
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

/// The same display, drawn by a guest in a microvm.
fn display(rounds: usize) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for log in GuestLog::ALL {
        let harvests = match display::measure(log, rounds) {
            Ok(harvests) => harvests,
            Err(error) => {
                eprintln!("dirty-log: display with {} failed: {error:#}", log.name());
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

/// The published migration: a loop keeps writing 1 GB of slot 1.
fn live(quick: bool) -> anyhow::Result<Vec<Row>> {
    let slots = if quick { vec![655_360, 16 << 20, KIB_32] } else { LIVE.to_vec() };
    let pages = (slots[LOOP_SLOT].min(LOOP_BYTES)) / 4096;
    let (rounds, interval) = if quick { (1, 20) } else { (3, 700) };
    let mut rows = Vec::new();
    for mut subject in all_logs(&slots)? {
        let name = subject.name();
        let units = subject.units().to_vec();
        let mut samples: Vec<Samples> = units.iter().map(|_| Samples::default()).collect();
        subject.start()?;
        let mut round = |subject: &mut dyn Subject| {
            for _ in 0..rounds {
                // This sleep is one round of a migration, during which the loop writes.
                std::thread::sleep(Duration::from_millis(interval));
                for (index, samples) in samples.iter_mut().enumerate() {
                    samples.0.push(subject.harvest(index)?);
                }
            }
            Ok(())
        };
        subject.write_during(LOOP_SLOT, pages, &mut round)?;
        subject.stop()?;
        for (index, (unit, samples)) in units.iter().zip(samples).enumerate() {
            let dirty = if index == LOOP_SLOT || units.len() == 1 { "write loop" } else { "clean" };
            rows.push(row(&samples.row("live", unit, dirty, name))?);
        }
    }
    eprintln!("dirty-log: live done");
    Ok(rows)
}

/// Measures the call that switches a clean slot's bitmap, by slot length. The slots take turns.
/// Before each call the same work evicts the slot from the L1 cache, as other work between two
/// harvests would.
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
    let over = call(GIB_4).zip(call(KIB_32)).context("a slot length was not measured")?;
    ratios.insert("switch_clean_4g_over_32k".into(), over.0 / over.1);
    let rows = subject.units().iter().zip(&samples).map(|(unit, samples)| {
        let mut columns = samples.row("length", unit, "clean", "switch");
        // There are thousands of calls; the row would be too long.
        columns.calls.clear();
        row(&columns)
    });
    rows.collect()
}

/// Plots of a whole harvest of the large slot, by dirty percentage.
fn plots(rows: &[Row], large: u64) -> Vec<Curves> {
    let plot = |pattern: &str| {
        let is = |row: &Row, name: &str, value: &str| row.get(name).is_some_and(|v| v == value);
        let dirty = |row: &Row| {
            let text = row.get("dirty").and_then(|dirty| dirty.as_str()).unwrap_or_default();
            let percent = text.split(' ').next().and_then(|percent| percent.parse().ok());
            (percent.unwrap_or(0.0), text.contains('d') && !text.contains(pattern))
        };
        let wanted = |row: &Row| {
            is(row, "table", "density") && number(row, "len") == large as f64 && !dirty(row).1
        };
        let point = |row: &Row| {
            let parts = ["call_cycles", "protect_cycles", "traverse_cycles"];
            (dirty(row).0, parts.map(|part| number(row, part)).iter().sum())
        };
        Curves {
            title: format!("A harvest of a slot of {} GiB, {pattern} pages", large >> 30),
            across: "dirty, % (clean at the left)",
            upwards: "cycles",
            legend: Legend::LowerRight,
            lines: curves_of(rows, "log", 0.1, wanted, point),
        }
    };
    vec![plot("clustered"), plot("scattered")]
}
