//! Measures each encoding, and chooses by the predictions from that.

use std::time::Duration;

use vmferry_codec::FrameCounts;
use vmferry_codec::Method;
use vmferry_memory::PAGE_SIZE;
use vmferry_wire::AlgorithmSet;

use super::Why;
use super::encodings::{ENCODINGS, EncodingCost, FIXED, INDICES, RAW, average};
use super::link::LinkRate;
use crate::config::compression::{FRAME_PAGES, MOST_FRAME_PAGES};

/// The link's rate until it was measured: one gigabit per second, less the overhead of TCP.
const UNKNOWN_LINK: f64 = 117e6;

/// Frames with fewer pages are not measured: the fixed time per frame would count as time for the
/// pages.
const LEAST_MEASURED_PAGES: u64 = 16;
/// An encoding is tried again when it was last measured this long ago: long against a trial of a
/// few milliseconds, and short against a round of a large guest.
const OUTDATED_AFTER: Duration = Duration::from_millis(300);
/// Fraction of a worker's time that trials take at most, approximately: what they find must be
/// worth more than they cost.
const TRIAL_PART: f64 = 0.02;
/// Factor by which another encoding must be better. Smaller differences are noise of the
/// measurement, and would cause constant switching.
const BETTER: f64 = 1.04;
/// Encodings whose rates differ by a smaller factor are equivalent. Less than [`BETTER`], so that
/// two encodings are not preferred over each other in turn.
const EQUIVALENT: f64 = 1.025;
/// Among equivalent encodings, one is preferred if it takes less than this fraction of the present
/// one's time: the time saved is the guest's.
const CHEAPER: f64 = 0.7;
/// Compressed fraction of a page above which an encoding is useless: the codec itself sends pages
/// raw if it saves less than a 32nd.
const LARGEST_USEFUL_PART: f64 = 0.97;
/// The outcome of the present encoding is evaluated after this time: at 350 Mbit/s, after more than
/// ten frames.
const OUTCOME_PERIOD: Duration = Duration::from_millis(100);
/// An outcome is valid for this time. The other load of the processors may have changed after it.
const OUTCOME_VALID: Duration = Duration::from_secs(1);
/// If no frame was made for this long there was nothing to do, as between rounds. No frame takes
/// this long on a link on which the processors could be the bottleneck.
const IDLE_GAP: Duration = Duration::from_millis(20);
/// Until it is known whether deltas are worthwhile, pages are kept for deltas on links slower than
/// this, in bytes per second. On a faster link, keeping a page costs as much as sending it.
const SLOW_LINK: f64 = 400e6;
/// If a smaller fraction of the kept pages become deltas, deltas are mostly skipped: nine pages of
/// ten are compared in vain.
const FEW_DELTAS: f64 = 0.1;
/// Deltas are then tried with one frame in this number, which costs less than two percent.
const DELTA_TRIAL_FRAMES: u32 = 64;

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

/// The measurements and the present choice.
#[derive(Debug)]
pub struct Model {
    workers: f64,
    link: LinkRate,
    /// The algorithms that the destination can decode.
    algorithms: AlgorithmSet,
    costs: [Option<EncodingCost>; INDICES],
    outcomes: [Option<Outcome>; INDICES],
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
            link: LinkRate::new(lanes, cap),
            algorithms: AlgorithmSet::ALL,
            costs: [None; INDICES],
            outcomes: [None; INDICES],
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

    /// Whether the destination can decode frames of this method.
    #[must_use]
    pub fn can_be_decoded(&self, method: Method) -> bool {
        self.algorithms.contains(method.algorithm())
    }

    pub fn set_cap(&mut self, cap: Option<u64>) {
        self.link.set_cap(cap);
    }

    /// The rate of all lanes together.
    pub fn link_bytes_per_s(&self) -> Option<f64> {
        self.link.bytes_per_s()
    }

    /// The predicted pages with content per second.
    pub fn pages_per_s(&self) -> f64 {
        self.predict(self.current)
    }

    /// Records a frame that a lane's channel has accepted.
    pub fn sent(&mut self, lane: usize, bytes: u64, waited: Duration, took: Duration) {
        self.link.sent(lane, bytes, waited, took);
    }

    /// Records a frame that was encoded.
    pub fn encoded(
        &mut self,
        now: Duration,
        encoding: usize,
        counts: &FrameCounts,
        took: Duration,
    ) {
        let held = counts.delta_pages + counts.rewritten_pages;
        if held > 0 {
            let part = counts.delta_pages as f64 / held as f64;
            self.delta_part = Some(self.delta_part.map_or(part, |known| average(known, part)));
        }
        let all = counts.zero_pages + counts.content_pages();
        self.zero_part = average(self.zero_part, counts.zero_pages as f64 / all.max(1) as f64);
        self.tally(now, counts.content_pages());
        let pages = counts.raw_pages + counts.packed_pages;
        if pages < LEAST_MEASURED_PAGES || counts.delta_pages > pages {
            return;
        }
        let Some(known) = self.costs.get_mut(encoding) else { return };
        // Deltas in the frame are compressed too, and count with their small size.
        let bytes = counts.raw_pages as f64 * PAGE_SIZE as f64 + counts.packed_bytes as f64;
        let seen = EncodingCost {
            seconds_per_page: took.as_secs_f64() / pages as f64,
            bytes_per_page: bytes / pages as f64,
            at: now,
            frames: 1,
        };
        let first = known.is_none_or(|known| !known.is_known());
        let learnt = match *known {
            Some(known) if now <= known.at + OUTDATED_AFTER => known.and(seen),
            // An old measurement may have been of different pages.
            _ => seen,
        };
        *known = Some(learnt);
        if encoding != self.current {
            let rest = if first { Duration::ZERO } else { took.div_f64(TRIAL_PART * self.workers) };
            self.next_trial = now + rest;
        }
    }

