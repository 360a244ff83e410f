//! A signal ends a benchmark together with the processes that it has started: they are ended, the benchmark fails for want
//! of them, and what they had on disk and in memory is taken away on its way out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// For a benchmark to notice that it has no processes any more. It is ended after that, as by a second signal.
const PATIENCE: Duration = Duration::from_secs(20);

/// So often it is looked whether more processes were started.
const LOOK: Duration = Duration::from_millis(50);

static CAME: AtomicBool = AtomicBool::new(false);

/// Listens for the signals. For benchmarks that do nothing for long without one of their processes, and start none to clean
/// up: those would be ended too (`transport` takes namespaces away by commands, and looks for a signal itself).
///
/// # Errors
/// The system's.
pub fn ends_all_processes() -> anyhow::Result<()> {
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP]).context("signals can't be listened for")?;
    std::thread::Builder::new()
        .name("interrupt".into())
        .spawn(move || {
            let Some(signal) = signals.forever().next() else { return };
            CAME.store(true, Ordering::Relaxed);
            eprintln!("interrupted: ending what was started");
            // What fails from now on, fails because of this.
            std::panic::set_hook(Box::new(|_| ()));
            let begun = Instant::now();
            while begun.elapsed() < PATIENCE && signals.pending().next().is_none() {
                children().for_each(|child| {
                    // One that has ended meanwhile is all right.
                    let _ = kill_process(child, Signal::KILL);
                });
                std::thread::sleep(LOOK);
            }
            let _ = emulate_default_handler(signal);
        })
        .context("no thread")?;
    Ok(())
}

/// Whether one has come.
pub fn came() -> bool {
    CAME.load(Ordering::Relaxed)
}

/// The processes that any thread of this one has started (`proc_pid_children(5)`). Those that have ended are among
/// them until they are waited for, so that no number is another's.
fn children() -> impl Iterator<Item = Pid> {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|list| {
            let numbers = list.split_whitespace().filter_map(|number| number.parse().ok());
            numbers.filter_map(Pid::from_raw).collect::<Vec<_>>()
        })
}
