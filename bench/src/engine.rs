//! `engine`: guest pages per second through the engine, with 1, 2 and 4 channels, plain and TLS.
//!
//! The guest's memory is full of incompressible pages. The yardstick moves the same memory over the
//! same kind of socket, with one thread per channel and side. It does not copy, test or hash pages
//! and has no frames; with rustls, it also encrypts and decrypts. It is measured with default
//! sockets and with tuned ones, which use the engine's socket option and write size. All receivers
//! write into populated memory of the same kind, which is zeroed before each run.

mod guest;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, ensure};
use serde::Serialize;
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, whole_hash};

use crate::guest::{clear, fill_incompressible, memory, whole};
use crate::raw::{self, Sockets};
use crate::results::{Results, least, median, most, row};
use guest::Links;

const CHANNELS: [u8; 3] = [1, 2, 4];

/// The command's default. Ratios without a number in the name are for it.
const DEFAULT_CHANNELS: u8 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    RawSocket,
    TunedSocket,
    EnginePlain,
    RawRustls,
    TunedRustls,
    EngineTls,
}

impl Way {
    const ALL: [Self; 6] = [
        Self::RawSocket,
        Self::TunedSocket,
        Self::EnginePlain,
        Self::RawRustls,
        Self::TunedRustls,
        Self::EngineTls,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::RawSocket => "raw socket",
            Self::TunedSocket => "raw, tuned",
            Self::EnginePlain => "engine, plain",
            Self::RawRustls => "raw rustls",
            Self::TunedRustls => "rustls, tuned",
            Self::EngineTls => "engine, TLS",
        }
    }
}

/// A row: one method with one number of channels.
#[derive(Serialize)]
struct EngineRow {
    way: &'static str,
    channels: u8,
    pages_per_s: f64,
    mb_per_s: f64,
    total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    /// CPU time of the whole process, which has both sides.
    cpu_s: f64,
    /// CPU time of the engine's source side. Yardsticks have none.
    source_cpu_s: Option<f64>,
    /// CPU time of the engine's destination side. Yardsticks have none.
    destination_cpu_s: Option<f64>,
    runs: usize,
}

/// The cost of one run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Wall time in seconds.
    pub total_s: f64,
    /// CPU time of this process in seconds.
    pub cpu_s: f64,
    /// CPU time of the engine's source and destination, in seconds.
    pub sides_cpu_s: Option<(f64, f64)>,
}

/// Runs the benchmark. `quick` moves 32 MiB once; otherwise 1 GiB is moved five times.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let (mib, repetitions) = if quick { (32, 1) } else { (1024, 5) };
    let pages = mib << 8;
    let (source, destination) = (memory(pages)?, memory(pages)?);
    fill_incompressible(&source)?;
    let expected = whole_hash(&source)?;
    let links = Links::new()?;

    let mut samples: BTreeMap<(u8, Way), Vec<Sample>> = BTreeMap::new();
    // The first pass warms up and is not counted.
    for repetition in 0..=repetitions {
        for channels in CHANNELS {
            for way in Way::ALL {
                clear(&destination)?;
                let raw = |tls, sockets| {
                    let copied = raw::copy_here(&source, &destination, channels, tls, sockets)?;
                    // Both sides run in this process.
                    Ok(Sample { total_s: copied.total_s, cpu_s: copied.cpu_s, sides_cpu_s: None })
                };
                let engine = |tls| guest::migrate(&source, &destination, channels, &links, tls);
                let sample = match way {
                    Way::RawSocket => raw(None, Sockets::Default),
                    Way::TunedSocket => raw(None, Sockets::Tuned),
                    Way::RawRustls => raw(Some(&links.raw), Sockets::Default),
                    Way::TunedRustls => raw(Some(&links.raw), Sockets::Tuned),
                    Way::EnginePlain => engine(false),
                    Way::EngineTls => engine(true),
                }
                .with_context(|| format!("{} over {channels} channels", way.name()))?;
                ensure!(
                    whole_hash(&destination)? == expected,
                    "{} over {channels} channels: the destination's memory differs",
                    way.name()
                );
                if repetition > 0 || quick {
                    samples.entry((channels, way)).or_default().push(sample);
                }
            }
        }
        eprintln!("engine: pass {repetition} of {repetitions}");
    }
    results(&samples, pages, copy_bandwidth(&source, &destination, whole(&source))?)
}

