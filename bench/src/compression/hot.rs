//! Pages that were sent before and have changed a little: 16 bytes in each of 8 places of every page from one
//! round to the next. What a page costs on the wire then, with deltas and with each codec alone.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::Serialize;
use vmferry::config::compression::{CompressionConfig, CompressionWay, WhenBusy};
use vmferry::{GuestDescription, MigrateError, Resume, SourceVm, StateEstimate, VmError};
use vmferry_codec::Method;
use vmferry_dirty::{DirtyLog, UffdLog};
use vmferry_memory::{GuestBytes, GuestMemory, PAGE_SIZE};

use super::content::{Content, Pool, Random};
use super::guest::{NO_STATE, fill};
use super::run::{Setup, migrate_while};
use crate::guest::{describe, memory};

/// Places of a page that change, and bytes of each.
const PLACES: usize = 8;
const BYTES: usize = 16;

/// Rounds, of which the first sends everything and the second makes the copies of which deltas are made.
const ROUNDS: u32 = 6;
const ROUNDS_BEFORE: usize = 2;

/// One way to send the pages again.
#[derive(Debug, Serialize)]
pub struct HotRow {
    /// The way.
    pub way: String,
    /// Whether the source keeps copies to make deltas of.
    pub deltas: &'static str,
    /// Bytes on the wire for each page in the rounds that count, headers included.
    pub bytes_per_page: f64,
    /// Part of the pages that went as deltas, in per cent.
    pub delta_percent: f64,
    /// How long those rounds took for each page.
    pub us_per_page: f64,
    /// Rounds that count.
    pub rounds: usize,
}

/// Measures each way, with so many pages, under a cap in bytes per second.
///
/// # Errors
/// A migration that fails in another way than that it does not converge.
pub fn measure(pages: u64, cap: u64, directory: &Path) -> anyhow::Result<Vec<HotRow>> {
    let pool = Pool::new(Content::Program, pages as usize * PAGE_SIZE)?;
    let (here, there) = (memory(pages)?, memory(pages)?);
    let zlib = CompressionWay::Fixed(Method::zlib(1));
    let lz4 = CompressionWay::Fixed(Method::lz4());
    let [zstd1, zstd3] = [1, 3].map(|level| CompressionWay::Fixed(Method::zstd(level)));
    let ways = [
        (CompressionWay::Off, false),
        (zlib, false),
        (lz4, false),
        (zstd1, false),
        (zstd3, false),
        (CompressionWay::Delta, true),
        (zstd1, true),
        (CompressionWay::Auto, true),
    ];
    let measure = |(way, deltas)| {
        // Every way has the same pages.
        fill(&here, &pool)?;
        one((&here, &there), cap, way, deltas, directory)
            .with_context(|| format!("hot pages, {way}"))
    };
    ways.into_iter().map(measure).collect()
}

fn one(
    (here, there): (&GuestMemory, &GuestMemory),
    cap: u64,
    way: CompressionWay,
    deltas: bool,
    directory: &Path,
) -> anyhow::Result<HotRow> {
    let mut setup = Setup::new(directory, Some(cap));
    let default = CompressionConfig::default();
    let delta_memory = if deltas { default.delta_memory } else { 0 };
    let when_busy = WhenBusy::Wait;
    setup.source.compression = CompressionConfig { way, when_busy, delta_memory, ..default };
    setup.source.max_rounds = ROUNDS;
    // What has changed is random, so that all of it travels in any way: no handover is as short.
    let least = here.total_pages() as f64 * (PLACES * BYTES) as f64 / cap as f64;
    setup.source.downtime_limit = Duration::from_secs_f64(least);
    let log = Arc::new(UffdLog::new(here)?);
    let vm = HotGuest { memory: here.clone(), log, random: Random::new(7) };
    let ((), ended) = migrate_while(vm, there, setup, false, |_, _| Ok(()))?;
    match ended.error {
        Some(MigrateError::NotConverging(_)) => {}
        Some(error) => return Err(error).context("the migration failed"),
        None => anyhow::bail!("a guest was handed over that must not be"),
    }
    let rounds = ended.stats.rounds.get(ROUNDS_BEFORE..).unwrap_or_default();
    let sum =
        |part: &dyn Fn(&vmferry::stats::RoundStats) -> f64| rounds.iter().map(part).sum::<f64>();
    let pages = sum(&|round| round.pages as f64);
    ensure!(pages >= here.total_pages() as f64, "too few pages were sent again: {pages}");
    Ok(HotRow {
        way: way.to_string(),
        deltas: if deltas { "yes" } else { "no" },
        bytes_per_page: sum(&|round| round.bytes as f64) / pages,
        delta_percent: 100.0 * sum(&|round| round.encoded.delta as f64) / pages,
        us_per_page: 1e3 * sum(&|round| round.ms) / pages,
        rounds: rounds.len(),
    })
}

/// How many times fewer bytes deltas need than the best codec without.
///
/// # Errors
/// A way that was not measured.
pub fn delta_over_best(rows: &[HotRow]) -> anyhow::Result<f64> {
    let without = rows.iter().filter(|row| row.deltas == "no").map(|row| row.bytes_per_page);
    let delta = rows.iter().find(|row| row.way == CompressionWay::Delta.to_string());
    let delta = delta.context("deltas were not measured")?.bytes_per_page;
    let best = without.reduce(f64::min).context("no codec was measured")?;
    Ok(best / delta)
}

/// A guest that writes between two rounds, and then all of its pages.
struct HotGuest {
    memory: GuestMemory,
    log: Arc<UffdLog>,
    random: Random,
}

impl HotGuest {
    fn change_pages(&mut self) -> Result<(), VmError> {
        for page in 0..self.memory.total_pages() {
            for place in 0..PLACES as u64 {
                let of = PAGE_SIZE as u64 / PLACES as u64;
                let within = self.random.next() % (of - BYTES as u64);
                let bytes = [self.random.next(), self.random.next()];
                let bytes: Vec<u8> = bytes.iter().flat_map(|word| word.to_le_bytes()).collect();
                self.memory.write_at(page * PAGE_SIZE as u64 + place * of + within, &bytes)?;
            }
        }
        Ok(())
    }
}

impl Resume for HotGuest {
    fn resume(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}

impl SourceVm for HotGuest {
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
        Err("this guest is never handed over".into())
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        Ok(GuestBytes::new())
    }

    fn state_estimate(&self) -> StateEstimate {
        NO_STATE
    }

    fn quiesced(&mut self, harvest: &mut dyn FnMut()) -> Result<Duration, VmError> {
        self.change_pages()?;
        harvest();
        Ok(Duration::ZERO)
    }
}
