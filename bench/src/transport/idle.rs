//! Idle CPU time of the machine, as `top` reports it.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

/// Interval between two readings. Linux counts in hundredths of a second per processor, so with two
/// processors a reading is accurate to 5 percent.
const PERIOD: Duration = Duration::from_millis(100);

/// Idle time in percent of the machine's processors.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// The minimum over a tenth of a second.
    pub min: f64,
    /// The maximum over a tenth of a second.
    pub max: f64,
    /// The mean over the whole time.
    pub mean: f64,
}

/// A thread that reads the idle time periodically.
pub struct IdleWatch {
    stop: Sender<()>,
    thread: JoinHandle<anyhow::Result<Idle>>,
}

impl IdleWatch {
    /// Starts the thread.
    pub fn start() -> Self {
        let (stop, stopped) = mpsc::channel();
        let watch = move || {
            let first = Times::now()?;
            let (mut last, mut readings) = ((first, Instant::now()), Vec::new());
            loop {
                let is_over = stopped.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout);
                let now = (Times::now()?, Instant::now());
                // A short last interval would be inaccurate.
                if now.1 - last.1 >= PERIOD / 2 {
                    readings.extend(now.0.idle_percent_since(last.0));
                    last = now;
                }
                if is_over {
                    let mean = now.0.idle_percent_since(first);
                    return Ok(idle(&readings, mean.or(readings.first().copied()).unwrap_or(0.0)));
                }
            }
        };
        Self { stop, thread: std::thread::spawn(watch) }
    }

    /// Stops the thread and returns the result.
    ///
    /// # Errors
    /// `/proc/stat` could not be read.
    pub fn finish(self) -> anyhow::Result<Idle> {
        drop(self.stop);
        self.thread.join().map_err(|_| anyhow!("a thread panicked"))?
    }
}

fn idle(readings: &[f64], mean: f64) -> Idle {
    let min = readings.iter().copied().fold(mean, f64::min);
    let max = readings.iter().copied().fold(mean, f64::max);
    Idle { min, max, mean }
}

/// CPU times of all processors since boot, in hundredths of a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Times {
    idle: u64,
    all: u64,
}

impl Times {
    fn now() -> anyhow::Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat").context("could not read /proc/stat")?;
        Self::parse(&stat).context("/proc/stat has an unknown format")
    }

    fn parse(stat: &str) -> Option<Self> {
        let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        // user, nice, system, idle, iowait, irq, softirq, steal. User time includes guest time.
        let times: Vec<u64> = fields.take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        let idle = times.get(3)? + times.get(4)?;
        Some(Self { idle, all: times.iter().sum() })
    }

    /// Returns `None` if no time has passed.
    fn idle_percent_since(self, earlier: Self) -> Option<f64> {
        let all = self.all.checked_sub(earlier.all).filter(|all| *all > 0)?;
        // Linux's idle time can decrease.
        Some(100.0 * self.idle.saturating_sub(earlier.idle) as f64 / all as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_count_iowait_as_idle_and_guest_time_once() {
        let parse = |text: &str| Times::parse(text).unwrap();
        let before = parse("cpu  100 0 50 800 50 0 0 0 70 0\ncpu0 1 2 3\n");
        assert_eq!(before, Times { idle: 850, all: 1000 });
        let now = parse("cpu  110 5 60 860 60 2 3 10 75 0\n");
        assert_eq!(now.idle_percent_since(before), Some(100.0 * 70.0 / 110.0));
        assert_eq!(now.idle_percent_since(now), None);
        assert_eq!(Times::parse("intr 5"), None);
    }

    #[test]
    fn idle_watch_reports_even_after_a_short_time() {
        let idle = IdleWatch::start().finish().unwrap();
        assert!(idle.min <= idle.mean && idle.mean <= idle.max && idle.max <= 100.0, "{idle:?}");
    }
}
