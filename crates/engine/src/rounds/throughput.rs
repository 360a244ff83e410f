//! What link and compression achieve, measured in each round.

use std::collections::VecDeque;
use std::time::Duration;

use vmferry_memory::PAGE_SIZE;

/// Throughput assumed until a round has measured it: gigabit Ethernet.
const ASSUMED_BYTES_PER_S: f64 = 117e6;

/// A round with fewer bytes measures latency rather than the link.
const MEASURABLE_BYTES: u64 = 1 << 20;

/// Number of recent rounds of which the fastest gives the link's rate. One round during which the
/// machine was slow does not decide, and this many do.
pub(super) const LINK_ROUNDS: usize = 8;

/// The measurements of the rounds so far.
#[derive(Clone, Debug)]
pub(super) struct Throughput {
    /// The round trip on the control channel.
    pub(super) round_trip: Duration,
    /// The cap on the data channels, in bytes per second.
    pub(super) max_bandwidth: Option<u64>,
    last: Measured,
    /// Whether `last` is from a round of pages that were sent before.
    is_of_rewritten_pages: bool,
    /// Pages with content in the last round.
    round_pages: Option<u64>,
    /// Bytes per second on the channels in each of the last rounds. Compressed rounds are bounded
    /// by the processors too, so each value is a lower bound of the link's rate.
    wire_rates: VecDeque<f64>,
}

/// What a round tells about link and compression.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// Pages with content.
    pages_per_s: f64,
    /// Bytes on the channels per page with content.
    bytes_per_page: f64,
}

impl Throughput {
    /// The assumptions until a round was measured.
    pub(super) fn new(max_bandwidth: Option<u64>) -> Self {
        Self {
            round_trip: Duration::ZERO,
            max_bandwidth,
            last: Measured {
                pages_per_s: ASSUMED_BYTES_PER_S / PAGE_SIZE as f64,
                bytes_per_page: PAGE_SIZE as f64,
            },
            is_of_rewritten_pages: false,
            round_pages: None,
            wire_rates: VecDeque::with_capacity(LINK_ROUNDS),
        }
    }

    /// Records a round: its pages with content, their bytes on the channels, and the time until all
    /// of them were placed.
    pub(super) fn record(&mut self, content_pages: u64, wire_bytes: u64, took: Duration) {
        let again = self.round_pages.replace(content_pages).is_some();
        if content_pages * PAGE_SIZE as u64 >= MEASURABLE_BYTES {
            let took = took.saturating_sub(self.round_trip).as_secs_f64();
            if took > 0.0 {
                self.last = Measured {
                    pages_per_s: content_pages as f64 / took,
                    bytes_per_page: wire_bytes as f64 / content_pages as f64,
                };
                self.is_of_rewritten_pages = again;
                if self.wire_rates.len() == LINK_ROUNDS {
                    self.wire_rates.pop_front();
                }
                self.wire_rates.push_back(wire_bytes as f64 / took);
            }
        } else if !took.is_zero() {
            // Most of its time was latency, so the link carries at least this rate. This corrects
            // the rate of a round that was slow for another reason when only short rounds follow.
            let took = took.as_secs_f64();
            self.last.pages_per_s = self.last.pages_per_s.max(content_pages as f64 / took);
            if let Some(last) = self.wire_rates.back_mut() {
                *last = last.max(wire_bytes as f64 / took);
            }
        }
    }

    /// The highest measured rate of the link in bytes per second, limited by the cap.
    pub(super) fn wire_bytes_per_s(&self) -> f64 {
        let fastest = self.wire_rates.iter().copied().reduce(f64::max);
        let capped = self.max_bandwidth.map_or(f64::INFINITY, |cap| cap as f64);
        fastest.unwrap_or(ASSUMED_BYTES_PER_S).min(capped)
    }

    /// The present rate of migration, in bytes of whole pages per second.
    pub(super) fn page_bytes_per_s(&self) -> f64 {
        let Measured { pages_per_s, bytes_per_page } = self.last;
        let capped = self.max_bandwidth.map_or(f64::INFINITY, |cap| cap as f64 / bytes_per_page);
        pages_per_s.min(capped) * PAGE_SIZE as f64
    }

    /// Bytes of whole pages divided by the bytes sent for them.
    pub(super) fn compression_ratio(&self) -> f64 {
        PAGE_SIZE as f64 / self.last.bytes_per_page.max(1.0)
    }

    /// Whether the last measured round was of pages that were sent before.
    pub(super) fn is_of_rewritten_pages(&self) -> bool {
        self.is_of_rewritten_pages
    }

    /// Pages with content in the last round.
    pub(super) fn round_pages(&self) -> Option<u64> {
        self.round_pages
    }
}
