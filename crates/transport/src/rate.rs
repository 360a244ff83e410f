//! A limit for the total rate of several channels.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// A token bucket in bytes. Clones share it.
///
/// A caller waits until the bytes taken before its own have been sent at the limited rate, minus a
/// burst of 10 ms. A piece is never split: a long one passes at once, and the next piece waits for
/// it.
#[derive(Clone, Debug)]
pub struct RateLimiter(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// No limit and not closed, so no caller waits.
    free: AtomicBool,
    gate: Mutex<Gate>,
    changed: Condvar,
    started: Instant,
}

#[derive(Debug)]
struct Gate {
    bucket: Bucket,
    closed: bool,
}

impl RateLimiter {
    /// A limit in bytes per second, at least 1. `None` means no limit and costs nothing.
    #[must_use]
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self(Arc::new(Shared {
            free: AtomicBool::new(bytes_per_s.is_none()),
            gate: Mutex::new(Gate { bucket: Bucket::new(bytes_per_s), closed: false }),
            changed: Condvar::new(),
            started: Instant::now(),
        }))
    }

    /// Waits until `bytes` bytes may be sent. Returns `false` once the limiter is closed.
    #[must_use]
    pub fn take(&self, bytes: u64) -> bool {
        let shared = &*self.0;
        if shared.free.load(Ordering::Acquire) {
            return true;
        }
        let mut gate = shared.gate.lock();
        let ticket = gate.bucket.take(shared.started.elapsed(), bytes);
        loop {
            if gate.closed {
                return false;
            }
            let wait = gate.bucket.wait(shared.started.elapsed(), ticket);
            if wait.is_zero() {
                return true;
            }
            shared.changed.wait_for(&mut gate, wait);
        }
    }

    /// Changes the limit, also for callers that are already waiting.
    pub fn set_rate(&self, bytes_per_s: Option<u64>) {
        let mut gate = self.0.gate.lock();
        gate.bucket.set_rate(self.0.started.elapsed(), bytes_per_s);
        self.0.free.store(bytes_per_s.is_none() && !gate.closed, Ordering::Release);
        self.0.changed.notify_all();
    }

    /// Ends every wait permanently.
    pub fn close(&self) {
        let mut gate = self.0.gate.lock();
        gate.closed = true;
        self.0.free.store(false, Ordering::Release);
        self.0.changed.notify_all();
    }
}

/// How much may be sent at once after an idle period. 10 ms keeps the link evenly loaded.
const BURST: Duration = Duration::from_millis(10);

const NANOS: u128 = 1_000_000_000;

/// The arithmetic, in integers. Times count from a fixed start.
///
/// Byte counts are multiplied by 10^9, so that a rate times nanoseconds needs no division. The sums
/// stay far below 2^128: 2^64 bytes become less than 2^94.
#[derive(Debug)]
struct Bucket {
    bytes_per_s: Option<u64>,
    /// Total bytes taken.
    taken: u128,
    /// The part of them that has been sent at the limited rate.
    sent: u128,
    /// The time at which `sent` was computed.
    at: Duration,
}

impl Bucket {
    fn new(bytes_per_s: Option<u64>) -> Self {
        let bytes_per_s = bytes_per_s.map(|rate| rate.max(1));
        Self { bytes_per_s, taken: 0, sent: 0, at: Duration::ZERO }
    }

    fn set_rate(&mut self, now: Duration, bytes_per_s: Option<u64>) {
        self.advance(now);
        self.bytes_per_s = bytes_per_s.map(|rate| rate.max(1));
    }

    /// Takes bytes. Pass the returned ticket to [`wait`](Self::wait).
    fn take(&mut self, now: Duration, bytes: u64) -> u128 {
        self.advance(now);
        let ticket = self.taken;
        self.taken = self.taken.saturating_add(u128::from(bytes) * NANOS);
        ticket
    }

