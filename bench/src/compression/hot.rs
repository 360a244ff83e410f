//! Pages that were sent before and have changed a little: 16 bytes in each of 8 places of every
//! page, between two rounds. Measures the bytes per page on the wire, with deltas and with each
//! codec alone.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use fastrand::Rng;
use serde::Serialize;
use vmferry::config::RoundLimit;
use vmferry::config::compression::CompressionWay;
use vmferry::{MigrateError, StateEstimate, VmError};
use vmferry_codec::Method;
use vmferry_dirty::UffdLog;
use vmferry_memory::{GuestMemory, PAGE_SIZE};

use super::content::{Content, Pool};
use super::guest::fill;
use super::run::{Deltas, Setup, migrate_while};
use crate::guest::{Behavior, MemoryGuest, NO_STATE, memory, never_paused};

/// Places that change in a page, and bytes per place.
const PLACES: usize = 8;
const BYTES: usize = 16;

/// The number of rounds. The first sends everything. The second fills the cache of copies that
/// deltas are computed from.
const ROUNDS: u32 = 6;
const ROUNDS_BEFORE: usize = 2;

/// A row: one compression method.
#[derive(Debug, Serialize)]
pub struct HotRow {
    /// The method.
    pub way: String,
    /// Whether the source keeps copies to compute deltas from.
    pub deltas: &'static str,
    /// Bytes on the wire per page in the counted rounds, including headers.
    pub bytes_per_page: f64,
    /// Pages sent as deltas, in percent.
    pub delta_percent: f64,
    /// Time per page in the counted rounds.
    pub us_per_page: f64,
    /// Counted rounds.
    pub rounds: usize,
}

/// Measures each method with `pages` pages, under a cap in bytes per second.
///
/// # Errors
/// A migration failed for another reason than not converging.
pub fn measure(pages: u64, cap: u64, directory: &Path) -> anyhow::Result<Vec<HotRow>> {
    let pool = Pool::new(Content::Program, pages as usize * PAGE_SIZE)?;
    let (here, there) = (memory(pages)?, memory(pages)?);
    let zlib = CompressionWay::Fixed(Method::zlib(1));
    let lz4 = CompressionWay::Fixed(Method::lz4());
    let [zstd1, zstd3] = [1, 3].map(|level| CompressionWay::Fixed(Method::zstd(level)));
    let ways = [
        (CompressionWay::Off, Deltas::Off),
        (zlib, Deltas::Off),
        (lz4, Deltas::Off),
        (zstd1, Deltas::Off),
        (zstd3, Deltas::Off),
        (CompressionWay::Delta, Deltas::On),
        (zstd1, Deltas::On),
        (CompressionWay::Auto, Deltas::On),
    ];
    let measure = |(way, deltas)| {
        // Every method starts with the same pages.
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
    deltas: Deltas,
    directory: &Path,
) -> anyhow::Result<HotRow> {
    let mut setup = Setup::new(directory, Some(cap))?;
    setup.compress(way, deltas);
    setup.source.max_rounds = RoundLimit::new(ROUNDS)?;
    // The changed bytes are random, so every method must send them. No handover can be this short.
    let least = here.total_pages() as f64 * (PLACES * BYTES) as f64 / cap as f64;
    setup.source.downtime_limit = Duration::from_secs_f64(least);
    let guest = HotPages { random: Rng::with_seed(7) };
    let vm = MemoryGuest::new(here, Arc::new(UffdLog::new(here)?), guest);
    let ((), ended) = migrate_while(vm, there, setup, false, |_, _| Ok(()))?;
    match ended.error {
        Some(MigrateError::NotConverging(_)) => {}
        Some(error) => return Err(error).context("the migration failed"),
        None => anyhow::bail!("the guest was handed over, which must not happen"),
    }
    let rounds = ended.stats.rounds.get(ROUNDS_BEFORE..).unwrap_or_default();
    let sum =
        |part: &dyn Fn(&vmferry::stats::RoundStats) -> f64| rounds.iter().map(part).sum::<f64>();
    let pages = sum(&|round| round.pages as f64);
    ensure!(pages >= here.total_pages() as f64, "too few pages were sent again: {pages}");
    Ok(HotRow {
        way: way.to_string(),
        deltas: if deltas == Deltas::On { "yes" } else { "no" },
        bytes_per_page: sum(&|round| round.bytes as f64) / pages,
        delta_percent: 100.0 * sum(&|round| round.encoded.delta as f64) / pages,
        us_per_page: 1e3 * sum(&|round| round.ms) / pages,
        rounds: rounds.len(),
    })
}

/// The ratio of bytes with the best codec alone to bytes with deltas.
///
/// # Errors
/// A method was not measured.
pub fn delta_over_best(rows: &[HotRow]) -> anyhow::Result<f64> {
    let without = rows.iter().filter(|row| row.deltas == "no").map(|row| row.bytes_per_page);
    let delta = rows.iter().find(|row| row.way == CompressionWay::Delta.to_string());
    let delta = delta.context("deltas were not measured")?.bytes_per_page;
    let best = without.reduce(f64::min).context("no codec was measured")?;
    Ok(best / delta)
}

/// A guest that changes all of its pages between two rounds and is never handed over.
struct HotPages {
    random: Rng,
}

impl Behavior for HotPages {
    fn pause(&mut self) -> Result<(), VmError> {
        Err(never_paused())
    }

    fn between_rounds(&mut self, memory: &GuestMemory) -> Result<(), VmError> {
        let spacing = (PAGE_SIZE / PLACES) as u64;
        for page in 0..memory.total_pages() {
            for place in 0..PLACES as u64 {
                let offset = place * spacing + self.random.u64(..spacing - BYTES as u64);
                let mut bytes = [0; BYTES];
                self.random.fill(&mut bytes);
                memory.write_at(page * PAGE_SIZE as u64 + offset, &bytes)?;
            }
        }
        Ok(())
    }

    fn state_estimate(&self) -> StateEstimate {
        NO_STATE
    }
}
