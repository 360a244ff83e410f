//! How many bytes a tunnel has in flight.
//!
//! Bytes in the background must not build up a queue in which bytes of the other tunnel wait, which
//! threads wait for. So their window follows the time until they are acknowledged: as long as that
//! is within 2 ms of the fastest lately, it grows. The same rule as for background pages.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How much longer than the fastest acknowledgement one may take.
const QUEUE: Duration = Duration::from_millis(2);

/// The smallest window in bytes.
const LEAST_BYTES: f64 = (128 << 10) as f64;

/// The largest window in bytes.
const MOST_BYTES: f64 = super::BUFFER_BYTES as f64;

/// How long the fastest acknowledgement is remembered, at least: the link may become longer.
const MEMORY: Duration = Duration::from_secs(2);

/// By how much of itself the window grows in a round trip, once it has filled the link.
const LATER_GROWTH: f64 = 0.05;

/// The window, and the bytes in flight.
#[derive(Debug)]
pub struct Flight {
    window_bytes: f64,
    is_paced: bool,
    /// There was a queue on this channel.
    has_queued: bool,
    /// The ends of the parts in flight, and when they were sent.
    sent: VecDeque<(u64, Instant)>,
    fastest: Fastest,
}

/// The fastest acknowledgement of this period and of the one before.
#[derive(Debug, Default)]
struct Fastest {
    now: Option<Duration>,
    before: Option<Duration>,
    since: Option<Instant>,
}

impl Flight {
    /// As much as fits the buffer.
    #[must_use]
    pub fn unlimited() -> Self {
        let (sent, fastest) = (VecDeque::new(), Fastest::default());
        Self { window_bytes: MOST_BYTES, is_paced: false, has_queued: false, sent, fastest }
    }

    /// As much as leaves the queue on the way short.
    #[must_use]
    pub fn paced() -> Self {
        Self { window_bytes: LEAST_BYTES, is_paced: true, ..Self::unlimited() }
    }

    /// The window in bytes.
    #[must_use]
    pub fn window(&self) -> usize {
        self.window_bytes as usize
    }

    /// How many more bytes may be sent while this number is in flight.
    #[must_use]
    pub fn room(&self, in_flight: u64) -> usize {
        (self.window_bytes as u64).saturating_sub(in_flight) as usize
    }

    /// All bytes before `end` are sent.
    pub fn sent(&mut self, end: u64, now: Instant) {
        if self.is_paced {
            self.sent.push_back((end, now));
        }
    }

    /// All bytes before `end` were received, `bytes` of them since the last time.
    pub fn acknowledged(&mut self, end: u64, bytes: u64, now: Instant) {
        let mut sent_at = None;
        while let Some((sent, at)) = self.sent.front()
            && *sent <= end
        {
            sent_at = Some(*at);
            self.sent.pop_front();
        }
        let Some(sent_at) = sent_at else { return };
        let after = now.saturating_duration_since(sent_at);
        let fastest = self.fastest.take(after, now);
        let queue = (after - fastest).as_secs_f64() / QUEUE.as_secs_f64();
        self.has_queued |= queue > 1.0;
        // Halves in a round trip at most, and doubles until there is a queue for the first time.
        let growth = if self.has_queued { LATER_GROWTH } else { 1.0 };
        let change = bytes as f64 * (1.0 - queue).clamp(-0.5, growth);
        self.window_bytes = (self.window_bytes + change).clamp(LEAST_BYTES, MOST_BYTES);
    }

    /// The channel is another one.
    pub fn restart(&mut self) {
        self.sent.clear();
        self.has_queued = false;
        self.fastest = Fastest::default();
        if self.is_paced {
            self.window_bytes = LEAST_BYTES;
        }
    }
}

impl Fastest {
    /// Notes an acknowledgement, and returns the fastest one.
    fn take(&mut self, after: Duration, now: Instant) -> Duration {
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) >= MEMORY {
            (self.before, self.now, self.since) = (self.now, None, Some(now));
        }
        let latest = self.now.map_or(after, |known| known.min(after));
        self.now = Some(latest);
        self.before.map_or(latest, |before| before.min(latest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets a tunnel send over a link for some simulated seconds. Returns bytes per second and the
    /// last acknowledgement's time.
    fn run(bytes_per_s: f64, round_trip: f64) -> (f64, f64) {
        const PART: u64 = 64 << 10;
        let (mut flight, mut way) = (Flight::paced(), VecDeque::new());
        let begun = Instant::now();
        let at = |seconds: f64| begun + Duration::from_secs_f64(seconds);
        let (mut sent, mut received, mut now, mut free_at, mut done, mut last) =
            (0_u64, 0_u64, 0.0, 0.0, 0, 0.0);
        while now < 10.0 {
            while flight.room(sent - received) >= PART as usize {
                free_at = f64::max(free_at, now + round_trip / 2.0) + PART as f64 / bytes_per_s;
                sent += PART;
                way.push_back((sent, now, free_at + round_trip / 2.0));
                flight.sent(sent, at(now));
            }
            let (end, since, comes) = way.pop_front().unwrap();
            (now, last) = (comes, comes - since);
            flight.acknowledged(end, end - received, at(now));
            received = end;
            done += if now > 5.0 { PART } else { 0 };
        }
        (done as f64 / 5.0, last)
    }

    #[test]
    fn window_fills_the_link_and_keeps_the_queue_short() {
        for (bytes_per_s, round_trip) in [(40e6, 0.0001), (40e6, 0.05), (1e9, 0.0001), (1e9, 0.005)]
        {
            let (rate, answer) = run(bytes_per_s, round_trip);
            let link = format!("{bytes_per_s} bytes/s, round trip {round_trip} s");
            assert!(rate > 0.7 * bytes_per_s, "{link}: {rate} bytes/s");
            // The least window takes 3.3 ms on the slower link.
            let queue = answer - round_trip;
            assert!(queue < 0.01, "{link}: a queue of {queue} s");
        }
    }

    #[test]
    fn urgent_bytes_fill_the_buffer() {
        let flight = Flight::unlimited();
        assert_eq!(flight.room(0), super::super::BUFFER_BYTES);
        assert_eq!(flight.room(u64::MAX), 0);
    }
}
