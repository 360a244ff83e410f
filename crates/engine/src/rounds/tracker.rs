//! The accounting of a round: what each lane has sent, and how much of it is placed.

use std::time::Duration;

use vmferry_codec::{FrameCounts, Method};
use vmferry_wire::Algorithm;

use crate::data::source::chooser::{Decision, Why};
use crate::stats::{FrameReasons, PageCounts, RoundStats};

/// What one lane sent in one round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneTotals {
    /// Pages by how they were sent.
    pub pages: PageCounts,
    /// Frames by the reason for their encoding.
    pub frames: FrameReasons,
    /// Bytes on the channel.
    pub bytes: u64,
    /// Pages that were not sent because the guest had hinted that they are free.
    pub free_pages: u64,
    /// Time for re-arming the dirty log.
    pub rearm: Duration,
    /// The dirty log's name in this round. A log that switches its method may have several names.
    pub log: &'static str,
}

impl LaneTotals {
    /// Adds the totals of another lane, or of a later part of the same lane.
    pub fn join(&mut self, other: &Self) {
        self.pages.add(&other.pages);
        self.frames.add(&other.frames);
        self.bytes += other.bytes;
        self.free_pages += other.free_pages;
        self.rearm += other.rearm;
        if !other.log.is_empty() {
            self.log = other.log;
        }
    }

    /// Adds a frame.
    pub fn add(&mut self, counts: &FrameCounts, decision: &Decision) {
        add_frame(&mut self.pages, counts, decision.choice.pack);
        *match decision.why {
            Why::Fixed => &mut self.frames.fixed,
            Why::Best => &mut self.frames.best,
            Why::Waiting => &mut self.frames.waiting,
            Why::Trial => &mut self.frames.trial,
        } += 1;
    }
}

/// Adds the pages of a frame that is packed with this method.
fn add_frame(pages: &mut PageCounts, counts: &FrameCounts, method: Option<Method>) {
    pages.zero += counts.zero_pages;
    pages.raw += counts.raw_pages;
    pages.delta += counts.delta_pages;
    pages.random += counts.random_pages;
    pages.grown += counts.grown_pages;
    if let Some(method) = method {
        *match method.algorithm() {
            Algorithm::Lz4 => &mut pages.lz4,
            Algorithm::Zstd => &mut pages.zstd,
            Algorithm::Zlib => &mut pages.zlib,
        } += counts.packed_pages;
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    /// Last sequence number of the round, once the lane has sent all of it.
    end: Option<u64>,
    /// Highest sequence number so far, for the final message.
    last_end: u64,
    placed: u64,
}

/// The state at the beginning of a round.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundStart {
    /// The present time.
    pub now: Duration,
    /// Pages to send.
    pub pages: u64,
    /// Duration of the harvest that found them.
    pub harvest: Duration,
    /// For how long the guest was paused for the harvest.
    pub stood_still: Duration,
    /// The rate at which the guest dirtied pages before the round, in pages per second.
    pub dirty_pages_per_s: f64,
    /// The throttling of the vCPUs, in percent of their time.
    pub throttle_percent: u8,
    /// Whether the guest is paused.
    pub paused: bool,
}

/// Tracks consecutive rounds over all lanes.
#[derive(Debug)]
pub struct RoundTracker {
    lanes: Vec<Lane>,
    round: u32,
    open: bool,
    started: Duration,
    stats: RoundStats,
}

impl RoundTracker {
    /// A tracker without a round.
    #[must_use]
    pub fn new(lanes: u8) -> Self {
        Self {
            lanes: vec![Lane::default(); usize::from(lanes)],
            round: 0,
            open: false,
            started: Duration::ZERO,
            stats: RoundStats::default(),
        }
    }

    /// Begins the next round and returns its number.
    pub fn start(&mut self, start: RoundStart) -> u32 {
        self.open = true;
        for lane in &mut self.lanes {
            lane.end = None;
        }
        self.begin(start)
    }

    /// Ends a round that the VMM has ended, adding `totals` for everything not yet counted, and
    /// begins the next one. The lanes are not affected.
    pub fn turn(&mut self, totals: LaneTotals, start: RoundStart) -> RoundStats {
        self.count(&totals);
        let ended = self.close(start.now);
        self.begin(start);
        ended
    }

    fn begin(&mut self, start: RoundStart) -> u32 {
        self.round += 1;
        self.started = start.now;
        self.stats = RoundStats {
            round: self.round,
            pages: start.pages,
            harvest_ms: start.harvest.as_secs_f64() * 1e3,
            harvest_pause_ms: start.stood_still.as_secs_f64() * 1e3,
            dirty_pages_per_s: start.dirty_pages_per_s,
            throttle_percent: start.throttle_percent,
            paused: start.paused,
            ..RoundStats::default()
        };
        self.round
    }

