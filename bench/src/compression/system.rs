//! What the system is asked for, and tells, of single threads.
//!
//! Why `unsafe`: two calls that no safe function has. Why sound: they are given what they want, and
//! touch no memory but the one structure that they fill.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, ensure};

/// Has the calling thread run only when no other wants to.
pub fn run_when_idle() -> anyhow::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure is there for the call, and 0 is the calling thread.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    ensure!(result == 0, "no idle priority: {}", std::io::Error::last_os_error());
    Ok(())
}

/// The calling thread's number.
pub fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// A thread, and what it has done so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Thread {
    /// What whoever has started it calls it, at most 15 bytes of that.
    pub name: String,
    /// What it has done.
    pub used: ThreadUse,
}

/// What a thread has done, or several.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ThreadUse {
    /// CPU time.
    pub cpu: Duration,
    /// Page faults that needed no disk.
    pub minor_faults: u64,
    /// Page faults that did.
    pub major_faults: u64,
    /// Times that it went to sleep.
    pub voluntary_switches: u64,
    /// Times that another one was let run before it.
    pub involuntary_switches: u64,
}

/// Threads by number.
pub type Threads = BTreeMap<i32, Thread>;

/// All threads of this process but these.
pub fn threads_except(except: &[i32]) -> anyhow::Result<Threads> {
    let wanted = numbers()?.into_iter().filter(|thread| !except.contains(thread));
    // One that has ended since has nothing more to tell.
    Ok(wanted.filter_map(|thread| Some((thread, look(thread)?))).collect())
}

/// The threads of this process. A listing may leave out one that lives, if another one ends meanwhile: so they
/// are listed until two listings agree.
fn numbers() -> anyhow::Result<BTreeSet<i32>> {
    let mut earlier = BTreeSet::new();
    loop {
        let mut found = BTreeSet::new();
        for entry in std::fs::read_dir("/proc/self/task").context("/proc is not there")? {
            found.extend(entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
        }
        if found == earlier {
            return Ok(found);
        }
        earlier = found;
    }
}

/// What those of these threads that are wanted by name have done since: threads that are new count from
/// their beginning.
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

fn look(thread: i32) -> Option<Thread> {
    let read = |file| std::fs::read_to_string(format!("/proc/self/task/{thread}/{file}")).ok();
    let (stat, status, name) = (read("stat")?, read("status")?, read("comm")?);
    // The name, in parentheses, may have spaces; the third field comes after it.
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

/// To the nanosecond, where `/proc` counts in ticks of 10 ms.
fn cpu_of(thread: i32) -> Option<Duration> {
    // How Linux makes a clock of a thread's number: all its bits flipped, before three that say
    // what is counted.
    const PER_THREAD: i32 = 4;
    const RUN_TIME: i32 = 2;
    let clock = (!thread << 3) | PER_THREAD | RUN_TIME;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is there to be filled.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (result == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_work_is_seen_and_can_be_left_out() {
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
    fn a_thread_runs_when_idle() {
        std::thread::spawn(run_when_idle).join().unwrap().unwrap();
    }
}