    /// The time to wait from now until the ticket's bytes may be sent.
    fn wait(&mut self, now: Duration, ticket: u128) -> Duration {
        self.advance(now);
        let Some(rate) = self.bytes_per_s else { return Duration::ZERO };
        let missing = ticket.saturating_sub(self.sent + u128::from(rate) * BURST.as_nanos());
        let nanos = missing.div_ceil(u128::from(rate));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn advance(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_nanos();
        self.at = self.at.max(now);
        self.sent = match self.bytes_per_s {
            // Unused capacity is not saved up.
            Some(rate) => {
                self.sent.saturating_add(u128::from(rate).saturating_mul(passed)).min(self.taken)
            }
            None => self.taken,
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Sends pieces, each after its pause and its wait, on a simulated clock.
    fn send(bucket: &mut Bucket, pieces: &[(u64, u64)]) -> Vec<(Duration, u64)> {
        let mut now = Duration::ZERO;
        let mut sent = Vec::new();
        for &(pause, bytes) in pieces {
            now += Duration::from_nanos(pause);
            let ticket = bucket.take(now, bytes);
            now += bucket.wait(now, ticket);
            assert_eq!(bucket.wait(now, ticket), Duration::ZERO, "one wait is enough");
            sent.push((now, bytes));
        }
        sent
    }

    proptest! {
        #[test]
        fn bucket_exceeds_the_rate_by_at_most_a_burst_and_a_piece(
            rate in 1..10_000_000_000_u64,
            pieces in prop::collection::vec((0..50_000_000_u64, 0..2_000_000_u64), 1..60),
        ) {
            let sent = send(&mut Bucket::new(Some(rate)), &pieces);
            for first in 0..sent.len() {
                let mut before_last = 0_u128;
                for last in first..sent.len() {
                    let window = (sent[last].0 - sent[first].0 + BURST).as_nanos();
                    prop_assert!(before_last * NANOS <= u128::from(rate) * window);
                    before_last += u128::from(sent[last].1);
                }
            }
        }

        #[test]
        fn bucket_gives_a_busy_sender_the_whole_rate(
            rate in 1_000..10_000_000_000_u64,
            pieces in prop::collection::vec(1..2_000_000_u64, 2..60),
        ) {
            let pieces: Vec<_> = pieces.into_iter().map(|bytes| (0, bytes)).collect();
            let sent = send(&mut Bucket::new(Some(rate)), &pieces);
            let (last, bytes) = sent[sent.len() - 1];
            let all: u128 = sent.iter().map(|&(_, bytes)| u128::from(bytes)).sum();
            let due = ((all - u128::from(bytes)) * NANOS).div_ceil(u128::from(rate));
            // Each wait is rounded up to a nanosecond.
            prop_assert!(last.as_nanos() <= due + sent.len() as u128);
        }
    }

    #[test]
    fn bucket_handles_the_largest_numbers() {
        for rate in [0, 1, u64::MAX] {
            let mut bucket = Bucket::new(Some(rate));
            for _ in 0..3 {
                let ticket = bucket.take(Duration::MAX, u64::MAX);
                bucket.wait(Duration::MAX, ticket);
            }
        }
    }

    #[test]
    fn limiter_keeps_to_the_rate_and_one_burst() {
        let limiter = RateLimiter::new(Some(1_000_000));
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..10).for_each(|_| assert!(limiter.take(10_000))));
            }
        });
        // 200 KB at 1 MB/s: the last 10 KB start after 190 ms, minus the burst.
        assert!(begun.elapsed() >= Duration::from_millis(179));
    }

    #[test]
    fn limiter_close_ends_the_wait() {
        let limiter = RateLimiter::new(Some(1));
        assert!(limiter.take(1_000_000));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limiter.take(1));
            limiter.close();
            assert!(!waiting.join().unwrap());
        });
        limiter.set_rate(None);
        assert!(!limiter.take(1), "the limiter stays closed");
    }

    #[test]
    fn limiter_applies_a_new_rate_to_waiting_callers() {
        let limiter = RateLimiter::new(Some(1));
        assert!(limiter.take(1_000_000));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limiter.take(1));
            limiter.set_rate(Some(u64::MAX));
            assert!(waiting.join().unwrap());
        });
    }

    #[test]
    fn limiter_without_limit_never_waits() {
        let limiter = RateLimiter::new(None);
        assert!(limiter.take(u64::MAX));
        limiter.close();
        assert!(!limiter.take(1));
    }
}
