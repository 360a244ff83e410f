//! The measurements of the link and of each encoding, and the predictions from them.

use std::time::Duration;

use vmferry_codec::{FrameCounts, Method};
use vmferry_memory::PAGE_SIZE;
use vmferry_wire::AlgorithmSet;

use super::Why;
use crate::config::compression::{FRAME_PAGES, MOST_FRAME_PAGES};

/// The encodings that `auto` chooses from, from the cheapest to the strongest.
pub const WAYS: [Option<Method>; 5] = [
    None,
    Some(Method::lz4()),
    Some(Method::zstd(1)),
    Some(Method::zstd(3)),
    Some(Method::zstd(6)),
];

/// Index of uncompressed pages.
pub const RAW: usize = 0;
/// Index of a method that the user has fixed.
pub const FIXED: usize = WAYS.len();
const PLACES: usize = WAYS.len() + 1;

/// Optimistic assumptions about an encoding before it was tried: bytes per second and worker, and
/// the compressed fraction of a page. These are the libraries' rates on program code and text, on a
/// core of 2023. They only decide whether an encoding is worth a trial.
const HOPES: [(f64, f64); WAYS.len()] =
    [(8e9, 1.0), (800e6, 0.4), (600e6, 0.3), (400e6, 0.25), (150e6, 0.2)];

/// Frames with fewer pages are no useful measurement of an encoding.
const TELLING_PAGES: u64 = 16;
/// Weight of a new frame, or of a new measurement of the link, in the moving average.
const NEWS: f64 = 0.2;
/// The same for a worker's time: for a frame that was faster than usual, and for one that was
/// slower.
const GOOD_NEWS: f64 = 0.3;
const BAD_NEWS: f64 = 0.05;
/// An encoding is tried again when its last trial was this long ago.
const STALE: Duration = Duration::from_millis(300);
/// Number of frames after which an encoding is known.
const TRIALS: u32 = 3;
/// A frame's time counts as at most this multiple of the usual time.
const OUTLIER: f64 = 3.0;
/// Fraction of a worker's time that trials take at most, approximately.
const TRIAL_PART: f64 = 0.02;
/// Factor by which another encoding must be better.
const BETTER: f64 = 1.04;
/// Compressed fraction of a page above which an encoding is useless.
const USEFUL: f64 = 0.97;
/// Encodings whose rates differ by a smaller factor are equivalent.
const AS_GOOD: f64 = 1.025;
/// Among equivalent encodings, one is preferred if it takes less than this fraction of the present
/// one's time.
const CHEAPER: f64 = 0.7;
/// A channel's rate is evaluated after this time or this number of bytes.
const LOOK: (Duration, u64) = (Duration::from_millis(10), 4 << 20);
/// A channel that was idle for less than this fraction of the time shows the link's rate.
const IDLE_PART: f64 = 0.1;
/// Time in which the assumed rate of a link that is never saturated doubles.
const DOUBLED: Duration = Duration::from_millis(350);
/// The outcome of the present encoding is evaluated after the first time, and valid for the second.
const OUTCOME: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// If no frame was made for this long there was nothing to do.
const PAUSE: Duration = Duration::from_millis(20);
/// Until it is known whether deltas are worthwhile, pages are kept for deltas on links slower than
/// this, in bytes per second.
const SLOW_LINK: f64 = 400e6;
/// If a smaller fraction of the kept pages become deltas, deltas are mostly skipped.
const FEW_DELTAS: f64 = 0.1;
/// Deltas are then tried with one frame in this number.
const DELTA_TRIAL: u32 = 64;

#[derive(Clone, Copy, Debug)]
struct Way {
    /// A worker's time per page with content, in seconds.
    seconds_per_page: f64,
    bytes_per_page: f64,
    /// When it was last measured.
    at: Duration,
    /// Frames measured since the encoding was unknown or outdated.
    frames: u32,
}

/// Pages with content per second while an encoding was the present one, and when that was measured.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    pages_per_s: f64,
    at: Duration,
}

/// The outcome of the present encoding since the last evaluation.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    pages: u64,
    /// Time in which there were frames to make.
    busy: Duration,
    /// When the last frame was finished.
    at: Duration,
}

