//! Decides when to hand over, by predicting the downtime after every harvest.

use crate::config::{Limits, WhenStuck};
use std::time::Duration;

use vmferry_memory::PAGE_SIZE;

use super::throughput::Throughput;
use crate::stats::forecast::{Forecast, Measures, NotConverging};
use crate::vmm::StateEstimate;

/// Round trips between the pause and the first instruction at the destination: one for the end of
/// the last round with the state and READY, one for COMMIT and RUNNING.
const ROUND_TRIPS: u32 = 2;

/// A round counts as being as long as the previous one if it differs by less than this fraction.
const REWRITTEN_PART: u64 = 20;

/// The state right after a harvest, with the guest running.
#[derive(Clone, Copy, Debug)]
pub struct Harvest {
    /// Rounds sent so far.
    pub rounds: u32,
    /// Time since the first round began.
    pub elapsed: Duration,
    /// Pages to send.
    pub pending_pages: u64,
    /// Time in which the guest dirtied these pages.
    pub dirtied_in: Duration,
}

/// What to do after a harvest.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Send the pages with the guest running.
    AnotherRound,
    /// Pause the guest and send the rest.
    SwitchOver,
    /// Pause the guest, and let the destination fetch the rest while it runs there.
    PostCopy,
    /// The migration can't finish within the limits.
    GiveUp(Box<NotConverging>),
}

/// Measures the link and the guest, and predicts the downtime.
#[derive(Clone, Debug)]
pub struct Predictor {
    limits: Limits,
    throughput: Throughput,
    state: StateEstimate,
    /// For how long each of the last two harvests waited for devices.
    device_waits: [Duration; 2],
    throttle_percent: u8,
}

impl Predictor {
    /// A predictor that has measured nothing yet.
    #[must_use]
    pub fn new(limits: Limits, max_bandwidth: Option<u64>) -> Self {
        Self {
            limits,
            throughput: Throughput::new(max_bandwidth),
            state: StateEstimate::default(),
            device_waits: [Duration::ZERO; 2],
            throttle_percent: 0,
        }
    }

    /// Sets a new cap on the data channels, in bytes per second. Measurements under another cap are
    /// kept until a round has been measured under this one, but are limited to the cap.
    pub fn set_cap(&mut self, max_bandwidth: Option<u64>) {
        self.throughput.max_bandwidth = max_bandwidth;
    }

    /// Replaces the limits.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Sets the present throttling of the vCPUs in percent, for the verdict.
    pub fn throttled(&mut self, percent: u8) {
        self.throttle_percent = percent;
    }

    /// Records for how long a harvest waited for device requests: the switchover waits for such
    /// requests too. The shorter wait of the last two harvests counts, so that a single slow
    /// request does not decide.
    pub fn waited_for_devices(&mut self, wait: Duration) {
        self.device_waits = [self.device_waits[1], wait];
    }

    /// Sets the VMM's estimate of its state.
    pub fn expect_state(&mut self, state: StateEstimate) {
        self.state = state;
    }

    /// Records a measured round trip on the control channel.
    pub fn measured_round_trip(&mut self, round_trip: Duration) {
        self.throughput.round_trip = round_trip;
    }

    /// Records a round: its pages with content, their bytes on the channels, and the time until all
    /// of them were placed. Later pages are assumed to compress as well as these if these had been
    /// sent before, too.
    pub fn measured_round(&mut self, content_pages: u64, wire_bytes: u64, took: Duration) {
        self.throughput.record(content_pages, wire_bytes, took);
    }

    /// The present rate of migration, in bytes of whole pages per second.
    #[must_use]
    pub fn link_bytes_per_s(&self) -> f64 {
        self.throughput.page_bytes_per_s()
    }