    /// Records the outcome of the present encoding. Gaps between rounds are excluded.
    fn tally(&mut self, now: Duration, pages: u64) {
        let since = now.saturating_sub(self.tally.at);
        self.tally.at = now;
        if since > IDLE_GAP {
            return;
        }
        self.tally.pages += pages;
        self.tally.busy += since;
        if self.tally.busy >= OUTCOME_PERIOD {
            let seen = self.tally.pages as f64 / self.tally.busy.as_secs_f64();
            let before = self.outcomes[self.current].map_or(seen, |known| known.pages_per_s);
            let pages_per_s = f64::midpoint(before, seen);
            self.outcomes[self.current] = Some(Outcome { pages_per_s, at: now });
            self.tally = Tally { at: now, ..Tally::default() };
        }
        for outcome in &mut self.outcomes {
            *outcome = outcome.filter(|outcome| now <= outcome.at + OUTCOME_VALID);
        }
    }

    /// Pages per frame: more where many pages are zero, so that there is enough content to compress
    /// together.
    pub fn frame_pages(&self) -> usize {
        let wanted = FRAME_PAGES as f64 / (1.0 - self.zero_part).max(0.01);
        (wanted as usize).clamp(FRAME_PAGES, MOST_FRAME_PAGES)
    }

    /// The encoding of the next frame.
    pub fn choose(&mut self, now: Duration, idle: bool) -> (usize, Why) {
        let Some(link) = self.link_bytes_per_s() else { return (RAW, Why::Best) };
        self.settle(link);
        if now >= self.next_trial
            && let Some(encoding) = self.worth_a_trial(now, link)
        {
            // No further trial before this one is measured.
            self.next_trial = now + OUTDATED_AFTER;
            return (encoding, Why::Trial);
        }
        if idle {
            // A single frame does not wait for the combined rate of the workers but for one of
            // them.
            let sooner =
                |a: &usize, b: &usize| self.arrives(*a, link).total_cmp(&self.arrives(*b, link));
            let known = (0..ENCODINGS.len()).filter(|encoding| self.is_useful(*encoding));
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
        let measured = self.costs[FIXED].is_some();
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
        round > 1 && (likely || self.frames.is_multiple_of(DELTA_TRIAL_FRAMES))
    }

    /// Switches to an encoding that is clearly better, or equivalent and clearly cheaper.
    fn settle(&mut self, link: f64) {
        let known = || (0..ENCODINGS.len()).filter(|encoding| self.is_useful(*encoding));
        let best = known().map(|encoding| self.rate(encoding, link)).fold(0.0, f64::max);
        let cost = |encoding: usize| self.known(encoding).seconds_per_page;
        let as_good = known().filter(|encoding| self.rate(*encoding, link) * EQUIVALENT >= best);
        let Some(encoding) = as_good.min_by(|a, b| cost(*a).total_cmp(&cost(*b))) else { return };
        let worse = self.rate(self.current, link) * BETTER < best || !self.is_useful(self.current);
        if encoding != self.current && (worse || cost(encoding) < CHEAPER * cost(self.current)) {
            self.current = encoding;
            self.tally = Tally { at: self.tally.at, ..Tally::default() };
        }
    }

    /// Whether an encoding is known and either makes pages smaller or is no compression at all.
    fn is_useful(&self, encoding: usize) -> bool {
        encoding == RAW
            || self.costs[encoding]
                .is_some_and(|cost| cost.bytes_per_page < LARGEST_USEFUL_PART * PAGE_SIZE as f64)
    }

    /// An encoding that is unknown or outdated and might be better than the present one.
    fn worth_a_trial(&self, now: Duration, link: f64) -> Option<usize> {
        let at_present = self.rate(self.current, link);
        let decodable = |encoding: &usize| {
            ENCODINGS[*encoding].is_none_or(|method| self.can_be_decoded(method))
        };
        (0..ENCODINGS.len()).filter(decodable).find(|encoding| {
            let stale = self.costs[*encoding]
                .is_none_or(|known| !known.is_known() || now > known.at + OUTDATED_AFTER);
            *encoding != self.current
                && stale
                && self.optimistic_rate(*encoding, link) > BETTER * at_present
        })
    }

    /// Pages per second with an encoding: the prediction from link and workers, limited by its
    /// recent outcome, since both sides have other work to do.
    fn rate(&self, encoding: usize, link: f64) -> f64 {
        let expected = self.rate_of(self.known(encoding), link);
        let seen = self.outcomes.get(encoding).copied().flatten();
        seen.map_or(expected, |seen| expected.min(seen.pages_per_s))
    }

    fn rate_of(&self, cost: EncodingCost, link: f64) -> f64 {
        (link / cost.bytes_per_page.max(1.0)).min(self.workers / cost.seconds_per_page)
    }

    fn predict(&self, encoding: usize) -> f64 {
        self.rate(encoding, self.link_bytes_per_s().unwrap_or(UNKNOWN_LINK))
    }

    /// Optimistic pages per second: an old measurement may have been of different pages.
    fn optimistic_rate(&self, encoding: usize, link: f64) -> f64 {
        self.rate_of(EncodingCost::assumed(encoding), link).max(self.rate(encoding, link))
    }

    /// Seconds per page from now to its arrival, if the channel is idle.
    fn arrives(&self, encoding: usize, link: f64) -> f64 {
        let known = self.known(encoding);
        known.seconds_per_page + known.bytes_per_page / link
    }

    fn known(&self, encoding: usize) -> EncodingCost {
        self.costs
            .get(encoding)
            .copied()
            .flatten()
            .unwrap_or_else(|| EncodingCost::assumed(encoding))
    }
}

#[cfg(test)]
mod tests;
