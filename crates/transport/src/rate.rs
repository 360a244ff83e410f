//! A cap on what several channels send together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A token bucket in bytes, shared by its clones.
///
/// Whoever takes bytes waits until those taken before are through at the capped rate, less a burst
/// of 10 ms; a piece is never split, so a long one is let through whole and paid for by the next.
#[derive(Clone, Debug)]
pub struct RateLimiter(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Neither capped nor closed: nothing to wait for.
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
    /// A cap in bytes per second, at least 1; `None` costs nothing.
    #[must_use]
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self(Arc::new(Shared {
            free: AtomicBool::new(bytes_per_s.is_none()),
            gate: Mutex::new(Gate { bucket: Bucket::new(bytes_per_s), closed: false }),
            changed: Condvar::new(),
            started: Instant::now(),
        }))
    }

    /// Waits until so many bytes may be sent. `false` once it is closed.
    #[must_use]
    pub fn take(&self, bytes: u64) -> bool {
        let shared = &*self.0;
        if shared.free.load(Ordering::Acquire) {
            return true;
        }
        let mut gate = shared.gate();
        let ticket = gate.bucket.take(shared.started.elapsed(), bytes);
        loop {
            if gate.closed {
                return false;
            }
            let wait = gate.bucket.wait(shared.started.elapsed(), ticket);
            if wait.is_zero() {
                return true;
            }
            let waited = shared.changed.wait_timeout(gate, wait);
            gate = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Changes the cap, for those who wait already too.
    pub fn set_rate(&self, bytes_per_s: Option<u64>) {
        let mut gate = self.0.gate();
        gate.bucket.set_rate(self.0.started.elapsed(), bytes_per_s);
        self.0.free.store(bytes_per_s.is_none() && !gate.closed, Ordering::Release);
        self.0.changed.notify_all();
    }

    /// Ends every wait, now and for good.
    pub fn close(&self) {
        let mut gate = self.0.gate();
        gate.closed = true;
        self.0.free.store(false, Ordering::Release);
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How much of a rate may be sent at once after a quiet time: 10 ms keeps the link even.
const BURST: Duration = Duration::from_millis(10);

const NANOS: u128 = 1_000_000_000;

/// The arithmetic, in whole numbers; times are since some start.
///
/// Byte counts are times 10^9, so that a rate times nanoseconds needs no division. The sums stay
/// far below 2^128: 2^64 bytes are less than 2^94 of them.
#[derive(Debug)]
struct Bucket {
    bytes_per_s: Option<u64>,
    /// Taken in all.
    taken: u128,
    /// Of those, what is through at the capped rate.
    through: u128,
    /// When that was so.
    at: Duration,
}

impl Bucket {
    fn new(bytes_per_s: Option<u64>) -> Self {
        let bytes_per_s = bytes_per_s.map(|rate| rate.max(1));
        Self { bytes_per_s, taken: 0, through: 0, at: Duration::ZERO }
    }

    fn set_rate(&mut self, now: Duration, bytes_per_s: Option<u64>) {
        self.advance(now);
        self.bytes_per_s = bytes_per_s.map(|rate| rate.max(1));
    }

    /// Takes bytes; they may be sent when [`wait`](Self::wait) says so of the ticket.
    fn take(&mut self, now: Duration, bytes: u64) -> u128 {
        self.advance(now);
        let ticket = self.taken;
        self.taken = self.taken.saturating_add(u128::from(bytes) * NANOS);
        ticket
    }

    /// How long to wait from now on.
    fn wait(&mut self, now: Duration, ticket: u128) -> Duration {
        self.advance(now);
        let Some(rate) = self.bytes_per_s else { return Duration::ZERO };
        let missing = ticket.saturating_sub(self.through + u128::from(rate) * BURST.as_nanos());
        let nanos = missing.div_ceil(u128::from(rate));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn advance(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_nanos();
        self.at = self.at.max(now);
        self.through = match self.bytes_per_s {
            // What is not taken now is not saved up.
            Some(rate) => {
                self.through.saturating_add(u128::from(rate).saturating_mul(passed)).min(self.taken)
            }
            None => self.taken,
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Sends the pieces, each after its pause and its wait, on a clock that only they move.
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
        fn no_window_exceeds_the_rate_by_more_than_a_burst_and_a_piece(
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
        fn a_busy_sender_gets_the_whole_rate(
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
    fn no_number_is_too_big() {
        for rate in [0, 1, u64::MAX] {
            let mut bucket = Bucket::new(Some(rate));
            for _ in 0..3 {
                let ticket = bucket.take(Duration::MAX, u64::MAX);
                bucket.wait(Duration::MAX, ticket);
            }
        }
    }

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
        limiter.set_rate(None);
        assert!(!limiter.take(1), "for good");
    }

    #[test]
    fn those_who_wait_follow_a_new_rate() {
        let limiter = RateLimiter::new(Some(1));
        assert!(limiter.take(1_000_000));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limiter.take(1));
            limiter.set_rate(Some(u64::MAX));
            assert!(waiting.join().unwrap());
        });
    }

    #[test]
    fn no_cap_lets_everything_through() {
        let limiter = RateLimiter::new(None);
        assert!(limiter.take(u64::MAX));
        limiter.close();
        assert!(!limiter.take(1));
    }
}