fn results(
    samples: &BTreeMap<(u8, Way), Vec<Sample>>,
    pages: u64,
    copy_mb_per_s: f64,
) -> anyhow::Result<Results> {
    let mut rows = Vec::new();
    let mut speed = BTreeMap::new();
    for ((channels, way), samples) in samples {
        let of = |part: fn(&Sample) -> f64| median(samples.iter().map(part));
        let total_s = of(|sample| sample.total_s);
        let side = |part: fn((f64, f64)) -> f64| {
            let times: Vec<f64> =
                samples.iter().filter_map(|sample| sample.sides_cpu_s.map(part)).collect();
            (!times.is_empty()).then(|| median(times))
        };
        let ms = |time: f64| time * 1e3;
        let times = || samples.iter().map(|sample| sample.total_s);
        let mb_per_s = pages as f64 * PAGE_SIZE as f64 / total_s / 1e6;
        speed.insert((*channels, *way), mb_per_s);
        rows.push(row(&EngineRow {
            way: way.name(),
            channels: *channels,
            pages_per_s: pages as f64 / total_s,
            mb_per_s,
            total_ms: ms(total_s),
            total_ms_min: ms(least(times())),
            total_ms_max: ms(most(times())),
            cpu_s: of(|sample| sample.cpu_s),
            source_cpu_s: side(|sides| sides.0),
            destination_cpu_s: side(|sides| sides.1),
            runs: samples.len(),
        })?);
    }
    let mut ratios = BTreeMap::new();
    let mut yardsticks = BTreeMap::from([("memory_copy_mb_per_s".to_owned(), copy_mb_per_s)]);
    for channels in CHANNELS {
        let of = |way| speed.get(&(channels, way)).copied().unwrap_or(f64::NAN);
        for (name, way, limit) in [
            ("plain_of_raw_socket", Way::EnginePlain, Way::RawSocket),
            ("plain_of_tuned_raw_socket", Way::EnginePlain, Way::TunedSocket),
            ("tls_of_raw_rustls", Way::EngineTls, Way::RawRustls),
            ("tls_of_tuned_raw_rustls", Way::EngineTls, Way::TunedRustls),
        ] {
            let ratio = of(way) / of(limit);
            ratios.insert(format!("{name}_{channels}_channels"), ratio);
            if channels == DEFAULT_CHANNELS {
                ratios.insert(name.into(), ratio);
            }
        }
        yardsticks.insert(format!("raw_socket_{channels}_channels_mb_per_s"), of(Way::RawSocket));
        yardsticks.insert(format!("raw_rustls_{channels}_channels_mb_per_s"), of(Way::RawRustls));
    }
    Ok(Results::new("engine", rows, yardsticks, ratios))
}

/// Copies the memory once with one thread, through a buffer that stays in the cache. This is the
/// least work for an engine that reads a page before it sends it.
pub fn copy_bandwidth(
    source: &GuestMemory,
    destination: &GuestMemory,
    whole: PageRun,
) -> anyhow::Result<f64> {
    let mut buffer = vec![0; 64 * PAGE_SIZE];
    let begun = Instant::now();
    for first in (0..whole.pages).step_by(64) {
        let run = PageRun { first, pages: (whole.pages - first).min(64), ..whole };
        let part = &mut buffer[..run.pages as usize * PAGE_SIZE];
        source.copy_out(run, part)?;
        destination.copy_in(run, part)?;
    }
    Ok(whole.pages as f64 * PAGE_SIZE as f64 / begun.elapsed().as_secs_f64() / 1e6)
}
