//! Scheduling and resource usage of single threads.
//!
//! Why `unsafe`: these two calls have no safe wrapper. Why sound: their arguments are valid, and
//! they access only the structure that is passed to them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, ensure};

/// Gives the calling thread idle priority: it runs only when no other thread is runnable.
pub fn run_when_idle() -> anyhow::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure lives during the call, and 0 is the calling thread.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    ensure!(result == 0, "could not set idle priority: {}", std::io::Error::last_os_error());
    Ok(())
}

/// The calling thread's ID.
pub fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// A thread and its resource usage so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Thread {
    /// The thread's name, at most 15 bytes.
    pub name: String,
    /// Its resource usage.
    pub used: ThreadUse,
}

/// Resource usage of one or several threads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ThreadUse {
    /// CPU time.
    pub cpu: Duration,
    /// Page faults without disk I/O.
    pub minor_faults: u64,
    /// Page faults with disk I/O.
    pub major_faults: u64,
    /// Voluntary context switches.
    pub voluntary_switches: u64,
    /// Involuntary context switches.
    pub involuntary_switches: u64,
}

/// Threads by ID.
pub type Threads = BTreeMap<i32, Thread>;

/// All threads of this process except these.
pub fn threads_except(except: &[i32]) -> anyhow::Result<Threads> {
    let wanted = thread_ids()?.into_iter().filter(|thread| !except.contains(thread));
    // A thread that has ended since is skipped.
    Ok(wanted.filter_map(|thread| Some((thread, read_thread(thread)?))).collect())
}

/// Lists the thread IDs of this process. A listing may miss a live thread when another one ends at
/// the same time, so the threads are listed until two listings agree.
fn thread_ids() -> anyhow::Result<BTreeSet<i32>> {
    let mut earlier = BTreeSet::new();
    loop {
        let mut found = BTreeSet::new();
        for entry in std::fs::read_dir("/proc/self/task").context("/proc is not mounted")? {
            found.extend(entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
        }
        if found == earlier {
            return Ok(found);
        }
        earlier = found;
    }
}

/// Resource usage since `earlier` of the threads whose names match. Threads that are new since then
/// count from their start.
pub fn since(earlier: &Threads, now: &Threads, wanted: impl Fn(&str) -> bool) -> ThreadUse {
    let mut sum = ThreadUse::default();
    for (number, Thread { used: now, .. }) in now.iter().filter(|(_, now)| wanted(&now.name)) {
        let then = earlier.get(number).map(|then| then.used).unwrap_or_default();
        sum.cpu += now.cpu.saturating_sub(then.cpu);
        sum.minor_faults += now.minor_faults.saturating_sub(then.minor_faults);
        sum.major_faults += now.major_faults.saturating_sub(then.major_faults);
        sum.voluntary_switches += now.voluntary_switches.saturating_sub(then.voluntary_switches);
        sum.involuntary_switches +=
            now.involuntary_switches.saturating_sub(then.involuntary_switches);
    }
    sum
}

fn read_thread(thread: i32) -> Option<Thread> {
    let read = |file| std::fs::read_to_string(format!("/proc/self/task/{thread}/{file}")).ok();
    let (stat, status, name) = (read("stat")?, read("status")?, read("comm")?);
    // The name is in parentheses and may contain spaces; the third field follows it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse().ok();
    let line = |name| status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    let used = ThreadUse {
        cpu: cpu_of(thread)?,
        minor_faults: field(10)?,
        major_faults: field(12)?,
        voluntary_switches: line("voluntary_ctxt_switches:")?,
        involuntary_switches: line("nonvoluntary_ctxt_switches:")?,
    };
    Some(Thread { name: name.trim_end().to_owned(), used })
}

/// The thread's CPU time in nanoseconds; `/proc` counts in ticks of 10 ms.
fn cpu_of(thread: i32) -> Option<Duration> {
    // Linux derives the clock ID from the thread ID: all bits inverted, followed by three bits that
    // select the clock.
    const PER_THREAD: i32 = 4;
    const RUN_TIME: i32 = 2;
    let clock = (!thread << 3) | PER_THREAD | RUN_TIME;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is writable and lives during the call.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (result == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_sums_the_threads_that_match() {
        let me = this_thread();
        let before = threads_except(&[]).unwrap();
        let mut sum = 0_u64;
        while cpu_of(me).unwrap() < before[&me].used.cpu + Duration::from_millis(3) {
            sum = std::hint::black_box(sum + 1);
        }
        let memory = std::hint::black_box(vec![1_u8; 8 << 20]);
        let used = since(&before, &threads_except(&[]).unwrap(), |_| true);
        assert!(used.cpu >= Duration::from_millis(3), "{used:?} {sum}");
        assert!(used.minor_faults > 0, "{used:?} {}", memory.len());
        let none = since(&before, &threads_except(&[]).unwrap(), |name| name == "no such");
        assert_eq!(none, ThreadUse::default());
        assert!(!threads_except(&[me]).unwrap().contains_key(&me));
    }

    #[test]
    fn run_when_idle_succeeds() {
        std::thread::spawn(run_when_idle).join().unwrap().unwrap();
    }
}