impl Way {
    /// The average after one more frame.
    fn and(self, seen: Self) -> Self {
        let mix = |known: f64, seen: f64| known + NEWS * (seen - known);
        // A slow frame mostly had to wait for a processor, or for memory that was touched for the
        // first time, so a fast one says more about the encoding itself. The yield of the encoding
        // under the present load is measured in its outcome.
        let slower = seen.seconds_per_page > self.seconds_per_page;
        let news = if slower { BAD_NEWS } else { GOOD_NEWS };
        let seen_s = seen.seconds_per_page.min(OUTLIER * self.seconds_per_page);
        let seconds_per_page = if self.frames < TRIALS {
            self.seconds_per_page.min(seen_s)
        } else {
            self.seconds_per_page + news * (seen_s - self.seconds_per_page)
        };
        let bytes_per_page = mix(self.bytes_per_page, seen.bytes_per_page);
        let frames = self.frames.saturating_add(1);
        Self { seconds_per_page, bytes_per_page, at: seen.at, frames }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    bytes: u64,
    waited: Duration,
    took: Duration,
    /// Its rate while it was not idle, in bytes per second.
    rate: Option<f64>,
}

/// The measurements and the present choice.
#[derive(Debug)]
pub struct Model {
    workers: f64,
    cap: Option<f64>,
    lanes: Vec<Lane>,
    /// The algorithms that the destination can decode.
    algorithms: AlgorithmSet,
    ways: [Option<Way>; PLACES],
    outcomes: [Option<Outcome>; PLACES],
    tally: Tally,
    current: usize,
    /// The earliest time of the next trial.
    next_trial: Duration,
    /// Fraction of the kept pages that become deltas, once any page was kept.
    delta_part: Option<f64>,
    /// Fraction of all pages that are zero.
    zero_part: f64,
    frames: u32,
}

impl Model {
    pub fn new(lanes: u8, workers: usize, cap: Option<u64>) -> Self {
        Self {
            workers: workers as f64,
            cap: cap.map(|cap| cap as f64),
            lanes: vec![Lane::default(); usize::from(lanes)],
            algorithms: AlgorithmSet::ALL,
            ways: [None; PLACES],
            outcomes: [None; PLACES],
            tally: Tally::default(),
            current: RAW,
            next_trial: Duration::ZERO,
            delta_part: None,
            zero_part: 0.0,
            frames: 0,
        }
    }

    /// Restricts the choice to these algorithms. Called before the first frame: measurements are
    /// not discarded.
    pub fn set_algorithms(&mut self, algorithms: AlgorithmSet) {
        self.algorithms = algorithms;
    }

    pub fn set_cap(&mut self, cap: Option<u64>) {
        self.cap = cap.map(|cap| cap as f64);
        for lane in &mut self.lanes {
            lane.rate = None;
        }
    }

    /// The rate of all lanes together.
    pub fn link_bytes_per_s(&self) -> Option<f64> {
        let (mut sum, mut known) = (0.0, 0);
        for rate in self.lanes.iter().filter_map(|lane| lane.rate) {
            sum += rate;
            known += 1;
        }
        // A lane that has sent nothing yet is assumed to be like the others.
        let measured = (known > 0).then(|| sum * self.lanes.len() as f64 / f64::from(known));
        match (measured, self.cap) {
            (Some(measured), Some(cap)) => Some(measured.min(cap)),
            (measured, cap) => measured.or(cap),
        }
    }

    /// The predicted pages with content per second.
    pub fn pages_per_s(&self) -> f64 {
        self.predict(self.current)
    }

    pub fn sent(&mut self, lane: usize, bytes: u64, waited: Duration, took: Duration) {
        let Some(lane) = self.lanes.get_mut(lane) else { return };
        lane.bytes += bytes;
        lane.waited += waited;
        lane.took += took;
        if lane.took < LOOK.0 && lane.bytes < LOOK.1 {
            return;
        }
        let (took, all) = (lane.took.as_secs_f64(), (lane.took + lane.waited).as_secs_f64());
        let seen = lane.bytes as f64 / took.max(1e-9);
        let busy = lane.waited.as_secs_f64() < IDLE_PART * all;
        lane.rate = Some(match lane.rate {
            None => seen,
            Some(known) if busy => known + NEWS * (seen - known),
            // The lane could have carried more. Its limit is unknown until it is saturated, so its
            // assumed rate grows until then.
            Some(known) => {
                let grown = known * (all / DOUBLED.as_secs_f64()).exp2();
                grown.min(seen).max(lane.bytes as f64 / all.max(1e-9))
            }
        });
        (lane.bytes, lane.waited, lane.took) = (0, Duration::ZERO, Duration::ZERO);
    }

