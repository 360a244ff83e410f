//! The original measurement: how often real migrations of a 512 MB guest traverse dirty bitmaps,
//! and the total time that takes with each method. One guest mostly reads, the other mostly writes.
//!
//! The bitmaps of the dirty log are recorded and then traversed with each method in turn, so that
//! all methods get the same bitmaps.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use parking_lot::Mutex;
use serde::Serialize;
use vmferry::config::{BandwidthCap, RoundLimit, WhenStuck};
use vmferry::{DestinationConfig, SourceConfig, SourceVm};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_doubles::{FilteredLog, SourceDouble};
use vmferry_memory::traverse::flat_runs;
use vmferry_memory::{MemoryKind, PageBitmap};
use vmferry_microvm::config::GuestConfig;
use vmferry_microvm::embed::{IncomingMachine, MigratingMachine};
use vmferry_microvm::{GuestKind, Machine, MachineConfig};
use vmferry_transport::{Address, Dialer, Listener};
use vmferry_wire::GuestIdentity;

use super::Found;
use super::baseline;
use crate::guest::migrate_here;
use crate::results::{Row, median, row};

/// A guest that mostly reads, and one that mostly writes.
const GUESTS: [(&str, &str); 2] =
    [("reads", "read=384 ticks"), ("writes", "fill=128,text hot=256,random")];

/// Bandwidth in bytes per second. It is low, so that the guest that writes needs many rounds.
const BANDWIDTH: u64 = 350_000_000;

#[derive(Serialize)]
struct MigrationRow {
    guest: &'static str,
    migration: usize,
    dirty_log: String,
    calls: usize,
    dirty_pages: u64,
    byte_ms: f64,
    word_ms: f64,
    simd_ms: f64,
    summary_ms: f64,
    byte_over_word: f64,
    byte_over_summary: f64,
}

/// Migrates each guest three times, as published. `quick` migrates a smaller guest once.
pub fn measure(quick: bool) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (guest, workload) in GUESTS {
        for migration in 1..=if quick { 1 } else { 3 } {
            let (kept, log) = if quick {
                migrate_once(64 << 20, "hot=16,random", 2)?
            } else {
                migrate_once(512 << 20, workload, 12)?
            };
            rows.push(row(&compare(guest, migration, log, &kept))?);
            eprintln!("bitmap: migration {migration} of the guest that {guest} done");
        }
    }
    Ok(rows)
}

fn compare(
    guest: &'static str,
    migration: usize,
    dirty_log: String,
    kept: &[PageBitmap],
) -> MigrationRow {
    let bytes: Vec<Vec<u8>> = kept
        .iter()
        .map(|bitmap| bitmap.words().iter().flat_map(|word| word.to_le_bytes()).collect())
        .collect();
    let mut samples: [Vec<f64>; 4] = Default::default();
    for _ in 0..7 {
        samples[0].push(timed(&bytes, |bytes, found| {
            baseline::by_byte(bytes, |page| found.page(page));
        }));
        samples[1].push(timed(kept, |bitmap, found| {
            baseline::by_word(bitmap.words(), |page| found.page(page));
        }));
        samples[2].push(timed(kept, |bitmap, found| {
            flat_runs(bitmap.words()).for_each(|(first, count)| found.run(first, count));
        }));
        samples[3].push(timed(kept, |bitmap, found| {
            bitmap.runs().for_each(|(first, count)| found.run(first, count));
        }));
    }
    let [byte, word, simd, summary] = samples.map(|samples| median(samples) * 1e3);
    MigrationRow {
        guest,
        migration,
        dirty_log,
        calls: kept.len(),
        dirty_pages: kept.iter().map(PageBitmap::count).sum(),
        byte_ms: byte,
        word_ms: word,
        simd_ms: simd,
        summary_ms: summary,
        byte_over_word: byte / word,
        byte_over_summary: byte / summary,
    }
}

/// Traverses all bitmaps and returns the time in seconds.
fn timed<T>(bitmaps: &[T], traverse: impl Fn(&T, &mut Found)) -> f64 {
    let begun = Instant::now();
    for bitmap in bitmaps {
        let mut found = Found::default();
        traverse(black_box(bitmap), &mut found);
        black_box(found);
    }
    begun.elapsed().as_secs_f64()
}

/// Migrates a guest between two machines of this process over a real socket. Returns every bitmap
/// that the dirty log returned, and the log's name.
fn migrate_once(
    memory_bytes: u64,
    workload: &str,
    rounds: u32,
) -> anyhow::Result<(Vec<PageBitmap>, String)> {
    let directory = tempfile::tempdir()?;
    let machine = Machine::shared(MachineConfig {
        identity: GuestIdentity { uuid: uuid::Uuid::new_v4(), name: "bench".into() },
        guest: GuestConfig {
            memory_bytes,
            vcpus: 2,
            command_line: workload.into(),
            balloon: false,
        },
        kind: GuestKind::Auto,
        memory_kind: MemoryKind::Private,
        dirty_log: LogChoice::Auto,
        device_log: SoftwareWay::Switch,
    })?;
    let locked = || machine.lock();
    locked().start()?;
    let deadline = Instant::now() + Duration::from_secs(120);
    while !locked().report()?.populated {
        if Instant::now() > deadline {
            bail!("the guest did not populate its memory within two minutes");
        }
        // The guest reports in its memory, so there is nothing to wait on.
        std::thread::sleep(Duration::from_millis(10));
    }
    let vm = MigratingMachine::new(Arc::clone(&machine))?;
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keeping = Arc::clone(&kept);
    let log = FilteredLog::new(vm.dirty_log(), move |dirty| {
        keeping.lock().extend(dirty.iter().map(|(_, bitmap)| bitmap.clone()));
    });
    let vm = SourceDouble::with_log(vm, log);
    let address = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
    let listener = Listener::bind(&address, None)?;
    let dialer = Dialer::new(listener.local_address().clone(), None);
    let mut config = SourceConfig::new(directory.path().join("source"));
    config.max_bandwidth = Some(BandwidthCap::new(BANDWIDTH)?);
    config.max_rounds = RoundLimit::new(rounds)?;
    config.when_stuck = WhenStuck::SwitchOver;
    config.downtime_limit = Duration::from_millis(30);
    let mut there = DestinationConfig::new(directory.path().join("destination"));
    there.once = true;
    let incoming = IncomingMachine::default();
    let (stats, _) = migrate_here((vm, &dialer, config), (incoming, listener, &there))?;
    let mut logs: Vec<&str> = stats.rounds.iter().map(|round| round.dirty_log.as_str()).collect();
    logs.dedup();
    let kept = std::mem::take(&mut *kept.lock());
    Ok((kept, logs.join(", ")))
}
