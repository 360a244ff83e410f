//! What a migration moves in a window of time. It has no end of its own: the guest is never handed over,
//! and the migration is cancelled when the window is over.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use vmferry::MigrateError;
use vmferry::config::WhenStuck;
use vmferry::source::{Orders, Progress};
use vmferry_memory::GuestMemory;

use super::allocations;
use super::guest::{Bare, RewrittenLog, Writers};
use super::run::{Setup, is_conductor, is_of_destination, is_of_source, migrate_while};
use super::system::{ThreadUse, since, this_thread, threads_except};
use super::way::Way;

/// Until the first page is sent.
const START: Duration = Duration::from_secs(60);

/// No machine moves a page of any kind in that.
const PER_PAGE: Duration = Duration::from_nanos(500);

/// How long is looked.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Time for buffers to be made, the link to be filled and auto to have measured; not counted.
    pub warm_up: Duration,
    /// Time that is counted.
    pub length: Duration,
}

/// A guest and a place for it.
pub struct Hosts<'a> {
    /// The guest's memory.
    pub here: &'a GuestMemory,
    /// The destination's.
    pub there: &'a GuestMemory,
    /// Who writes the guest's.
    pub writers: &'a Writers,
    /// For journals.
    pub directory: &'a Path,
}

/// What was seen in one window.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The window's real length.
    pub seconds: f64,
    /// Pages with content that were sent in it.
    pub content_pages: f64,
    /// Pages of zeros.
    pub zero_pages: f64,
    /// Bytes on the link.
    pub bytes: f64,
    /// Allocations by both sides.
    pub allocations: f64,
    /// What the threads of both sides did.
    pub used: ThreadUse,
    /// CPU seconds of the source's side.
    pub source_cpu_s: f64,
    /// CPU seconds of the destination's.
    pub destination_cpu_s: f64,
    /// The migration thread's part of the source's CPU time: the conductor, and the workers while they look
    /// for the pages of a frame.
    pub migration_thread_share: f64,
}

/// Looks once.
///
/// # Errors
/// A migration that does not begin, or ends.
pub fn look(
    hosts: &Hosts<'_>,
    way: Way,
    cap: Option<u64>,
    window: Window,
) -> anyhow::Result<Sample> {
    let log = hosts.writers.log(hosts.here)?;
    let mut setup = Setup::new(hosts.directory, cap);
    way.choose(&mut setup.source);
    way.choose_there(&mut setup.destination);
    // Nothing moves all of the memory in that, and so many rounds take longer than anybody waits.
    setup.source.downtime_limit = PER_PAGE * u32::try_from(hosts.here.total_pages())?;
    setup.source.max_rounds = u32::MAX;
    setup.source.when_stuck = WhenStuck::Refuse;
    let vm = Bare { memory: hosts.here.clone(), log: Arc::<RewrittenLog>::clone(&log) };
    // The migration's threads are those that are neither the guest's nor this one.
    let mut others = hosts.writers.numbers.clone();
    others.push(this_thread());
    let (mut sample, ended) = migrate_while(vm, hosts.there, setup, true, |orders, is_over| {
        let seen = look_at(orders, is_over, &log, window, &others);
        log.release();
        seen
    })?;
    match ended.error {
        Some(MigrateError::Cancelled { .. }) => {}
        Some(error) => return Err(error).context("the migration failed"),
        None => bail!("a guest was handed over that must not be"),
    }
    let stats = &ended.stats;
    sample.migration_thread_share = match way {
        // Its one worker is the thread that migrates.
        Way::ZlibPerCall => 1.0,
        // What workers do so is known of the whole migration only, and does not change in it. The conductor has
        // done most before the first page was sent.
        _ => {
            let looking = (stats.planning_cpu_s - ended.conductor_cpu_s).max(0.0);
            sample.migration_thread_share + looking / stats.engine_cpu_s
        }
    };
    Ok(sample)
}

fn look_at(
    orders: &Orders,
    is_over: &dyn Fn() -> bool,
    log: &RewrittenLog,
    window: Window,
    others: &[i32],
) -> anyhow::Result<Sample> {
    let begun = Instant::now();
    while orders.progress().sent_bytes == 0 {
        ensure!(!is_over(), "the migration is over before it has begun");
        ensure!(begun.elapsed() < START, "nothing was sent in {} s", START.as_secs());
        // Progress wakes nobody.
        std::thread::sleep(Duration::from_millis(1));
    }
    sleep_until(log, log.active() + window.warm_up);
    let threads = threads_except(others)?;
    allocations::begin();
    let (from, first) = (log.active(), orders.progress());
    sleep_until(log, from + window.length);
    let (to, last) = (log.active(), orders.progress());
    let allocations = allocations::end();
    let (before, now) = (threads, threads_except(others)?);
    let cpu_s = |side: fn(&str) -> bool| since(&before, &now, side).cpu.as_secs_f64();
    let source_cpu_s = cpu_s(is_of_source);
    ensure!(source_cpu_s > 0.0, "the source has used no processor in the window");
    let grown = |part: fn(&Progress) -> u64| part(&last).saturating_sub(part(&first)) as f64;
    let sample = Sample {
        seconds: (to - from).as_secs_f64(),
        content_pages: grown(|at| at.sent_content_pages),
        zero_pages: grown(|at| at.sent_zero_pages),
        bytes: grown(|at| at.sent_bytes),
        allocations: allocations as f64,
        used: since(&before, &now, |_| true),
        source_cpu_s,
        destination_cpu_s: cpu_s(is_of_destination),
        migration_thread_share: cpu_s(is_conductor) / source_cpu_s,
    };
    ensure!(sample.content_pages > 0.0 && sample.seconds > 0.0, "no page was sent in the window");
    Ok(sample)
}

/// Sleeps until so much time has passed in which no harvest waited.
fn sleep_until(log: &RewrittenLog, active: Duration) {
    loop {
        let rest = active.saturating_sub(log.active());
        if rest.is_zero() {
            return;
        }
        // A wait ends within a millisecond of what ends it.
        std::thread::sleep(rest.max(Duration::from_millis(1)));
    }
}
