//! How many bytes of a stream may be on their way.
//!
//! QEMU stops its guest when the rest can be sent within the downtime limit, at the rate at which
//! its socket took the data. What is on its way after that socket adds to the downtime, so it is
//! bounded by time: what the peer places in two of the shortest round trips and
//! [`SPAN`](self::SPAN).

use std::time::{Duration, Instant};

use super::MAX_WINDOW_BYTES;

/// Data on its way for this long, in addition to the round trips, keeps the threads of both sides
/// busy.
const SPAN: Duration = Duration::from_millis(20);

/// Always allowed: three full pieces, so that one is read, one sent and one written.
const LEAST_BYTES: usize = 1 << 20;

/// Never more, so that the last piece and the tables of all frames fit the window as well.
const MOST_BYTES: usize = MAX_WINDOW_BYTES - (1 << 20);

/// The rate is measured over at least this time.
const MEASURED: Duration = Duration::from_millis(50);

/// The weight of the newest measurement in the average.
const NEWEST: f64 = 0.5;

/// Measures how fast the peer places frames.
#[derive(Debug)]
pub struct Pace {
    /// Bytes per second.
    rate: Option<f64>,
    round_trip: Duration,
    /// A frame whose way is timed: its number, and when it was sent.
    timed: Option<(u64, Instant)>,
    since: Option<Instant>,
    bytes: usize,
}

impl Default for Pace {
    fn default() -> Self {
        let (rate, timed, since) = (None, None, None);
        Self { rate, round_trip: Duration::MAX, timed, since, bytes: 0 }
    }
}

impl Pace {
    /// The most bytes on their way.
    pub fn limit(&self) -> usize {
        let Some(rate) = self.rate else { return LEAST_BYTES };
        let span = 2.0 * self.round_trip.min(Duration::from_secs(1)).as_secs_f64();
        let bytes = rate * (span + SPAN.as_secs_f64());
        (bytes as usize).clamp(LEAST_BYTES, MOST_BYTES)
    }

    /// Bytes per second that the peer has placed lately.
    pub fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// A frame is being sent. `alone` says that nothing else is on its way.
    pub fn sent(&mut self, now: Instant, number: u64, alone: bool) {
        self.timed.get_or_insert((number, now));
        if alone || self.since.is_none() {
            (self.since, self.bytes) = (Some(now), 0);
        }
    }

    /// All frames up to `number` are placed, these bytes more than before.
    pub fn placed(&mut self, now: Instant, number: u64, bytes: usize) {
        if let Some((timed, sent)) = self.timed
            && number >= timed
        {
            self.round_trip = self.round_trip.min(now - sent);
            self.timed = None;
        }
        self.bytes += bytes;
        let Some(since) = self.since else { return };
        let took = now - since;
        if took >= MEASURED {
            let newest = self.bytes as f64 / took.as_secs_f64();
            self.rate = Some(self.rate.map_or(newest, |rate| rate + NEWEST * (newest - rate)));
            (self.since, self.bytes) = (Some(now), 0);
        }
    }

    /// The link was lost.
    pub fn interrupted(&mut self) {
        (self.timed, self.since, self.bytes) = (None, None, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places `bytes_per_s` for a second, with this round trip.
    fn run(bytes_per_s: usize, round_trip: Duration) -> Pace {
        let (mut pace, start) = (Pace::default(), Instant::now());
        for step in 0..100 {
            let now = start + Duration::from_millis(10) * step;
            pace.sent(now, step.into(), step == 0);
            pace.placed(now + round_trip, step.into(), bytes_per_s / 100);
        }
        pace
    }

    #[test]
    fn slow_link_has_the_least_window() {
        let pace = run(10 << 20, Duration::from_millis(1));
        assert_eq!(pace.limit(), LEAST_BYTES);
        assert_eq!(Pace::default().limit(), LEAST_BYTES);
    }

    #[test]
    fn window_grows_with_rate_and_round_trip() {
        let near = run(1 << 30, Duration::from_millis(1)).limit();
        assert!((20 << 20..32 << 20).contains(&near), "{near}");
        let far = run(200 << 20, Duration::from_millis(30)).limit();
        assert!((12 << 20..24 << 20).contains(&far), "{far}");
    }
}
