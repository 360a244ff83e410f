//! Cleanup after a signal. A signal kills the processes that the benchmark has started. The
//! benchmark then fails and removes its files and shared memory on the way out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Time for a benchmark to notice that its processes are gone. After that it is ended as by a
/// second signal.
const CLEANUP_LIMIT: Duration = Duration::from_secs(20);

/// Interval between checks for new child processes.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

static RECEIVED: AtomicBool = AtomicBool::new(false);

/// Starts a thread that kills all child processes when a signal arrives.
///
/// This suits benchmarks that always depend on a child process and start none to clean up, because
/// those would be killed too. The `transport` benchmark deletes namespaces with commands, so it
/// handles signals itself.
///
/// # Errors
/// The signal handlers or the thread could not be set up.
pub fn kill_children_on_signal() -> anyhow::Result<()> {
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP]).context("could not listen for signals")?;
    std::thread::Builder::new()
        .name("interrupt".into())
        .spawn(move || {
            let Some(signal) = signals.forever().next() else { return };
            RECEIVED.store(true, Ordering::Relaxed);
            eprintln!("interrupted: ending the processes that this benchmark started");
            // All later failures are consequences of the signal.
            std::panic::set_hook(Box::new(|_| ()));
            let begun = Instant::now();
            while begun.elapsed() < CLEANUP_LIMIT && signals.pending().next().is_none() {
                children().for_each(|child| {
                    // The child may have ended already.
                    let _ = kill_process(child, Signal::KILL);
                });
                std::thread::sleep(CHECK_INTERVAL);
            }
            let _ = emulate_default_handler(signal);
        })
        .context("could not start a thread")?;
    Ok(())
}

/// Starts a thread that only records that a signal has arrived. A second signal ends the process.
///
/// This suits benchmarks whose processes must be ended in order.
///
/// # Errors
/// The signal handlers or the thread could not be set up.
pub fn stop_on_signal() -> anyhow::Result<()> {
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP]).context("could not listen for signals")?;
    let wait = move || {
        if signals.forever().next().is_none() {
            return;
        }
        RECEIVED.store(true, Ordering::Relaxed);
        eprintln!("interrupted: the present migration is the last one");
        if let Some(signal) = signals.forever().next() {
            let _ = emulate_default_handler(signal);
        }
    };
    std::thread::Builder::new()
        .name("interrupt".into())
        .spawn(wait)
        .context("could not start a thread")?;
    Ok(())
}

/// Whether a signal has arrived.
pub fn received() -> bool {
    RECEIVED.load(Ordering::Relaxed)
}

/// The child processes of every thread of this process (`proc_pid_children(5)`). Children that have
/// ended are listed until they are waited for, so no PID is reused.
fn children() -> impl Iterator<Item = Pid> {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|list| {
            let numbers = list.split_whitespace().filter_map(|number| number.parse().ok());
            numbers.filter_map(Pid::from_raw).collect::<Vec<_>>()
        })
}
