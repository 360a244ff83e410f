//! Measures what a migration sends in a window of time. The guest is never handed over; the
//! migration is canceled when the window is over.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use vmferry::MigrateError;
use vmferry::config::{RoundLimit, WhenStuck};
use vmferry::source::{Orders, Progress};
use vmferry_memory::GuestMemory;

use super::allocations;
use super::guest::{NeverHandedOver, RewrittenLog, Writers};
use super::run::{Setup, is_conductor, is_of_destination, is_of_source, migrate_while};
use super::system::{ThreadUse, since, this_thread, threads_except};
use super::way::Way;
use crate::guest::MemoryGuest;

/// Time limit for the first page.
const START: Duration = Duration::from_secs(60);

/// Time per page that no machine reaches, for pages of any kind.
const PER_PAGE: Duration = Duration::from_nanos(500);

/// The lengths of the warm-up and of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Time to allocate buffers, fill the link and let auto measure. It is not counted.
    pub warm_up: Duration,
    /// The counted time.
    pub length: Duration,
}

/// The guest and its destination.
pub struct Hosts<'a> {
    /// The source's memory.
    pub here: &'a GuestMemory,
    /// The destination's memory.
    pub there: &'a GuestMemory,
    /// The threads that write the guest's memory.
    pub writers: &'a Writers,
    /// The directory for journals.
    pub directory: &'a Path,
}

/// The measurements of one window.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The window's actual length.
    pub seconds: f64,
    /// Pages with content that were sent.
    pub content_pages: f64,
    /// Zero pages that were sent.
    pub zero_pages: f64,
    /// Bytes on the link.
    pub bytes: f64,
    /// Allocations by both sides.
    pub allocations: f64,
    /// Resource usage of both sides' threads.
    pub used: ThreadUse,
    /// CPU seconds of the source.
    pub source_cpu_s: f64,
    /// CPU seconds of the destination.
    pub destination_cpu_s: f64,
    /// The migration thread's share of the source's CPU time. This includes the conductor, and the
    /// workers while they select the pages of a frame.
    pub migration_thread_share: f64,
}

/// Measures one window.
///
/// # Errors
/// The migration does not begin, or ends too early.
pub fn measure(
    hosts: &Hosts<'_>,
    way: Way,
    cap: Option<u64>,
    window: Window,
) -> anyhow::Result<Sample> {
    let log = hosts.writers.log(hosts.here)?;
    let mut setup = Setup::new(hosts.directory, cap)?;
    way.configure_source(&mut setup.source)?;
    way.configure_destination(&mut setup.destination)?;
    // The downtime limit is too short for all of the memory, and the migration never runs out of
    // rounds.
    setup.source.downtime_limit = PER_PAGE * u32::try_from(hosts.here.total_pages())?;
    setup.source.max_rounds = RoundLimit::new(u32::MAX)?;
    setup.source.when_stuck = WhenStuck::Refuse;
    let vm = MemoryGuest::new(hosts.here, Arc::<RewrittenLog>::clone(&log), NeverHandedOver);
    // The migration's threads are all threads except the guest's and this one.
    let mut others = hosts.writers.numbers.clone();
    others.push(this_thread());
    let (mut sample, ended) = migrate_while(vm, hosts.there, setup, true, |orders, is_over| {
        let seen = measure_window(orders, is_over, &log, window, &others);
        log.release();
        seen
    })?;
    match ended.error {
        Some(MigrateError::Cancelled { .. }) => {}
        Some(error) => return Err(error).context("the migration failed"),
        None => bail!("the guest was handed over, which must not happen"),
    }
    let stats = &ended.stats;
    sample.migration_thread_share = match way {
        // The only worker is the migration thread.
        Way::ZlibPerCall => 1.0,
        // The workers' share is known only for the whole migration; it does not change over time.
        // Most of the conductor's work was done before the first page was sent.
        _ => {
            let looking = (stats.planning_cpu_s - ended.conductor_cpu_s).max(0.0);
            sample.migration_thread_share + looking / stats.engine_cpu_s
        }
    };
    Ok(sample)
}

fn measure_window(
    orders: &Orders,
    is_over: &dyn Fn() -> bool,
    log: &RewrittenLog,
    window: Window,
    others: &[i32],
) -> anyhow::Result<Sample> {
    let begun = Instant::now();
    while orders.progress().sent_bytes == 0 {
        ensure!(!is_over(), "the migration ended before it sent a page");
        ensure!(begun.elapsed() < START, "nothing was sent in {} s", START.as_secs());
        // Progress cannot be waited for.
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
    ensure!(source_cpu_s > 0.0, "the source used no CPU time in the window");
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

/// Sleeps until the log's active time reaches `active`.
fn sleep_until(log: &RewrittenLog, active: Duration) {
    loop {
        let rest = active.saturating_sub(log.active());
        if rest.is_zero() {
            return;
        }
        // The sleep is at least 1 ms, because the waits of harvests are checked every millisecond.
        std::thread::sleep(rest.max(Duration::from_millis(1)));
    }
}
