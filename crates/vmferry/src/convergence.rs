//! When to hand over: the downtime that would follow, predicted after every harvest.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmferry_memory::PAGE_SIZE;

use crate::forecast::{Advice, Forecast};
use crate::vm::StateEstimate;

/// What the pause costs besides the pages: leaving `KVM_RUN`, saving and loading some hundred
/// kilobytes of state and syncing two journal records took 1 to 5 ms on the machines where this
/// was measured (see `vmferry demo`), plus round trips, which are measured.
pub const FIXED_COST: Duration = Duration::from_millis(4);

/// Round trips between the pause and the first instruction at the destination: the end of the
/// last round with the state and READY, then COMMIT and RUNNING.
const ROUND_TRIPS: u32 = 2;

/// Throughput assumed until a round has measured it: gigabit Ethernet.
const ASSUMED_BYTES_PER_S: f64 = 117e6;

/// A shorter round says more about latency than about the link.
const MEASURABLE_BYTES: u64 = 1 << 20;

/// Rounds of which the fastest says what the link carries: one that the machine was slow in does
/// not decide, and this many do.
const LINK_ROUNDS: usize = 8;

/// A round that differs by less than this part from the one before is as long.
const REWRITTEN_PART: u64 = 20;

/// What to do when the guest writes faster than the link carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenStuck {
    /// End the migration; the guest runs on at the source.
    #[default]
    Refuse,
    /// Hand over anyway, with the downtime that it takes.
    SwitchOver,
}

/// The user's limits on a migration.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest downtime that the user accepts.
    pub downtime: Duration,
    /// Rounds with the guest running, at most.
    pub rounds: u32,
    /// Time with the guest running, at most.
    pub time: Option<Duration>,
    /// What to do at the end of rounds or time.
    pub when_stuck: WhenStuck,
}

/// What is known right after a harvest, with the guest running.
#[derive(Clone, Copy, Debug)]
pub struct Harvest {
    /// Rounds sent so far.
    pub rounds: u32,
    /// Since the first round began.
    pub elapsed: Duration,
    /// Pages to be sent.
    pub pending_pages: u64,
    /// Time in which the guest dirtied them.
    pub dirtied_in: Duration,
}

/// What to do after a harvest.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Send the pages with the guest running.
    AnotherRound,
    /// Pause the guest and send the rest.
    SwitchOver,
    /// It can't be done within the limits.
    GiveUp(Box<NotConverging>),
}

/// Why a migration can't converge, with the numbers that an operator needs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NotConverging {
    /// Rounds sent.
    pub rounds: u32,
    /// Time since the first round began, in milliseconds.
    pub elapsed_ms: f64,
    /// What the guest writes, in bytes per second (whole pages).
    pub dirty_bytes_per_s: f64,
    /// What the link carries, in bytes of whole pages per second, however short they are on it.
    pub link_bytes_per_s: f64,
    /// Bytes of whole pages over the bytes that travel.
    pub compression_ratio: f64,
    /// What the vCPUs lose of their time by now, in per cent.
    pub throttle_percent: u8,
    /// The cap on the data channels, in bytes per second.
    pub max_bandwidth: Option<u64>,
    /// What is left to be sent, in bytes of whole pages.
    pub pending_bytes: f64,
    /// Whether that is as much as the round before had to send: the guest writes all of it again in less than a round.
    pub rewrites_all: bool,
    /// The downtime that a handover now would cost, in milliseconds.
    pub predicted_downtime_ms: f64,
    /// The limit, in milliseconds.
    pub downtime_limit_ms: f64,
    /// The part of the prediction that no round can lower, in milliseconds.
    pub fixed_cost_ms: f64,
    /// The size of the state of vCPUs and devices, in bytes, as far as the VMM knows it.
    pub state_bytes: u64,
}

impl std::fmt::Display for NotConverging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "after {} rounds ({:.1} s) a handover would stop the guest for {:.1} ms, and the \
             limit is {:.1} ms: {}",
            self.rounds,
            self.elapsed_ms / 1e3,
            self.predicted_downtime_ms,
            self.downtime_limit_ms,
            Advice(self)
        )
    }
}

/// Measures the link and the guest, and predicts.
#[derive(Clone, Debug)]
pub struct Predictor {
    limits: Limits,
    round_trip: Duration,
    /// What the last round did.
    measured: Measured,
    /// Whether that was one of pages that were sent before.
    measured_again: bool,
    /// Pages with content of the last round.
    round_pages: Option<u64>,
    /// Bytes per second on the channels in each of the last rounds. What travels compressed is
    /// bounded by the processors too: a round says what the link carries at least.
    wire_rates: VecDeque<f64>,
    max_bandwidth: Option<u64>,
    state: StateEstimate,
    /// For how long the last two harvests waited for devices.
    device_waits: [Duration; 2],
    throttle_percent: u8,
}

