//! The book-keeping of a round: what each lane has sent, and what of it is placed.

use std::time::Duration;

use vmferry_codec::FrameCounts;

use super::chooser::{Decision, Why};
use crate::stats::{FrameReasons, PageCounts, RoundStats};

/// What one lane sent in one round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneTotals {
    /// Pages by how they travelled.
    pub pages: PageCounts,
    /// Frames by why they are encoded as they are.
    pub frames: FrameReasons,
    /// Bytes on the channel.
    pub bytes: u64,
    /// Pages that were not sent, as the guest had hinted that they are free.
    pub free_pages: u64,
    /// What re-arming the dirty log took.
    pub rearm: Duration,
    /// The dirty log's name in this round: one that chooses may have several.
    pub log: &'static str,
}

impl LaneTotals {
    /// Adds what another lane sent, or the same one later.
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
        self.pages.add_frame(counts, decision.choice.pack);
        *match decision.why {
            Why::Fixed => &mut self.frames.fixed,
            Why::Best => &mut self.frames.best,
            Why::Waiting => &mut self.frames.waiting,
            Why::Trial => &mut self.frames.trial,
        } += 1;
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    /// Last sequence of the round, once the lane has sent it all.
    end: Option<u64>,
    /// Highest sequence ever, so that the final message can name it.
    last_end: u64,
    placed: u64,
}

/// What is known of a round when it begins.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundStart {
    /// The present time.
    pub now: Duration,
    /// Pages to send.
    pub pages: u64,
    /// How long the harvest took that found them.
    pub harvest: Duration,
    /// For how long the guest stood still for it.
    pub stood_still: Duration,
    /// What the guest wrote before it, in pages per second.
    pub dirty_pages_per_s: f64,
    /// What the vCPUs lose of their time, in per cent.
    pub throttle_percent: u8,
    /// Whether the guest is paused.
    pub paused: bool,
}

/// Follows one round after the other over all lanes.
#[derive(Debug)]
pub struct RoundTracker {
    lanes: Vec<Lane>,
    round: u32,
    open: bool,
    started: Duration,
    stats: RoundStats,
}

impl RoundTracker {
    /// No round yet.
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

    /// Ends a round that a VMM has ended, of which everything that is not counted yet is in `totals`, and begins the
    /// next one. Lanes go on as they are.
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

    /// The number of the last round begun, 0 before the first.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.round
    }

    /// When the last round began.
    #[must_use]
    pub fn started(&self) -> Duration {
        self.started
    }

    /// A lane has sent everything.
    pub fn sent(&mut self, lane: u8, end_sequence: u64, totals: LaneTotals) {
        if let Some(lane) = self.lanes.get_mut(usize::from(lane)) {
            lane.end = Some(end_sequence);
            lane.last_end = end_sequence;
            self.count(&totals);
        }
    }

    /// Adds what was sent of the round.
    pub fn count(&mut self, totals: &LaneTotals) {
        self.stats.zero_pages += totals.pages.zero;
        self.stats.free_pages += totals.free_pages;
        self.stats.encoded.add(&totals.pages);
        self.stats.frames.add(&totals.frames);
        self.stats.bytes += totals.bytes;
        self.stats.rearm_ms += totals.rearm.as_secs_f64() * 1e3;
        if !totals.log.is_empty() {
            self.stats.dirty_log = totals.log;
        }
    }

    /// The destination has placed a lane's frames up to a sequence number; whether that is news.
    pub fn placed(&mut self, lane: u8, sequence: u64) -> bool {
        match self.lanes.get_mut(usize::from(lane)) {
            Some(lane) if sequence > lane.placed => {
                lane.placed = sequence;
                true
            }
            _ => false,
        }
    }

    /// The destination has said in another way that everything is placed.
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

    /// The guest runs on while the last round is still being sent.
    pub fn recalled(&mut self) {
        self.stats.paused = false;
    }

    /// A channel was lost in this round: what it takes says nothing of the link.
    pub fn interrupted(&mut self) {
        self.stats.interrupted = true;
    }

    /// Whether the destination has placed everything that a lane has sent of this round, and the lane has sent
    /// all of it.
    #[must_use]
    pub fn is_lane_done(&self, lane: u8) -> bool {
        let lane = self.lanes.get(usize::from(lane));
        lane.is_some_and(|lane| lane.end.is_some_and(|end| lane.placed >= end))
    }

    /// Whether every lane has sent its end of the round.
    #[must_use]
    pub fn all_sent(&self) -> bool {
        self.lanes.iter().all(|lane| lane.end.is_some())
    }

    /// The last sequence number of each lane.
    #[must_use]
    pub fn end_sequences(&self) -> Vec<u64> {
        self.lanes.iter().map(|lane| lane.last_end).collect()
    }

    /// The round's figures, once, when all of it is placed.
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

    const NOW: Duration = Duration::from_millis(10);

    #[test]
    fn a_round_ends_when_every_lane_is_placed() {
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
    fn an_acknowledgement_before_the_lane_reports_counts() {
        let mut rounds = RoundTracker::new(1);
        rounds.start(RoundStart { now: NOW, ..RoundStart::default() });
        assert!(rounds.placed(0, 1));
        rounds.sent(0, 1, LaneTotals::default());
        assert!(rounds.finish(NOW).is_some());
    }

    #[test]
    fn a_lane_that_does_not_exist_is_ignored() {
        let mut rounds = RoundTracker::new(1);
        assert!(!rounds.placed(9, 1));
        rounds.sent(9, 1, LaneTotals::default());
    }
}
