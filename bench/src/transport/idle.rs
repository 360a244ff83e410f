//! How idle the machine's processors are, as `top` says it.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

/// Between two looks. Linux counts in hundredths of a second for each processor, so on two a look is right to 5
/// per cent.
const PERIOD: Duration = Duration::from_millis(100);

/// Idle time in per cent of the machine's.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// The least in a tenth of a second.
    pub min: f64,
    /// The most.
    pub max: f64,
    /// Over all the time.
    pub mean: f64,
}

/// Looks from time to time, in a thread that sleeps meanwhile.
pub struct IdleWatch {
    stop: Sender<()>,
    thread: JoinHandle<anyhow::Result<Idle>>,
}

impl IdleWatch {
    /// Begins.
    pub fn start() -> Self {
        let (stop, stopped) = mpsc::channel();
        let watch = move || {
            let first = Times::now()?;
            let (mut last, mut looks) = ((first, Instant::now()), Vec::new());
            loop {
                let is_over = stopped.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout);
                let now = (Times::now()?, Instant::now());
                // A short rest at the end says little.
                if now.1 - last.1 >= PERIOD / 2 {
                    looks.extend(now.0.idle_percent_since(last.0));
                    last = now;
                }
                if is_over {
                    let mean = now.0.idle_percent_since(first);
                    return Ok(idle(&looks, mean.or(looks.first().copied()).unwrap_or(0.0)));
                }
            }
        };
        Self { stop, thread: std::thread::spawn(watch) }
    }

    /// What was seen.
    ///
    /// # Errors
    /// No `/proc/stat`.
    pub fn finish(self) -> anyhow::Result<Idle> {
        drop(self.stop);
        self.thread.join().map_err(|_| anyhow!("a thread has failed"))?
    }
}

fn idle(looks: &[f64], mean: f64) -> Idle {
    let min = looks.iter().copied().fold(mean, f64::min);
    let max = looks.iter().copied().fold(mean, f64::max);
    Idle { min, max, mean }
}

/// Of all processors since the machine was started, in hundredths of a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Times {
    idle: u64,
    all: u64,
}

impl Times {
    fn now() -> anyhow::Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat").context("no /proc/stat")?;
        Self::parse(&stat).context("/proc/stat is not understood")
    }

    fn parse(stat: &str) -> Option<Self> {
        let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        // user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in user's once more.
        let times: Vec<u64> = fields.take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        let idle = times.get(3)? + times.get(4)?;
        Some(Self { idle, all: times.iter().sum() })
    }

    /// Nothing, if no time has passed.
    fn idle_percent_since(self, earlier: Self) -> Option<f64> {
        let all = self.all.checked_sub(earlier.all).filter(|all| *all > 0)?;
        // Linux may count idle time back.
        Some(100.0 * self.idle.saturating_sub(earlier.idle) as f64 / all as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_disk_is_idle_and_a_guests_time_counts_once() {
        let parse = |text: &str| Times::parse(text).unwrap();
        let before = parse("cpu  100 0 50 800 50 0 0 0 70 0\ncpu0 1 2 3\n");
        assert_eq!(before, Times { idle: 850, all: 1000 });
        let now = parse("cpu  110 5 60 860 60 2 3 10 75 0\n");
        assert_eq!(now.idle_percent_since(before), Some(100.0 * 70.0 / 110.0));
        assert_eq!(now.idle_percent_since(now), None);
        assert_eq!(Times::parse("intr 5"), None);
    }

    #[test]
    fn a_watch_that_is_short_says_something_all_the_same() {
        let idle = IdleWatch::start().finish().unwrap();
        assert!(idle.min <= idle.mean && idle.mean <= idle.max && idle.max <= 100.0, "{idle:?}");
    }
}
