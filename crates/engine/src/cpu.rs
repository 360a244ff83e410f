//! CPU time of the engine's threads, without the guest's vCPUs in the same process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sums up the CPU time of threads that have ended, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct CpuMeter(Arc<AtomicU64>);

impl CpuMeter {
    /// Counts the calling thread from now until the guard is dropped.
    #[must_use]
    pub fn count_this_thread(&self) -> CpuGuard {
        CpuGuard { meter: self.clone(), since: thread_nanoseconds() }
    }

    /// CPU seconds of all guards dropped so far.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.0.load(Ordering::Relaxed) as f64 / 1e9
    }
}

/// Counts a thread until it is dropped.
#[derive(Debug)]
pub struct CpuGuard {
    meter: CpuMeter,
    since: u64,
}

impl Drop for CpuGuard {
    fn drop(&mut self) {
        let used = thread_nanoseconds().saturating_sub(self.since);
        self.meter.0.fetch_add(used, Ordering::Relaxed);
    }
}

fn thread_nanoseconds() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_meter_counts_the_work_of_a_thread() {
        let meter = CpuMeter::default();
        let guard = meter.count_this_thread();
        let mut sum = 0_u64;
        while thread_nanoseconds() - guard.since < 2_000_000 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        drop(guard);
        assert!(meter.seconds() >= 0.002, "{sum}");
    }
}
