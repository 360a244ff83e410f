//! `bitmap`: traversal of dirty bitmaps for guests of 32 KiB to 1 TiB, with 0 to 100 % dirty pages,
//! clustered and scattered.
//!
//! Four methods are compared: by byte and by word as published, flat with SIMD, and with a summary.
//! Memory bandwidth is measured in the same run as the limit.

pub mod baseline;
mod limit;
mod migration;
pub mod pattern;

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use anyhow::ensure;
use serde::Serialize;
use vmferry_memory::PageBitmap;
use vmferry_memory::traverse::flat_runs;
use vmferry_report::{Curves, Legend};

use self::pattern::{Pattern, bitmap};
use crate::results::{Results, Row, curves_of, least, median, most, number, row};

/// A traversal method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Byte,
    Word,
    Simd,
    Summary,
}

impl Way {
    const ALL: [Self; 4] = [Self::Byte, Self::Word, Self::Simd, Self::Summary];

    fn name(self) -> &'static str {
        match self {
            Self::Byte => "byte",
            Self::Word => "word",
            Self::Simd => "flat SIMD (vmferry)",
            Self::Summary => "summary (vmferry)",
        }
    }
}

#[derive(Serialize)]
struct BitmapRow {
    guest: &'static str,
    dirty_percent: f64,
    pattern: &'static str,
    way: &'static str,
    us: f64,
    us_min: f64,
    us_max: f64,
    byte_over_this: f64,
    runs: usize,
}

/// A guest size and a pattern of dirty pages.
#[derive(Clone, Copy)]
struct Case {
    guest: &'static str,
    pages: u64,
    pattern: Pattern,
}

const TIB_PAGES: u64 = 1 << 28;

const GUESTS: [(&str, u64); 5] = [
    ("32 KiB", 8),
    ("512 MiB", 1 << 17),
    ("4 GiB", 1 << 20),
    ("64 GiB", 1 << 24),
    ("1 TiB", TIB_PAGES),
];

/// The guest size that the ratios use. It is the size of the guest in the published migration.
const RATIO_GUEST: &str = "4 GiB";

/// Runs the benchmark. `quick` measures each case once and skips the largest guests.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let guests = if quick { &GUESTS[..3] } else { &GUESTS[..] };
    let repetitions = if quick { 1 } else { 7 };
    let mut rows = Vec::new();
    let mut yardsticks = BTreeMap::new();
    let mut ratios = BTreeMap::new();
    for &(guest, pages) in guests {
        for pattern in Pattern::ALL {
            let case = Case { guest, pages, pattern };
            let times = measure(case, repetitions)?;
            add_ratios(&mut ratios, case, &times);
            let byte = median(times[&Way::Byte].clone());
            for (way, samples) in &times {
                rows.push(row(&row_of(case, *way, samples, byte))?);
            }
        }
        eprintln!("bitmap: {guest} done");
    }
    let limit = limit::measure(if quick { 1 << 22 } else { TIB_PAGES }, repetitions)?;
    let flat_gb_per_s = limit.flat_clean_gb_per_s;
    yardsticks.insert("memory_read_gb_per_s".into(), limit.read_gb_per_s);
    yardsticks.insert("flat_simd_clean_gb_per_s".into(), flat_gb_per_s);
    yardsticks.insert("union_gb_per_s".into(), limit.union_gb_per_s);
    yardsticks.insert("subtract_gb_per_s".into(), limit.subtract_gb_per_s);
    yardsticks.insert("memory_or_gb_per_s".into(), limit.or_gb_per_s);
    ratios.insert("flat_simd_of_memory_bandwidth_1tib".into(), flat_gb_per_s / limit.read_gb_per_s);
    ratios.insert("union_of_memory_bandwidth".into(), limit.union_gb_per_s / limit.or_gb_per_s);
    let plots = plots(&rows);
    // The migrations have other columns than the traversals, so they get their own table.
    let migrations = migration::measure(quick)?;
    let more = BTreeMap::from([("migrations", migrations)]);
    Ok(Results { more, plots, ..Results::new("bitmap", rows, yardsticks, ratios) })
}

/// Plots of the traversal time by guest size and by dirty percentage.
fn plots(rows: &[Row]) -> Vec<Curves> {
    let is = |row: &Row, name: &str, value: &str| row.get(name).is_some_and(|v| v == value);
    let gib = |row: &Row| {
        let pages = GUESTS.iter().find(|(guest, _)| is(row, "guest", guest));
        pages.map_or(0.0, |(_, pages)| *pages as f64 / (1 << 18) as f64)
    };
    let plot = |title, across, lines| Curves {
        title,
        across,
        upwards: "us",
        legend: Legend::UpperLeft,
        lines,
    };
    let is_clean = |row: &Row| number(row, "dirty_percent") == 0.0;
    let by_guest = curves_of(rows, "way", 0.0, is_clean, |row| (gib(row), number(row, "us")));
    let by_density = |pattern: &str| {
        let wanted = |row: &Row| {
            is(row, "guest", RATIO_GUEST) && (is(row, "pattern", pattern) || is(row, "pattern", ""))
        };
        let point = |row: &Row| (number(row, "dirty_percent"), number(row, "us"));
        let title = format!("A guest of {RATIO_GUEST}, {pattern} pages");
        plot(title, "dirty, % (clean at the left)", curves_of(rows, "way", 0.001, wanted, point))
    };
    let by_guest = plot("A clean bitmap, by the guest's size".into(), "guest, GiB", by_guest);
    vec![by_guest, by_density("clustered"), by_density("scattered")]
}