/// What a round says of link and compression.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// Pages with content.
    pages_per_s: f64,
    /// Bytes on the channels for each of them.
    bytes_per_page: f64,
}

impl Predictor {
    /// A predictor that has measured nothing yet.
    #[must_use]
    pub fn new(limits: Limits, max_bandwidth: Option<u64>) -> Self {
        Self {
            limits,
            round_trip: Duration::ZERO,
            measured: Measured {
                pages_per_s: ASSUMED_BYTES_PER_S / PAGE_SIZE as f64,
                bytes_per_page: PAGE_SIZE as f64,
            },
            measured_again: false,
            round_pages: None,
            wire_rates: VecDeque::with_capacity(LINK_ROUNDS),
            max_bandwidth,
            state: StateEstimate::default(),
            device_waits: [Duration::ZERO; 2],
            throttle_percent: 0,
        }
    }

    /// Takes a new cap on the data channels, in bytes per second. What was measured under another one
    /// stands until a round has measured anew, but is not believed beyond the cap.
    pub fn set_cap(&mut self, max_bandwidth: Option<u64>) {
        self.max_bandwidth = max_bandwidth;
    }

    /// Takes other limits.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Takes what the vCPUs lose of their time, in per cent, for the verdict.
    pub fn throttled(&mut self, percent: u8) {
        self.throttle_percent = percent;
    }

    /// Takes for how long a harvest waited for requests of devices: the switchover waits for such
    /// requests too. Of the last two harvests the shorter wait counts, so that a single slow
    /// request decides nothing.
    pub fn waited_for_devices(&mut self, wait: Duration) {
        self.device_waits = [self.device_waits[1], wait];
    }

    /// Takes what the VMM knows of its state.
    pub fn expect_state(&mut self, state: StateEstimate) {
        self.state = state;
    }

    /// Takes a measured round trip on the control channel.
    pub fn measured_round_trip(&mut self, round_trip: Duration) {
        self.round_trip = round_trip;
    }

    /// Takes a round: its pages with content, the bytes that they were on the channels, and the time until
    /// all of them were placed. The pages to come are taken to shrink as these did, if these had been sent before too.
    pub fn measured_round(&mut self, content_pages: u64, wire_bytes: u64, took: Duration) {
        let again = self.round_pages.replace(content_pages).is_some();
        if content_pages * PAGE_SIZE as u64 >= MEASURABLE_BYTES {
            let took = took.saturating_sub(self.round_trip).as_secs_f64();
            if took > 0.0 {
                self.measured = Measured {
                    pages_per_s: content_pages as f64 / took,
                    bytes_per_page: wire_bytes as f64 / content_pages as f64,
                };
                self.measured_again = again;
                if self.wire_rates.len() == LINK_ROUNDS {
                    self.wire_rates.pop_front();
                }
                self.wire_rates.push_back(wire_bytes as f64 / took);
            }
        } else if !took.is_zero() {
            // Most of its time was latency, and the link carries at least that: a round that was
            // slow for another reason is not believed for ever because those after it are short.
            let took = took.as_secs_f64();
            self.measured.pages_per_s = self.measured.pages_per_s.max(content_pages as f64 / took);
            if let Some(last) = self.wire_rates.back_mut() {
                *last = last.max(wire_bytes as f64 / took);
            }
        }
    }

    /// What the link carries, in bytes per second, as far as it was seen.
    fn wire_bytes_per_s(&self) -> f64 {
        let fastest = self.wire_rates.iter().copied().reduce(f64::max);
        let capped = self.max_bandwidth.map_or(f64::INFINITY, |cap| cap as f64);
        fastest.unwrap_or(ASSUMED_BYTES_PER_S).min(capped)
    }

    /// What migrates, as it is known now, in bytes of whole pages per second.
    #[must_use]
    pub fn link_bytes_per_s(&self) -> f64 {
        let Measured { pages_per_s, bytes_per_page } = self.measured;
        let capped = self.max_bandwidth.map_or(f64::INFINITY, |cap| cap as f64 / bytes_per_page);
        pages_per_s.min(capped) * PAGE_SIZE as f64
    }

