//! A guest that changes a few bytes of many pages all the time, under a bandwidth cap. It dirties
//! whole pages faster than the link carries them, so its migration is refused. With deltas it is
//! handed over.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use fastrand::Rng;
use parking_lot::Mutex;
use serde::Serialize;
use vmferry::config::RoundLimit;
use vmferry::config::compression::CompressionWay;
use vmferry::{MigrateError, VmError};
use vmferry_codec::Method;
use vmferry_dirty::UffdLog;
use vmferry_memory::{GuestMemory, PAGE_SIZE};

use super::content::{Content, Pool};
use super::guest::fill;
use super::run::{Deltas, Setup, migrate_while};
use crate::guest::{Behavior, MemoryGuest, memory};

/// The parameters of the test.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Pages that the guest changes.
    pub hot_pages: u64,
    /// Pages that the guest does not change.
    pub cold_pages: u64,
    /// The bandwidth cap in bytes per second.
    pub cap: u64,
    /// The number of rounds after which the migration is refused.
    pub max_rounds: u32,
}

/// Time in which the guest changes every hot page once.
const PERIOD: Duration = Duration::from_millis(250);

/// Bytes that change in each place, and the number of places per page.
const BYTES: usize = 16;
const PLACES: u64 = 4;

/// A row: one compression method.
#[derive(Debug, Serialize)]
pub struct ConvergeRow {
    /// The method.
    pub way: String,
    /// Rounds, including the last one.
    pub rounds: usize,
    /// Bytes on the wire.
    pub sent_mb: f64,
    /// Bytes of the last round while the guest was running.
    pub last_round_mb: f64,
    /// The predicted downtime.
    pub predicted_ms: f64,
    /// The measured downtime.
    pub downtime_ms: f64,
    /// The total time.
    pub total_ms: f64,
    /// The outcome.
    pub outcome: &'static str,
}

/// Migrates once with each method.
///
/// # Errors
/// A migration ended in another way than a handover or a refusal, or the memories differ.
pub fn measure(case: Case, directory: &Path) -> anyhow::Result<Vec<ConvergeRow>> {
    let pages = case.hot_pages + case.cold_pages;
    let pool = Pool::new(Content::Program, pages as usize * PAGE_SIZE)?;
    let (here, there) = (memory(pages)?, memory(pages)?);
    let zstd = CompressionWay::Fixed(Method::zstd(1));
    let ways = [
        (CompressionWay::Off, Deltas::Off),
        (zstd, Deltas::Off),
        (CompressionWay::Auto, Deltas::On),
    ];
    let measure = |(way, deltas): (CompressionWay, Deltas)| {
        fill(&here, &pool)?;
        one(case, &here, &there, way, deltas, directory)
            .with_context(|| format!("convergence with {way}"))
    };
    ways.into_iter().map(measure).collect()
}

fn one(
    case: Case,
    here: &GuestMemory,
    there: &GuestMemory,
    way: CompressionWay,
    deltas: Deltas,
    directory: &Path,
) -> anyhow::Result<ConvergeRow> {
    let mut setup = Setup::new(directory, Some(case.cap))?;
    setup.compress(way, deltas);
    setup.source.max_rounds = RoundLimit::new(case.max_rounds)?;
    setup.source.verify = true;
    let writer = HotPageWriter::start(here, case.hot_pages)?;
    let vm = MemoryGuest::new(here, Arc::new(UffdLog::new(here)?), writer);
    let ((), ended) = migrate_while(vm, there, setup, false, |_, _| Ok(()))?;
    let stats = &ended.stats;
    let (outcome, predicted_ms) = match &ended.error {
        None => ("handed over", stats.predicted_downtime_ms),
        Some(MigrateError::NotConverging(why)) => ("refused", why.measures.predicted_downtime_ms),
        Some(error) => anyhow::bail!("the migration failed: {error}"),
    };
    ensure!(
        stats.verify_match != Some(false),
        "the destination's memory differs from the source's"
    );
    let last = stats.rounds.iter().rev().find(|round| !round.paused);
    let name = if deltas == Deltas::On || way == CompressionWay::Off {
        way.to_string()
    } else {
        format!("{way}, no deltas")
    };
    Ok(ConvergeRow {
        way: name,
        rounds: stats.rounds.len(),
        sent_mb: stats.sent_bytes.max(stats.rounds.iter().map(|round| round.bytes).sum()) as f64
            / 1e6,
        last_round_mb: last.map_or(0.0, |round| round.bytes as f64 / 1e6),
        predicted_ms,
        downtime_ms: stats.downtime_ms,
        total_ms: stats.total_ms,
        outcome,
    })
}

/// A guest with one thread that rewrites its hot pages repeatedly.
struct HotPageWriter {
    running: Arc<Running>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Running {
    ended: AtomicBool,
    /// Whether the guest is paused. The writer holds the lock while it changes pages.
    paused: Mutex<bool>,
}

impl HotPageWriter {
    fn start(memory: &GuestMemory, hot_pages: u64) -> anyhow::Result<Self> {
        let running = Arc::new(Running::default());
        let (mine, theirs) = (memory.clone(), Arc::clone(&running));
        let thread = std::thread::Builder::new()
            .name("guest".into())
            .spawn(move || write(&mine, hot_pages, &theirs))?;
        Ok(Self { running, thread: Some(thread) })
    }
}

impl Drop for HotPageWriter {
    fn drop(&mut self) {
        self.running.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic was already reported.
            let _ = thread.join();
        }
    }
}

fn write(memory: &GuestMemory, hot_pages: u64, running: &Running) {
    // Short pieces let the guest pause at once and keep it from writing in bursts.
    const PIECES: u64 = 64;
    let mut random = Rng::with_seed(11);
    let begun = Instant::now();
    let mut done: u32 = 0;
    while !running.ended.load(Ordering::Relaxed) {
        let due = PERIOD * done / PIECES as u32;
        // The sleep sets the guest's pace: each piece is written when it is due.
        std::thread::sleep(due.saturating_sub(begun.elapsed()).max(Duration::from_micros(100)));
        let paused = running.paused.lock();
        if *paused {
            continue;
        }
        let piece = u64::from(done) % PIECES;
        for page in hot_pages * piece / PIECES..hot_pages * (piece + 1) / PIECES {
            for place in 0..PLACES {
                let within = place * 1024 + random.u64(..1024 - BYTES as u64);
                let bytes = [(); BYTES].map(|()| random.u8(..));
                if memory.write_at(page * PAGE_SIZE as u64 + within, &bytes).is_err() {
                    return;
                }
            }
        }
        done += 1;
    }
}

impl Behavior for HotPageWriter {
    fn pause(&mut self) -> Result<(), VmError> {
        // The writer holds the lock while it writes, so it has stopped when the lock is acquired.
        *self.running.paused.lock() = true;
        Ok(())
    }

    fn resume(&mut self) {
        *self.running.paused.lock() = false;
    }
}