    pub fn encoded(&mut self, now: Duration, way: usize, counts: &FrameCounts, took: Duration) {
        let mix = |known: f64, seen: f64| known + NEWS * (seen - known);
        let held = counts.delta_pages + counts.rewritten_pages;
        if held > 0 {
            let part = counts.delta_pages as f64 / held as f64;
            self.delta_part = Some(self.delta_part.map_or(part, |known| mix(known, part)));
        }
        let all = counts.zero_pages + counts.content_pages();
        self.zero_part = mix(self.zero_part, counts.zero_pages as f64 / all.max(1) as f64);
        self.tally(now, counts.content_pages());
        let pages = counts.raw_pages + counts.packed_pages;
        if pages < TELLING_PAGES || counts.delta_pages > pages {
            return;
        }
        let Some(known) = self.ways.get_mut(way) else { return };
        // Deltas in the frame are compressed too, and count with their small size.
        let bytes = counts.raw_pages as f64 * PAGE_SIZE as f64 + counts.packed_bytes as f64;
        let seen = Way {
            seconds_per_page: took.as_secs_f64() / pages as f64,
            bytes_per_page: bytes / pages as f64,
            at: now,
            frames: 1,
        };
        let first = known.is_none_or(|known| known.frames < TRIALS);
        let learnt = match *known {
            Some(known) if now <= known.at + STALE => known.and(seen),
            // An old measurement may have been of different pages.
            _ => seen,
        };
        *known = Some(learnt);
        if way != self.current {
            let rest = if first { Duration::ZERO } else { took.div_f64(TRIAL_PART * self.workers) };
            self.next_trial = now + rest;
        }
    }

    /// Records the outcome of the present encoding. Gaps between rounds are excluded.
    fn tally(&mut self, now: Duration, pages: u64) {
        let since = now.saturating_sub(self.tally.at);
        self.tally.at = now;
        if since > PAUSE {
            return;
        }
        self.tally.pages += pages;
        self.tally.busy += since;
        if self.tally.busy >= OUTCOME.0 {
            let seen = self.tally.pages as f64 / self.tally.busy.as_secs_f64();
            let before = self.outcomes[self.current].map_or(seen, |known| known.pages_per_s);
            let pages_per_s = f64::midpoint(before, seen);
            self.outcomes[self.current] = Some(Outcome { pages_per_s, at: now });
            self.tally = Tally { at: now, ..Tally::default() };
        }
        for outcome in &mut self.outcomes {
            *outcome = outcome.filter(|outcome| now <= outcome.at + OUTCOME.1);
        }
    }

    /// Pages per frame: more where many pages are zero, so that there is enough content to compress
    /// together.
    pub fn frame_pages(&self) -> usize {
        let wanted = FRAME_PAGES as f64 / (1.0 - self.zero_part).max(0.01);
        (wanted as usize).clamp(FRAME_PAGES, MOST_FRAME_PAGES)
    }

    /// The encoding of the next frame.
    pub fn choose(&mut self, now: Duration, hungry: bool) -> (usize, Why) {
        let Some(link) = self.link_bytes_per_s() else { return (RAW, Why::Best) };
        self.settle(link);
        if now >= self.next_trial
            && let Some(way) = self.worth_a_trial(now, link)
        {
            // No further trial before this one is measured.
            self.next_trial = now + STALE;
            return (way, Why::Trial);
        }
        if hungry {
            // A single frame does not wait for the combined rate of the workers but for one of
            // them.
            let sooner =
                |a: &usize, b: &usize| self.arrives(*a, link).total_cmp(&self.arrives(*b, link));
            let known = (0..WAYS.len()).filter(|way| self.is_useful(*way));
            return (known.min_by(sooner).unwrap_or(RAW), Why::Waiting);
        }
        (self.current, Why::Best)
    }

    /// Whether pages are sent uncompressed at present.
    pub fn is_raw(&self) -> bool {
        self.current == RAW
    }

    /// Switches to another encoding if it has become better, without choosing for a frame.
    pub fn reconsider(&mut self) {
        if let Some(link) = self.link_bytes_per_s() {
            self.settle(link);
        }
    }

    /// Whether the next chosen frame is a trial.
    pub fn is_trial_due(&self, now: Duration) -> bool {
        let link = self.link_bytes_per_s().filter(|_| now >= self.next_trial);
        link.is_some_and(|link| self.worth_a_trial(now, link).is_some())
    }