    /// The predicted downtime if the guest were paused now with this number of pages to send.
    ///
    /// The pages that are written all the time seldom compress like the rest of memory. Text that
    /// compresses ten to one around an incompressible working set led to five times the predicted
    /// downtime. So pages are assumed to be incompressible until a round of pages that were sent
    /// before has been measured.
    #[must_use]
    pub fn predict(&self, pending_pages: u64) -> Duration {
        let bytes = pending_pages as f64 * PAGE_SIZE as f64;
        let ratio = self.throughput.compression_ratio();
        let shrinks = if self.throughput.is_of_rewritten_pages() { 1.0 } else { ratio.max(1.0) };
        self.fixed_cost()
            + Duration::from_secs_f64(bytes * shrinks / self.link_bytes_per_s().max(1.0))
    }

    /// Decides what to do after a harvest.
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
            WhenStuck::PostCopy => Decision::PostCopy,
            WhenStuck::Refuse => {
                let measures = self.measures(harvest, predicted);
                Decision::GiveUp(Box::new(NotConverging { measures }))
            }
        }
    }

    /// The forecast after a harvest. `may_throttle` says whether the vCPUs can be throttled
    /// further.
    #[must_use]
    pub fn forecast(&self, harvest: Harvest, may_throttle: bool) -> Forecast {
        let measures = self.measures(harvest, self.predict(harvest.pending_pages));
        Forecast::new(&measures, harvest.pending_pages, self.throughput.round_pages(), may_throttle)
    }

    fn fixed_cost(&self) -> Duration {
        // The state is sent uncompressed, on the control channel.
        let transfer = self.state.bytes as f64 / self.throughput.wire_bytes_per_s().max(1.0);
        let [before, last] = self.device_waits;
        self.state.handling
            + before.min(last)
            + self.throughput.round_trip * ROUND_TRIPS
            + Duration::from_secs_f64(transfer)
    }

    fn measures(&self, harvest: Harvest, predicted: Duration) -> Measures {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let dirtied_bytes = harvest.pending_pages as f64 * PAGE_SIZE as f64;
        Measures {
            rounds: harvest.rounds,
            elapsed_ms: ms(harvest.elapsed),
            dirty_bytes_per_s: dirtied_bytes / harvest.dirtied_in.as_secs_f64().max(1e-6),
            link_bytes_per_s: self.link_bytes_per_s(),
            compression_ratio: self.throughput.compression_ratio(),
            throttle_percent: self.throttle_percent,
            max_bandwidth: self.throughput.max_bandwidth,
            pending_bytes: dirtied_bytes,
            rewrites_all: self.throughput.round_pages().is_some_and(|before| {
                harvest.pending_pages.abs_diff(before) <= before / REWRITTEN_PART
            }),
            predicted_downtime_ms: ms(predicted),
            downtime_limit_ms: ms(self.limits.downtime),
            fixed_cost_ms: ms(self.fixed_cost()),
            state_bytes: self.state.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::throughput::LINK_ROUNDS;
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
    fn predictor_switches_over_when_the_rest_fits_the_limit() {
        let mut predictor = Predictor::new(limits(), None);
        predictor.measured_round(25_600, 100 << 20, Duration::from_millis(1000));
        // 100 MiB/s carries 29.6 MiB in 296 ms.
        assert_eq!(predictor.decide(harvest(1, 7500)), Decision::SwitchOver);
        assert_eq!(predictor.decide(harvest(1, 7700)), Decision::AnotherRound);
    }

    #[test]
    fn predictor_bounds_the_throughput_by_the_cap() {
        let mut predictor = Predictor::new(limits(), Some(1 << 20));
        predictor.measured_round(25_600, 100 << 20, Duration::from_millis(10));
        assert_eq!(predictor.link_bytes_per_s(), f64::from(1 << 20));
    }

    #[test]
    fn predictor_counts_compression() {
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
    fn predictor_does_not_apply_the_overall_ratio_to_hot_pages() {
        let mut predictor = Predictor::new(limits(), None);
        // Text that compresses ten to one: 10 MB/s on the link for 100 MB/s of pages.
        predictor.measured_round(50_000, 20_480_000, Duration::from_secs(2));
        assert_eq!(predictor.predict(2500), Duration::from_millis(4 + 1000));
        // Incompressible pages at 10 MB/s.
        predictor.measured_round(2500, 10_240_000, Duration::from_secs(1));
        assert_eq!(predictor.predict(2500), Duration::from_millis(4 + 1000));
        // These pages compress two to one after all.
        predictor.measured_round(2500, 5_120_000, Duration::from_millis(500));
        assert_eq!(predictor.predict(2500), Duration::from_millis(4 + 500));
    }

    #[test]
    fn predictor_ignores_the_throughput_of_small_rounds() {
        let mut predictor = Predictor::new(limits(), None);
        let before = predictor.link_bytes_per_s();
        predictor.measured_round(2, 8192, Duration::from_millis(5));
        assert_eq!(predictor.link_bytes_per_s(), before);
    }

    /// A guest whose pages are sent as deltas. The slow round is not evidence about the link.
    #[test]
    fn predictor_is_not_misled_by_one_slow_round() {
        let mut predictor = Predictor::new(limits(), None);
        predictor
            .expect_state(StateEstimate { bytes: 350_000, handling: Duration::from_millis(15) });
        predictor.measured_round(16_384, 16_384 * 4096, Duration::from_millis(600));
        // 1 MB of deltas in 1.3 s, while the machine was busy.
        predictor.measured_round(16_384, 1_000_000, Duration::from_millis(1300));
        assert!(predictor.fixed_cost() < Duration::from_millis(30), "{predictor:?}");
        assert_eq!(predictor.decide(harvest(2, 200)), Decision::SwitchOver);
        // The low rate counts once all recent rounds have shown it.
        for _ in 0..LINK_ROUNDS {
            predictor.measured_round(16_384, 1_000_000, Duration::from_millis(1300));
        }
        assert!(predictor.fixed_cost() > Duration::from_millis(400), "{predictor:?}");
        assert!(matches!(predictor.decide(harvest(3, 200)), Decision::GiveUp(_)));
    }

    /// The rounds after the slow one are too short to measure, and each shows that the link carries
    /// more.
    #[test]
    fn predictor_forgets_a_slow_round_after_short_ones() {
        let mut predictor = Predictor::new(limits(), None);
        predictor
            .expect_state(StateEstimate { bytes: 350_000, handling: Duration::from_millis(15) });
        predictor.measured_round(500, 500 * 4096, Duration::from_secs(4));
        assert_eq!(predictor.decide(harvest(1, 200)), Decision::AnotherRound);
        predictor.measured_round(200, 200 * 4096, Duration::from_millis(10));
        assert_eq!(predictor.decide(harvest(2, 200)), Decision::SwitchOver);
        // A slower short round is evidence of latency only.
        predictor.measured_round(1, 4096, Duration::from_millis(10));
        assert_eq!(predictor.decide(harvest(3, 200)), Decision::SwitchOver);
    }

    #[test]
    fn predictor_gives_up_with_advice_after_the_last_round() {
        let predictor = Predictor::new(limits(), None);
        let Decision::GiveUp(why) = predictor.decide(harvest(5, 1 << 20)) else {
            panic!("must give up")
        };
        let text = why.to_string();
        assert!(text.contains("after 5 rounds"), "{text}");
        assert!(text.contains("allow a downtime of"), "{text}");
    }

    #[test]
    fn predictor_refuses_a_limit_below_the_fixed_cost() {
        let mut limits = limits();
        limits.downtime = Duration::from_micros(1);
        let predictor = Predictor::new(limits, None);
        assert_eq!(predictor.decide(harvest(1, 0)), Decision::AnotherRound);
        let Decision::GiveUp(why) = predictor.decide(harvest(2, 0)) else { panic!() };
        assert!(why.to_string().contains("the handover itself takes"));
    }

    #[test]
    fn predictor_counts_and_names_a_large_state() {
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
        assert!(why.measures.predicted_downtime_ms >= 400.0, "{why}");
    }

    #[test]
    fn predictor_switches_over_anyway_on_request() {
        let mut limits = limits();
        limits.when_stuck = WhenStuck::SwitchOver;
        let predictor = Predictor::new(limits, None);
        assert_eq!(predictor.decide(harvest(5, 1 << 20)), Decision::SwitchOver);
    }
}