    /// The number of the last round begun; 0 before the first.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.round
    }

    /// When the last round began.
    #[must_use]
    pub fn started(&self) -> Duration {
        self.started
    }

    /// A lane has sent all of the round.
    pub fn sent(&mut self, lane: u8, end_sequence: u64, totals: LaneTotals) {
        if let Some(lane) = self.lanes.get_mut(usize::from(lane)) {
            lane.end = Some(end_sequence);
            lane.last_end = end_sequence;
            self.count(&totals);
        }
    }

    /// Adds to the totals of the round.
    pub fn count(&mut self, totals: &LaneTotals) {
        self.stats.zero_pages += totals.pages.zero;
        self.stats.free_pages += totals.free_pages;
        self.stats.encoded.add(&totals.pages);
        self.stats.frames.add(&totals.frames);
        self.stats.bytes += totals.bytes;
        self.stats.rearm_ms += totals.rearm.as_secs_f64() * 1e3;
        if !totals.log.is_empty() {
            self.stats.dirty_log = totals.log.to_owned();
        }
    }

    /// The destination has placed a lane's frames up to a sequence number. Returns whether that is
    /// new.
    pub fn placed(&mut self, lane: u8, sequence: u64) -> bool {
        match self.lanes.get_mut(usize::from(lane)) {
            Some(lane) if sequence > lane.placed => {
                lane.placed = sequence;
                true
            }
            _ => false,
        }
    }

    /// The destination has reported by another message that everything is placed.
    pub fn placed_everything(&mut self) {
        for lane in &mut self.lanes {
            lane.placed = lane.placed.max(lane.last_end);
        }
    }

    /// Whether a round is under way.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// The guest was resumed while the last round is still being sent.
    pub fn recalled(&mut self) {
        self.stats.paused = false;
    }

    /// A channel was lost in this round, so its duration is no measure of the link.
    pub fn interrupted(&mut self) {
        self.stats.interrupted = true;
    }

    /// Whether a lane has sent all of this round and the destination has placed all of it.
    #[must_use]
    pub fn is_lane_done(&self, lane: u8) -> bool {
        let lane = self.lanes.get(usize::from(lane));
        lane.is_some_and(|lane| lane.end.is_some_and(|end| lane.placed >= end))
    }

    /// Whether every lane has sent all of the round.
    #[must_use]
    pub fn all_sent(&self) -> bool {
        self.lanes.iter().all(|lane| lane.end.is_some())
    }

    /// The last sequence number of each lane.
    #[must_use]
    pub fn end_sequences(&self) -> Vec<u64> {
        self.lanes.iter().map(|lane| lane.last_end).collect()
    }

    /// The first lane of which the destination claims to have placed more than was sent, with both
    /// sequence numbers. Known once the lane has sent all of its round.
    #[must_use]
    pub fn placed_unsent(&self) -> Option<(u8, u64, u64)> {
        let mut lanes = (0..).zip(&self.lanes).filter(|_| self.open);
        lanes.find_map(|(number, lane)| {
            let end = lane.end.filter(|end| lane.placed > *end)?;
            Some((number, lane.placed, end))
        })
    }

    /// Returns the round's statistics once, when all of it is placed.
    pub fn finish(&mut self, now: Duration) -> Option<RoundStats> {
        let placed = self.lanes.iter().all(|lane| lane.end.is_some_and(|end| lane.placed >= end));
        if !self.open || !placed {
            return None;
        }
        self.open = false;
        Some(self.close(now))
    }

    fn close(&mut self, now: Duration) -> RoundStats {
        let mut stats = std::mem::take(&mut self.stats);
        let took = now.saturating_sub(self.started).as_secs_f64();
        stats.ms = took * 1e3;
        stats.harvest_percent = 100.0 * stats.harvest_ms / (stats.harvest_ms + stats.ms).max(1e-6);
        let content = stats.encoded.content() as f64;
        stats.bytes_per_s = content * vmferry_memory::PAGE_SIZE as f64 / took.max(1e-9);
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_were_not_sent_can_not_be_placed() {
        let mut rounds = RoundTracker::new(2);
        rounds.start(RoundStart::default());
        assert!(rounds.placed(1, u64::MAX));
        assert_eq!(rounds.placed_unsent(), None, "lane 1 may have sent that many");
        rounds.sent(0, 4, LaneTotals::default());
        rounds.placed(0, 4);
        rounds.sent(1, 9, LaneTotals::default());
        assert_eq!(rounds.placed_unsent(), Some((1, u64::MAX, 9)));
    }

    const NOW: Duration = Duration::from_millis(10);

    #[test]
    fn round_ends_when_every_lane_is_placed() {
        let mut rounds = RoundTracker::new(2);
        assert_eq!(
            rounds.start(RoundStart { now: NOW, pages: 3, harvest: NOW, ..RoundStart::default() }),
            1
        );
        let totals = LaneTotals {
            pages: PageCounts { raw: 2, zero: 1, ..PageCounts::default() },
            frames: FrameReasons::default(),
            bytes: 100,
            free_pages: 3,
            rearm: Duration::from_millis(2),
            log: "a log",
        };
        rounds.sent(0, 4, totals);
        assert!(rounds.placed(0, 4));
        assert!(rounds.finish(NOW * 2).is_none());
        assert!(!rounds.all_sent());
        rounds.sent(1, 2, LaneTotals::default());
        assert!(rounds.all_sent());
        assert!(rounds.placed(1, 1));
        assert!(rounds.finish(NOW * 2).is_none());
        assert!(rounds.placed(1, 2));
        assert!(!rounds.placed(1, 2));
        let stats = rounds.finish(NOW * 2).unwrap();
        assert_eq!((stats.round, stats.zero_pages, stats.bytes), (1, 1, 100));
        assert_eq!(stats.free_pages, 3);
        assert_eq!((stats.harvest_ms, stats.ms, stats.harvest_percent), (10.0, 10.0, 50.0));
        assert_eq!(stats.rearm_ms, 2.0);
        assert!(rounds.finish(NOW * 3).is_none(), "reported once");
        assert_eq!(rounds.end_sequences(), [4, 2]);
    }

    #[test]
    fn acknowledgment_before_the_lanes_report_counts() {
        let mut rounds = RoundTracker::new(1);
        rounds.start(RoundStart { now: NOW, ..RoundStart::default() });
        assert!(rounds.placed(0, 1));
        rounds.sent(0, 1, LaneTotals::default());
        assert!(rounds.finish(NOW).is_some());
    }

    #[test]
    fn unknown_lane_is_ignored() {
        let mut rounds = RoundTracker::new(1);
        assert!(!rounds.placed(9, 1));
        rounds.sent(9, 1, LaneTotals::default());
    }
}