    /// The downtime if the guest were paused now with so many pages to send.
    ///
    /// What is written all the time is seldom like what fills the memory: text that shrinks to a tenth around a hot working
    /// set that does not shrink was seen to make a downtime of five times what was predicted. So until a round of pages
    /// that were sent before has been measured, they are taken to travel as they are.
    #[must_use]
    pub fn predict(&self, pending_pages: u64) -> Duration {
        let bytes = pending_pages as f64 * PAGE_SIZE as f64;
        let shrinks = if self.measured_again { 1.0 } else { self.compression_ratio().max(1.0) };
        self.fixed_cost()
            + Duration::from_secs_f64(bytes * shrinks / self.link_bytes_per_s().max(1.0))
    }

    fn compression_ratio(&self) -> f64 {
        PAGE_SIZE as f64 / self.measured.bytes_per_page.max(1.0)
    }

    /// What to do now.
    #[must_use]
    pub fn decide(&self, harvest: Harvest) -> Decision {
        let predicted = self.predict(harvest.pending_pages);
        if predicted <= self.limits.downtime {
            return Decision::SwitchOver;
        }
        let out_of_time = self.limits.time.is_some_and(|limit| harvest.elapsed >= limit);
        let hopeless = self.fixed_cost() > self.limits.downtime && harvest.rounds >= 2;
        if harvest.rounds < self.limits.rounds && !out_of_time && !hopeless {
            return Decision::AnotherRound;
        }
        match self.limits.when_stuck {
            WhenStuck::SwitchOver => Decision::SwitchOver,
            WhenStuck::Refuse => Decision::GiveUp(Box::new(self.verdict(harvest, predicted))),
        }
    }

    /// What whoever watches is told of a harvest. `may_throttle` says whether more of the guest's time can be taken.
    #[must_use]
    pub fn forecast(&self, harvest: Harvest, may_throttle: bool) -> Forecast {
        let numbers = self.verdict(harvest, self.predict(harvest.pending_pages));
        Forecast::new(&numbers, harvest.pending_pages, self.round_pages, may_throttle)
    }

    fn fixed_cost(&self) -> Duration {
        // The state travels as it is, on a channel of its own.
        let transfer = self.state.bytes as f64 / self.wire_bytes_per_s().max(1.0);
        let [before, last] = self.device_waits;
        self.state.handling
            + before.min(last)
            + self.round_trip * ROUND_TRIPS
            + Duration::from_secs_f64(transfer)
    }

    fn verdict(&self, harvest: Harvest, predicted: Duration) -> NotConverging {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let dirtied_bytes = harvest.pending_pages as f64 * PAGE_SIZE as f64;
        NotConverging {
            rounds: harvest.rounds,
            elapsed_ms: ms(harvest.elapsed),
            dirty_bytes_per_s: dirtied_bytes / harvest.dirtied_in.as_secs_f64().max(1e-6),
            link_bytes_per_s: self.link_bytes_per_s(),
            compression_ratio: self.compression_ratio(),
            throttle_percent: self.throttle_percent,
            max_bandwidth: self.max_bandwidth,
            pending_bytes: dirtied_bytes,
            rewrites_all: self.round_pages.is_some_and(|before| {
                harvest.pending_pages.abs_diff(before) <= before / REWRITTEN_PART
            }),
            predicted_downtime_ms: ms(predicted),
            downtime_limit_ms: ms(self.limits.downtime),
            fixed_cost_ms: ms(self.fixed_cost()),
            state_bytes: self.state.bytes,
        }
    }
}

/// How much of their time the vCPUs lose when the guest writes faster than the link carries.
///
/// QEMU's auto-converge begins with 20 % and adds 10 % at a time up to 99 % (`migration/ram.c`,
/// `mig_throttle_guest_down`); here a step is 20 %, because a round is measured rather than a period.
#[derive(Clone, Copy, Debug)]
pub struct Throttle {
    most: u8,
    percent: u8,
    pages_before: Option<u64>,
}

/// What a step adds.
const THROTTLE_STEP: u8 = 20;

impl Throttle {
    /// Up to `most` per cent; 0 for never.
    #[must_use]
    pub fn new(most: u8) -> Self {
        Self { most, percent: 0, pages_before: None }
    }

    /// The present setting in per cent.
    #[must_use]
    pub fn percent(&self) -> u8 {
        self.percent
    }

    /// The most per cent that may be taken.
    #[must_use]
    pub fn most(&self) -> u8 {
        self.most
    }

