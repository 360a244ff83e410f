//! How many background pages to have outstanding on a fetch lane.
//!
//! Too few leave the link idle. Too many wait in queues on the way, and a page that a vCPU waits
//! for shares those queues, although it has a channel of its own. So the window follows the time
//! until an answer comes: as long as that is within 2 ms of the fastest answer, the window grows.

use std::time::Duration;

/// How much longer than the fastest answer an answer may take: the queue that is built up on
/// purpose, so that the link is never idle.
const QUEUE: Duration = Duration::from_millis(2);

/// The smallest window in pages.
const LEAST_PAGES: f64 = 16.0;

/// The largest window in pages: 64 MiB, as for all lanes of pre-copy together.
const MOST_PAGES: f64 = 16384.0;

/// Sending the pages of a request takes about this long: less than the queue that is aimed at.
const REQUEST_TIME: Duration = Duration::from_millis(1);

/// A request is for this part of the window at most, so that a few are outstanding.
const REQUESTS: f64 = 4.0;

/// The fewest and the most pages of a request.
const REQUEST_PAGES: (f64, f64) = (4.0, vmferry_wire::MAX_REQUEST_PAGES as f64);

/// How often the fastest answer is measured again: the link may have become longer, and a queue
/// that never empties hides how long it is.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// The window of one lane. Times count from any fixed start.
#[derive(Debug)]
pub struct Pace {
    window_pages: f64,
    /// The fastest answer since the last probe, once there was one.
    fastest: Option<Duration>,
    /// The last answer.
    latest: Option<Duration>,
    probe: Probe,
    next_probe: Duration,
}

/// Whether the fastest answer is being measured: by one small request on an idle lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    None,
    /// Nothing is requested until all answers have come.
    Draining,
    /// The request was made.
    Sent,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            window_pages: LEAST_PAGES,
            fastest: None,
            latest: None,
            probe: Probe::None,
            next_probe: PROBE_INTERVAL,
        }
    }
}

impl Pace {
    /// The number of pages to request next while this number of pages is outstanding. `None` while
    /// the window is full.
    pub fn next_pages(&self, outstanding: u64) -> Option<u64> {
        let (fewest, most) = REQUEST_PAGES;
        match self.probe {
            Probe::None => {}
            Probe::Draining if outstanding == 0 => return Some(fewest as u64),
            Probe::Draining | Probe::Sent => return None,
        }
        // Sending a window takes as long as its answers.
        let sent_in_a_while = self.latest.map_or(fewest, |latest| {
            self.window_pages * REQUEST_TIME.as_secs_f64() / latest.as_secs_f64().max(1e-6)
        });
        let pages = (self.window_pages / REQUESTS).min(sent_in_a_while).clamp(fewest, most) as u64;
        (outstanding + pages <= self.window_pages as u64).then_some(pages)
    }

    /// Pages were requested.
    pub fn requested(&mut self) {
        if self.probe == Probe::Draining {
            self.probe = Probe::Sent;
        }
    }

    /// An answer of some pages has come at `now`, this long after its request.
    pub fn answered(&mut self, now: Duration, after: Duration, pages: u64) {
        self.latest = Some(after);
        if self.probe == Probe::Sent {
            (self.probe, self.fastest) = (Probe::None, Some(after));
            self.next_probe = now + PROBE_INTERVAL;
            return;
        }
        let fastest = self.fastest.map_or(after, |known| known.min(after));
        self.fastest = Some(fastest);
        if now >= self.next_probe {
            self.probe = Probe::Draining;
        }
        let queue = (after - fastest).as_secs_f64() / QUEUE.as_secs_f64();
        // Doubles in a round trip while there is no queue, and halves at most.
        let change = pages as f64 * (1.0 - queue).max(-0.5);
        self.window_pages = (self.window_pages + change).clamp(LEAST_PAGES, MOST_PAGES);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Lets a lane run over a link for some simulated seconds. Returns pages per second and the
    /// last answer's time.
    fn run(pages_per_s: f64, round_trip: f64) -> (f64, f64) {
        let (mut pace, mut out) = (Pace::default(), VecDeque::new());
        let (mut outstanding, mut now, mut free_at, mut done, mut last) = (0, 0.0, 0.0, 0, 0.0);
        while now < 10.0 {
            while let Some(pages) = pace.next_pages(outstanding) {
                free_at = f64::max(free_at, now + round_trip / 2.0) + pages as f64 / pages_per_s;
                out.push_back((pages, now, free_at + round_trip / 2.0));
                outstanding += pages;
                pace.requested();
            }
            let (pages, asked, comes) = out.pop_front().unwrap();
            now = comes;
            outstanding -= pages;
            last = comes - asked;
            pace.answered(Duration::from_secs_f64(now), Duration::from_secs_f64(last), pages);
            if now > 5.0 {
                done += pages;
            }
        }
        (done as f64 / 5.0, last)
    }

    #[test]
    fn window_fills_the_link_and_keeps_the_queue_short() {
        for (pages_per_s, round_trip) in
            [(10_000.0, 0.0001), (10_000.0, 0.05), (250_000.0, 0.0001), (250_000.0, 0.05)]
        {
            let (rate, answer) = run(pages_per_s, round_trip);
            let link = format!("{pages_per_s} pages/s, round trip {round_trip} s");
            assert!(rate > 0.8 * pages_per_s, "{link}: {rate} pages/s");
            let queue = answer - round_trip;
            // The least window takes 1.6 ms on the slower link.
            assert!(queue < 0.008, "{link}: a queue of {queue} s");
        }
    }

    #[test]
    fn fastest_answer_is_measured_anew() {
        let mut pace = Pace::default();
        let (fast, slow) = (Duration::from_micros(100), Duration::from_millis(50));
        pace.answered(fast, fast, 4);
        pace.answered(PROBE_INTERVAL, slow, 4);
        assert_eq!((pace.next_pages(9), pace.next_pages(0)), (None, Some(4)));
        pace.requested();
        assert_eq!(pace.next_pages(4), None, "nothing else is requested meanwhile");
        pace.answered(PROBE_INTERVAL + slow, slow, 4);
        assert_eq!(pace.fastest, Some(slow));
        (0..10_000).for_each(|_| pace.answered(PROBE_INTERVAL, slow, 4));
        assert_eq!(pace.window_pages, MOST_PAGES, "the window grows to fill the longer link");
    }
}
