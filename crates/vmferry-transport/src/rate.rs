//! A cap on what several channels send together.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How much of a rate may be sent at once after a quiet time: 10 ms keeps the link even.
const BURST: Duration = Duration::from_millis(10);

/// A token bucket in bytes, shared by its clones.
#[derive(Clone, Debug)]
pub struct RateLimiter(Option<Arc<Bucket>>);

#[derive(Debug)]
struct Bucket {
    bytes_per_s: f64,
    state: Mutex<State>,
    closed: Condvar,
}

#[derive(Debug)]
struct State {
    /// When everything taken so far will have been sent at the capped rate.
    sent_at: Instant,
    closed: bool,
}

impl RateLimiter {
    /// A cap in bytes per second; `None` costs nothing.
    #[must_use]
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self(bytes_per_s.map(|rate| {
            Arc::new(Bucket {
                bytes_per_s: rate.max(1) as f64,
                state: Mutex::new(State { sent_at: Instant::now(), closed: false }),
                closed: Condvar::new(),
            })
        }))
    }

    /// Waits until so many bytes may be sent. `false` once it is closed.
    #[must_use]
    pub fn take(&self, bytes: u64) -> bool {
        let Some(bucket) = &self.0 else { return true };
        let cost = Duration::from_secs_f64(bytes as f64 / bucket.bytes_per_s);
        let mut state = bucket.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let begins = state.sent_at.max(now.checked_sub(BURST).unwrap_or(now));
        state.sent_at = begins + cost;
        loop {
            if state.closed {
                return false;
            }
            let wait = begins.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                return true;
            }
            state =
                bucket.closed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends every wait, now and for good.
    pub fn close(&self) {
        if let Some(bucket) = &self.0 {
            bucket.state.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
            bucket.closed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_rate_and_one_burst_is_let_through() {
        let limiter = RateLimiter::new(Some(1_000_000));
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..10).for_each(|_| assert!(limiter.take(10_000))));
            }
        });
        // 200 KB at 1 MB/s: the last 10 KB begin after 190 ms, less the burst.
        assert!(begun.elapsed() >= Duration::from_millis(179));
    }

    #[test]
    fn closing_ends_the_wait() {
        let limiter = RateLimiter::new(Some(1));
        assert!(limiter.take(1_000_000));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limiter.take(1));
            limiter.close();
            assert!(!waiting.join().unwrap());
        });
    }

    #[test]
    fn no_cap_lets_everything_through() {
        assert!(RateLimiter::new(None).take(u64::MAX));
    }
}