    /// Whether more may be taken than is.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.percent < self.most
    }

    /// Allows up to `most` per cent from now on, and returns the new setting if it must change.
    pub fn set_most(&mut self, most: u8) -> Option<u8> {
        self.most = most;
        (self.percent > most).then(|| {
            self.percent = most;
            most
        })
    }

    /// Takes what a harvest found before another round is sent, and returns the new setting if it must
    /// change: when a round has left more than three quarters of what the one before it had to send.
    pub fn next(&mut self, pending_pages: u64) -> Option<u8> {
        let stuck = self
            .pages_before
            .replace(pending_pages)
            .is_some_and(|before| pending_pages > before - before / 4);
        if !stuck || self.percent >= self.most {
            return None;
        }
        self.percent = self.percent.saturating_add(THROTTLE_STEP).min(self.most);
        Some(self.percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits {
            downtime: Duration::from_millis(300),
            rounds: 5,
            time: None,
            when_stuck: WhenStuck::Refuse,
        }
    }

    fn harvest(rounds: u32, pending_pages: u64) -> Harvest {
        Harvest {
            rounds,
            elapsed: Duration::from_secs(1),
            pending_pages,
            dirtied_in: Duration::from_secs(1),
        }
    }

    #[test]
    fn hands_over_when_the_rest_fits_the_limit() {
        let mut predictor = Predictor::new(limits(), None);
        predictor.measured_round(25_600, 100 << 20, Duration::from_millis(1000));
        // 100 MiB/s carries 29.6 MiB in 296 ms.
        assert_eq!(predictor.decide(harvest(1, 7500)), Decision::SwitchOver);
        assert_eq!(predictor.decide(harvest(1, 7700)), Decision::AnotherRound);
    }

    #[test]
    fn a_cap_bounds_the_throughput_that_is_believed() {
        let mut predictor = Predictor::new(limits(), Some(1 << 20));
        predictor.measured_round(25_600, 100 << 20, Duration::from_millis(10));
        assert_eq!(predictor.link_bytes_per_s(), f64::from(1 << 20));
    }

    #[test]
    fn what_compression_saves_is_counted() {
        let mut predictor = Predictor::new(limits(), Some(10_000_000));
        // 256,000,000 bytes of pages in 64,000,000 on the wire, in 6.4 s.
        predictor.measured_round(62_500, 64_000_000, Duration::from_millis(6400));
        assert_eq!(predictor.link_bytes_per_s(), 40e6);
        predictor.set_cap(Some(5_000_000));
        assert_eq!(predictor.link_bytes_per_s(), 20e6);
        predictor.set_cap(None);
        assert_eq!(predictor.link_bytes_per_s(), 40e6, "until another round is measured");
        predictor.throttled(40);
        let Decision::GiveUp(why) = predictor.decide(harvest(5, 1 << 20)) else { panic!() };
        let text = why.to_string();
        assert!(
            text.contains("compressed 4.0 to 1") && text.contains("40 % of its time"),
            "{text}"
        );
    }

    #[test]
    fn what_all_of_memory_shrinks_to_is_not_believed_of_what_is_written_all_the_time() {
        let mut predictor = Predictor::new(limits(), None);
        // Text, of which 10 MB/s travel for 100 MB/s.
        predictor.measured_round(50_000, 20_480_000, Duration::from_secs(2));
        assert_eq!(predictor.predict(2500), Duration::from_millis(4 + 1000));
        // Pages of which 10 MB/s travel as they are.
        predictor.measured_round(2500, 10_240_000, Duration::from_secs(1));
        assert_eq!(predictor.predict(2500), Duration::from_millis(4 + 1000));
        // They shrink to a half after all.
        predictor.measured_round(2500, 5_120_000, Duration::from_millis(500));
        assert_eq!(predictor.predict(2500), Duration::from_millis(4 + 500));
    }

    #[test]
    fn small_rounds_do_not_teach_throughput() {
        let mut predictor = Predictor::new(limits(), None);
        let before = predictor.link_bytes_per_s();
        predictor.measured_round(2, 8192, Duration::from_millis(5));
        assert_eq!(predictor.link_bytes_per_s(), before);
    }

    /// Of a guest whose pages travel as deltas: the slow round said nothing of the link.
    #[test]
    fn one_slow_round_does_not_decide_what_the_handover_takes() {
        let mut predictor = Predictor::new(limits(), None);
        predictor
            .expect_state(StateEstimate { bytes: 350_000, handling: Duration::from_millis(15) });
        predictor.measured_round(16_384, 16_384 * 4096, Duration::from_millis(600));
        // 1 MB of deltas in 1.3 s, while the machine was busy with something else.
        predictor.measured_round(16_384, 1_000_000, Duration::from_millis(1300));
        assert!(predictor.fixed_cost() < Duration::from_millis(30), "{predictor:?}");
        assert_eq!(predictor.decide(harvest(2, 200)), Decision::SwitchOver);
        // It is believed once that is what all rounds say.
        for _ in 0..LINK_ROUNDS {
            predictor.measured_round(16_384, 1_000_000, Duration::from_millis(1300));
        }
        assert!(predictor.fixed_cost() > Duration::from_millis(400), "{predictor:?}");
        assert!(matches!(predictor.decide(harvest(3, 200)), Decision::GiveUp(_)));
    }

    /// The rounds after it are too short to measure, and each shows that the link carries more.
    #[test]
    fn slow_round_is_not_believed_for_ever_when_short_ones_follow() {
        let mut predictor = Predictor::new(limits(), None);
        predictor
            .expect_state(StateEstimate { bytes: 350_000, handling: Duration::from_millis(15) });
        predictor.measured_round(500, 500 * 4096, Duration::from_secs(4));
        assert_eq!(predictor.decide(harvest(1, 200)), Decision::AnotherRound);
        predictor.measured_round(200, 200 * 4096, Duration::from_millis(10));
        assert_eq!(predictor.decide(harvest(2, 200)), Decision::SwitchOver);
        // What a slower one says it says of latency.
        predictor.measured_round(1, 4096, Duration::from_millis(10));
        assert_eq!(predictor.decide(harvest(3, 200)), Decision::SwitchOver);
    }

    #[test]
    fn gives_up_in_words_after_the_last_round() {
        let predictor = Predictor::new(limits(), None);
        let Decision::GiveUp(why) = predictor.decide(harvest(5, 1 << 20)) else {
            panic!("must give up")
        };
        let text = why.to_string();
        assert!(text.contains("after 5 rounds"), "{text}");
        assert!(text.contains("--downtime-limit"), "{text}");
    }

    #[test]
    fn a_limit_below_the_fixed_cost_is_refused_early_and_said() {
        let mut limits = limits();
        limits.downtime = Duration::from_micros(1);
        let predictor = Predictor::new(limits, None);
        assert_eq!(predictor.decide(harvest(1, 0)), Decision::AnotherRound);
        let Decision::GiveUp(why) = predictor.decide(harvest(2, 0)) else { panic!() };
        assert!(why.to_string().contains("the handover itself takes"));
    }

    #[test]
    fn a_large_state_counts_and_is_named() {
        let mut predictor = Predictor::new(limits(), Some(10_000_000));
        let state = StateEstimate { bytes: 16_000_000, handling: Duration::from_millis(15) };
        predictor.expect_state(state);
        assert_eq!(predictor.predict(0), Duration::from_millis(1615));
        let Decision::GiveUp(why) = predictor.decide(harvest(2, 0)) else { panic!() };
        assert!(why.to_string().contains("16.0 MB of device state"), "{why}");
    }

    #[test]
    fn predictor_counts_waits_for_devices_unless_only_one_was_long() {
        let mut predictor = Predictor::new(limits(), None);
        let before = predictor.predict(0);
        let [short, long] = [2, 400].map(Duration::from_millis);
        for (wait, counts) in [(long, Duration::ZERO), (short, short), (long, short), (long, long)]
        {
            predictor.waited_for_devices(wait);
            assert_eq!(predictor.predict(0), before + counts);
        }
        let Decision::GiveUp(why) = predictor.decide(harvest(2, 0)) else { panic!() };
        assert!(why.predicted_downtime_ms >= 400.0, "{why}");
    }

    #[test]
    fn a_guest_that_outruns_the_link_is_throttled_step_by_step() {
        let mut throttle = Throttle::new(50);
        assert_eq!(throttle.next(1000), None, "nothing to compare with");
        assert_eq!(throttle.next(500), None, "it converges");
        assert_eq!(throttle.next(400), Some(20));
        assert_eq!(throttle.next(400), Some(40));
        assert_eq!(throttle.next(200), None);
        assert_eq!(throttle.next(200), Some(50));
        assert_eq!(throttle.next(200), None, "the most that is allowed");
        let mut never = Throttle::new(0);
        assert_eq!((never.next(9), never.next(9)), (None, None));
    }

    #[test]
    fn switches_over_anyway_when_told_to() {
        let mut limits = limits();
        limits.when_stuck = WhenStuck::SwitchOver;
        let predictor = Predictor::new(limits, None);
        assert_eq!(predictor.decide(harvest(5, 1 << 20)), Decision::SwitchOver);
    }
}
