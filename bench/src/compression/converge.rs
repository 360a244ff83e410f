//! A guest that changes a few bytes of many pages all the time, under a cap: as it is it writes faster than
//! the link carries whole pages, and its migration is refused; with deltas it is handed over.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Serialize;
use vmferry::config::compression::{CompressionConfig, CompressionWay, WhenBusy};
use vmferry::{GuestDescription, MigrateError, Resume, SourceVm, VmError};
use vmferry_codec::Method;
use vmferry_dirty::{DirtyLog, UffdLog};
use vmferry_memory::{GuestBytes, GuestMemory, PAGE_SIZE};

use super::content::{Content, Pool, Random};
use super::guest::{fill, lock};
use super::run::{Setup, migrate_while};
use crate::guest::{describe, memory};

/// How it is made.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Pages that change.
    pub hot_pages: u64,
    /// Pages that do not.
    pub cold_pages: u64,
    /// In bytes per second.
    pub cap: u64,
    /// Rounds after which it is refused.
    pub max_rounds: u32,
}

/// So long the guest takes to change every hot page once.
const PERIOD: Duration = Duration::from_millis(250);

/// Bytes that change in each of so many places.
const BYTES: usize = 16;
const PLACES: u64 = 4;

/// One way to migrate it.
#[derive(Debug, Serialize)]
pub struct ConvergeRow {
    /// The way.
    pub way: String,
    /// Rounds, the last one included.
    pub rounds: usize,
    /// Bytes on the wire.
    pub sent_mb: f64,
    /// Of which in the last round with the guest running.
    pub last_round_mb: f64,
    /// What a handover would have cost, or was to cost.
    pub predicted_ms: f64,
    /// What it cost.
    pub downtime_ms: f64,
    /// In all.
    pub total_ms: f64,
    /// How it ended.
    pub outcome: &'static str,
}

/// Migrates in each way.
///
/// # Errors
/// A migration that ends otherwise than by a handover or a refusal, or a memory that differs.
pub fn measure(case: Case, directory: &Path) -> anyhow::Result<Vec<ConvergeRow>> {
    let pages = case.hot_pages + case.cold_pages;
    let pool = Pool::new(Content::Program, pages as usize * PAGE_SIZE)?;
    let (here, there) = (memory(pages)?, memory(pages)?);
    let zstd = CompressionWay::Fixed(Method::zstd(1));
    let ways = [(CompressionWay::Off, false), (zstd, false), (CompressionWay::Auto, true)];
    let measure = |(way, deltas): (CompressionWay, bool)| {
        fill(&here, &pool)?;
        one(case, &here, &there, way, deltas, directory)
            .with_context(|| format!("the guest that changes a little, {way}"))
    };
    ways.into_iter().map(measure).collect()
}

fn one(
    case: Case,
    here: &GuestMemory,
    there: &GuestMemory,
    way: CompressionWay,
    deltas: bool,
    directory: &Path,
) -> anyhow::Result<ConvergeRow> {
    let mut setup = Setup::new(directory, Some(case.cap));
    let default = CompressionConfig::default();
    let delta_memory = if deltas { default.delta_memory } else { 0 };
    let when_busy = WhenBusy::Wait;
    setup.source.compression = CompressionConfig { way, when_busy, delta_memory, ..default };
    setup.source.max_rounds = case.max_rounds;
    setup.source.verify = true;
    let vm = BusyGuest::start(here, case.hot_pages)?;
    let ((), ended) = migrate_while(vm, there, setup, false, |_, _| Ok(()))?;
    let stats = &ended.stats;
    let (outcome, predicted_ms) = match &ended.error {
        None => ("handed over", stats.predicted_downtime_ms),
        Some(MigrateError::NotConverging(why)) => ("refused", why.measures.predicted_downtime_ms),
        Some(error) => anyhow::bail!("the migration failed: {error}"),
    };
    ensure!(stats.verify_match != Some(false), "the memories differ");
    let last = stats.rounds.iter().rev().find(|round| !round.paused);
    let name = if deltas || way == CompressionWay::Off {
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

/// A guest with one thread that goes over its hot pages again and again.
struct BusyGuest {
    memory: GuestMemory,
    log: Arc<UffdLog>,
    running: Arc<Running>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Running {
    ended: AtomicBool,
    /// Held while pages are changed; whether the guest is paused.
    paused: Mutex<bool>,
}

impl BusyGuest {
    fn start(memory: &GuestMemory, hot_pages: u64) -> anyhow::Result<Self> {
        let running = Arc::new(Running::default());
        let log = Arc::new(UffdLog::new(memory)?);
        let (mine, theirs) = (memory.clone(), Arc::clone(&running));
        let thread = std::thread::Builder::new()
            .name("guest".into())
            .spawn(move || write(&mine, hot_pages, &theirs))?;
        Ok(Self { memory: memory.clone(), log, running, thread: Some(thread) })
    }
}

impl Drop for BusyGuest {
    fn drop(&mut self) {
        self.running.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // One that has panicked has said so.
            let _ = thread.join();
        }
    }
}

fn write(memory: &GuestMemory, hot_pages: u64, running: &Running) {
    // Short pieces, so that the guest pauses at once and never writes in bursts.
    const PIECES: u64 = 64;
    let mut random = Random::new(11);
    let begun = Instant::now();
    let mut done: u32 = 0;
    while !running.ended.load(Ordering::Relaxed) {
        let due = PERIOD * done / PIECES as u32;
        // The pace of the run: a piece is written when it is due.
        std::thread::sleep(due.saturating_sub(begun.elapsed()).max(Duration::from_micros(100)));
        let paused = lock(&running.paused);
        if *paused {
            continue;
        }
        let piece = u64::from(done) % PIECES;
        for page in hot_pages * piece / PIECES..hot_pages * (piece + 1) / PIECES {
            for place in 0..PLACES {
                let within = place * 1024 + random.next() % (1024 - BYTES as u64);
                let bytes = [(); BYTES].map(|()| random.next() as u8);
                if memory.write_at(page * PAGE_SIZE as u64 + within, &bytes).is_err() {
                    return;
                }
            }
        }
        done += 1;
    }
}

impl Resume for BusyGuest {
    fn resume(&mut self) -> Result<(), VmError> {
        *lock(&self.running.paused) = false;
        Ok(())
    }
}

impl SourceVm for BusyGuest {
    fn describe(&self) -> GuestDescription {
        describe(&self.memory)
    }

    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        Arc::clone(&self.log) as Arc<dyn DirtyLog>
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        // Whoever has the lock writes nothing any more.
        *lock(&self.running.paused) = true;
        Ok(Duration::ZERO)
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        Ok(GuestBytes::new())
    }
}