    /// Whether a frame that an idle channel waits for arrives sooner uncompressed than with the
    /// fixed method.
    pub fn raw_is_sooner(&self) -> bool {
        let measured = self.ways[FIXED].is_some();
        self.link_bytes_per_s()
            .is_some_and(|link| measured && self.arrives(RAW, link) < self.arrives(FIXED, link))
    }

    /// Whether deltas are tried with the next frame.
    pub fn tries_deltas(&mut self, round: u32) -> bool {
        self.frames = self.frames.wrapping_add(1);
        let likely = match self.delta_part {
            Some(part) => part > FEW_DELTAS,
            // Keeping a page costs as much as sending it on a fast link.
            None => self.link_bytes_per_s().is_some_and(|link| link < SLOW_LINK),
        };
        round > 1 && (likely || self.frames.is_multiple_of(DELTA_TRIAL))
    }

    /// Switches to an encoding that is clearly better, or equivalent and clearly cheaper.
    fn settle(&mut self, link: f64) {
        let known = || (0..WAYS.len()).filter(|way| self.is_useful(*way));
        let best = known().map(|way| self.rate(way, link)).fold(0.0, f64::max);
        let cost = |way: usize| self.known(way).seconds_per_page;
        let as_good = known().filter(|way| self.rate(*way, link) * AS_GOOD >= best);
        let Some(way) = as_good.min_by(|a, b| cost(*a).total_cmp(&cost(*b))) else { return };
        let worse = self.rate(self.current, link) * BETTER < best || !self.is_useful(self.current);
        if way != self.current && (worse || cost(way) < CHEAPER * cost(self.current)) {
            self.current = way;
            self.tally = Tally { at: self.tally.at, ..Tally::default() };
        }
    }

    /// Whether an encoding is known and either makes pages smaller or is no compression at all.
    fn is_useful(&self, way: usize) -> bool {
        way == RAW
            || self.ways[way].is_some_and(|way| way.bytes_per_page < USEFUL * PAGE_SIZE as f64)
    }

    /// An encoding that is unknown or outdated and might be better than the present one.
    fn worth_a_trial(&self, now: Duration, link: f64) -> Option<usize> {
        let at_present = self.rate(self.current, link);
        let decodable = |way: &usize| {
            WAYS[*way].is_none_or(|method| self.algorithms.contains(method.algorithm()))
        };
        (0..WAYS.len()).filter(decodable).find(|way| {
            let stale =
                self.ways[*way].is_none_or(|known| known.frames < TRIALS || now > known.at + STALE);
            *way != self.current && stale && self.hope(*way, link) > BETTER * at_present
        })
    }

    /// Pages per second with an encoding: the prediction from link and workers, limited by its
    /// recent outcome, since both sides have other work to do.
    fn rate(&self, way: usize, link: f64) -> f64 {
        let expected = self.rate_of(self.known(way), link);
        let seen = self.outcomes.get(way).copied().flatten();
        seen.map_or(expected, |seen| expected.min(seen.pages_per_s))
    }

    fn rate_of(&self, way: Way, link: f64) -> f64 {
        (link / way.bytes_per_page.max(1.0)).min(self.workers / way.seconds_per_page)
    }

    fn predict(&self, way: usize) -> f64 {
        // One gigabit per second until the link was measured.
        self.rate(way, self.link_bytes_per_s().unwrap_or(117e6))
    }

    /// Optimistic pages per second: an old measurement may have been of different pages.
    fn hope(&self, way: usize, link: f64) -> f64 {
        self.rate_of(hoped(way), link).max(self.rate(way, link))
    }

    /// Seconds per page from now to its arrival, if the channel is idle.
    fn arrives(&self, way: usize, link: f64) -> f64 {
        let known = self.known(way);
        known.seconds_per_page + known.bytes_per_page / link
    }

    fn known(&self, way: usize) -> Way {
        self.ways.get(way).copied().flatten().unwrap_or_else(|| hoped(way))
    }
}

fn hoped(way: usize) -> Way {
    let (bytes_per_s, part) = HOPES.get(way).copied().unwrap_or((1e9, 0.2));
    let page = PAGE_SIZE as f64;
    Way {
        seconds_per_page: page / bytes_per_s,
        bytes_per_page: page * part,
        at: Duration::ZERO,
        frames: 0,
    }
}

#[cfg(test)]
mod tests;