type Times = BTreeMap<Way, Vec<f64>>;

/// Checksum of a traversal: the number of dirty pages and the sum of their page numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Found {
    pages: u64,
    sum: u64,
}

impl Found {
    #[inline]
    fn page(&mut self, page: u64) {
        self.pages += 1;
        self.sum = self.sum.wrapping_add(page);
    }

    #[inline]
    fn run(&mut self, first: u64, count: u64) {
        self.pages += count;
        let sum = count.wrapping_mul(first + first + count - 1) / 2;
        self.sum = self.sum.wrapping_add(sum);
    }
}

/// Total words in the bitmaps of one case. With several bitmaps, the branch predictor cannot learn
/// the positions of the set bits, as it would when one small bitmap is traversed repeatedly.
const WORDS_TOGETHER: u64 = 1 << 18;

/// Measures the seconds per traversal for each method. The methods are interleaved.
fn measure(case: Case, repetitions: usize) -> anyhow::Result<Times> {
    let turns = (WORDS_TOGETHER / case.pages.div_ceil(64)).clamp(1, 128);
    let kept: Vec<PageBitmap> =
        (0..turns).map(|seed| bitmap(case.pages, case.pattern, seed)).collect();
    let words: Vec<Vec<u64>> = kept.iter().map(|kept| kept.words().to_vec()).collect();
    let bytes_of = |words: &Vec<u64>| words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let bytes: Vec<Vec<u8>> = words.iter().map(bytes_of).collect();
    let traverse = |way, turn: usize| {
        let mut found = Found::default();
        match way {
            Way::Byte => baseline::by_byte(black_box(&bytes[turn]), |page| found.page(page)),
            Way::Word => baseline::by_word(black_box(&words[turn]), |page| found.page(page)),
            Way::Simd => {
                let runs = flat_runs(black_box(&words[turn]));
                runs.for_each(|(first, count)| found.run(first, count));
            }
            Way::Summary => {
                let runs = black_box(&kept[turn]).runs();
                runs.for_each(|(first, count)| found.run(first, count));
            }
        }
        found
    };
    let expected: Vec<Found> = (0..kept.len()).map(|turn| traverse(Way::Word, turn)).collect();
    let mut times = Times::new();
    for _ in 0..repetitions {
        for way in Way::ALL {
            let mut turn = 0;
            let took = time(|| {
                turn = (turn + 1) % expected.len();
                traverse(way, turn) == expected[turn]
            })?;
            times.entry(way).or_default().push(took);
        }
    }
    Ok(times)
}

/// Returns the seconds per call. The call is repeated until the clock's own cost is negligible.
fn time(mut call: impl FnMut() -> bool) -> anyhow::Result<f64> {
    let mut calls = 1_u32;
    loop {
        let begun = Instant::now();
        for _ in 0..calls {
            ensure!(call(), "a traversal found the wrong pages");
        }
        let took = begun.elapsed().as_secs_f64();
        if took > 500e-6 || calls >= 1 << 20 {
            return Ok(took / f64::from(calls));
        }
        calls *= 4;
    }
}

fn row_of(case: Case, way: Way, samples: &[f64], byte: f64) -> BitmapRow {
    let us = median(samples.to_vec());
    BitmapRow {
        guest: case.guest,
        dirty_percent: case.pattern.percent(),
        pattern: case.pattern.name(),
        way: way.name(),
        us: us * 1e6,
        us_min: least(samples.iter().copied()) * 1e6,
        us_max: most(samples.iter().copied()) * 1e6,
        byte_over_this: byte / us,
        runs: samples.len(),
    }
}

/// vmferry's traversal is the summary, which the engine uses for the bitmaps it keeps.
fn add_ratios(ratios: &mut BTreeMap<String, f64>, case: Case, times: &Times) {
    let of = |way| median(times[&way].clone());
    let best = of(Way::Summary).min(of(Way::Simd));
    if case.guest == RATIO_GUEST {
        let name = match case.pattern {
            Pattern::Clean => "clean",
            Pattern::Clustered(0.01) => "1pct_clustered",
            Pattern::Scattered(0.01) => "1pct_scattered",
            Pattern::Full => "full",
            _ => return,
        };
        ratios.insert(format!("byte_over_best_{name}"), of(Way::Byte) / best);
        ratios.insert(format!("word_over_best_{name}"), of(Way::Word) / best);
        ratios.insert(format!("byte_over_flat_{name}"), of(Way::Byte) / of(Way::Simd));
        ratios.insert(format!("word_over_flat_{name}"), of(Way::Word) / of(Way::Simd));
    }
    if case.pages == TIB_PAGES && case.pattern == Pattern::Clean {
        ratios.insert("clean_1tib_us".into(), of(Way::Summary) * 1e6);
    }
}
