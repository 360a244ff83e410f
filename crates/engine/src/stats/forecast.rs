//! The forecast after a harvest: rates, remaining time, and for a migration that does not converge,
//! why it does not and what would help.

mod advice;

use serde::{Deserialize, Serialize, Serializer};

pub use advice::{Advice, NotConverging, Writes};

/// The measurements up to a harvest, and what follows from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measures {
    /// Rounds sent.
    pub rounds: u32,
    /// Time since the first round began, in milliseconds.
    pub elapsed_ms: f64,
    /// The rate at which the guest dirties memory, in bytes of whole pages per second.
    pub dirty_bytes_per_s: f64,
    /// What the link carries, in bytes of whole pages per second, before compression.
    pub link_bytes_per_s: f64,
    /// Bytes of whole pages divided by the bytes sent for them.
    pub compression_ratio: f64,
    /// The present throttling of the vCPUs, in percent of their time.
    pub throttle_percent: u8,
    /// The cap on the data channels, in bytes per second.
    pub max_bandwidth: Option<u64>,
    /// What is left to send, in bytes of whole pages.
    pub pending_bytes: f64,
    /// Whether that is as much as the previous round had to send: the guest writes all of it again
    /// in less than a round.
    pub rewrites_all: bool,
    /// The predicted downtime of a handover now, in milliseconds.
    pub predicted_downtime_ms: f64,
    /// The downtime limit, in milliseconds.
    pub downtime_limit_ms: f64,
    /// The part of the prediction that no round can lower, in milliseconds.
    pub fixed_cost_ms: f64,
    /// The size of the vCPU and device state in bytes, as far as the VMM knows it.
    pub state_bytes: u64,
}

/// The forecast after a harvest.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Forecast {
    /// Rounds sent so far.
    pub round: u32,
    /// Time since the first round began, in milliseconds.
    pub elapsed_ms: f64,
    /// Pages left to send.
    pub pending_pages: u64,
    /// The rate at which the guest dirties memory, in bytes of whole pages per second.
    pub dirty_bytes_per_s: f64,
    /// What the link carries, in bytes of whole pages per second, before compression.
    pub link_bytes_per_s: f64,
    /// Bytes of whole pages divided by the bytes sent for them.
    pub compression_ratio: f64,
    /// The throttling of the vCPUs, in percent of their time.
    pub throttle_percent: u8,
    /// The predicted downtime of a handover now, in milliseconds.
    pub predicted_downtime_ms: f64,
    /// The downtime limit, in milliseconds.
    pub downtime_limit_ms: f64,
    /// Whether the migration converges.
    pub verdict: Verdict,
    /// Time until the guest runs at the destination at the present rates, in milliseconds.
    pub eta_ms: Option<f64>,
    /// What would help if the migration does not converge; serialized as text.
    #[serde(serialize_with = "in_words")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub advice: Option<Advice>,
}

/// Whether a migration converges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The remaining pages fit the downtime limit.
    Fits,
    /// Rounds are getting shorter.
    Converging,
    /// Rounds are not getting shorter, or no amount of sending brings the downtime below the limit.
    NotConverging,
}

/// Rounds hardly get shorter once the guest writes at this share of the link's rate.
const HOPELESS_SHARE: f64 = 0.95;

/// An estimate of more rounds than this is not reported.
const MOST_ROUNDS_AHEAD: f64 = 1000.0;

impl Forecast {
    /// The forecast after a harvest with `pending_pages` to send. `before` is the number of pages
    /// of the previous round; `may_throttle` says whether the vCPUs can be throttled further.
    #[must_use]
    pub fn new(
        measures: &Measures,
        pending_pages: u64,
        before: Option<u64>,
        may_throttle: bool,
    ) -> Self {
        let mut forecast = Self {
            round: measures.rounds,
            elapsed_ms: measures.elapsed_ms,
            pending_pages,
            dirty_bytes_per_s: measures.dirty_bytes_per_s,
            link_bytes_per_s: measures.link_bytes_per_s,
            compression_ratio: measures.compression_ratio,
            throttle_percent: measures.throttle_percent,
            predicted_downtime_ms: measures.predicted_downtime_ms,
            downtime_limit_ms: measures.downtime_limit_ms,
            verdict: Verdict::Converging,
            eta_ms: None,
            advice: None,
        };
        let spare_ms = measures.downtime_limit_ms - measures.fixed_cost_ms;
        if measures.predicted_downtime_ms <= measures.downtime_limit_ms {
            forecast.verdict = Verdict::Fits;
            forecast.eta_ms = Some(measures.predicted_downtime_ms);
            return forecast;
        }
        // Pages written twice in a long round count once, so the rate underestimates what the guest
        // writes. A round that did not get shorter is therefore a second sign.
        let share = measures.dirty_bytes_per_s / measures.link_bytes_per_s.max(1.0);
        let no_shorter = before.is_some_and(|before| pending_pages > before - before / 4);
        let stuck = (share >= HOPELESS_SHARE || no_shorter) && !may_throttle;
        if stuck || spare_ms <= 0.0 {
            forecast.verdict = Verdict::NotConverging;
            forecast.advice = Some(measures.advice());
            return forecast;
        }
        let pending_ms = measures.predicted_downtime_ms - measures.fixed_cost_ms;
        forecast.eta_ms = eta_ms(pending_ms, share, spare_ms, measures.downtime_limit_ms);
        forecast
    }
}

/// Rounds take `pending_ms`, then that times `share`, and so on, until the remainder takes at most
/// `spare_ms` of the pause.
fn eta_ms(pending_ms: f64, share: f64, spare_ms: f64, downtime_ms: f64) -> Option<f64> {
    if share >= HOPELESS_SHARE || spare_ms <= 0.0 {
        return None;
    }
    let rounds = if share <= 0.0 { 1.0 } else { (spare_ms / pending_ms).log(share).ceil() };
    (rounds.is_finite() && rounds <= MOST_ROUNDS_AHEAD).then(|| {
        let sent = (0..rounds.max(1.0) as u32).map(|round| pending_ms * share.powi(round as i32));
        sent.sum::<f64>() + downtime_ms
    })
}

fn in_words<S: Serializer>(advice: &Option<Advice>, serializer: S) -> Result<S::Ok, S::Error> {
    advice.as_ref().map(Advice::to_string).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link of 100 MB/s, a fixed cost of 4 ms and a downtime limit of 300 ms.
    fn numbers(dirty_bytes_per_s: f64, pending_ms: f64) -> Measures {
        Measures {
            rounds: 2,
            elapsed_ms: 1000.0,
            dirty_bytes_per_s,
            link_bytes_per_s: 100e6,
            compression_ratio: 1.0,
            throttle_percent: 0,
            max_bandwidth: Some(100_000_000),
            pending_bytes: pending_ms * 1e5,
            rewrites_all: false,
            predicted_downtime_ms: 4.0 + pending_ms,
            downtime_limit_ms: 300.0,
            fixed_cost_ms: 4.0,
            state_bytes: 0,
        }
    }

    #[test]
    fn forecast_converges_when_the_rest_fits() {
        let forecast = Forecast::new(&numbers(500e6, 100.0), 2441, Some(2441), false);
        assert_eq!((forecast.verdict, forecast.eta_ms), (Verdict::Fits, Some(104.0)));
    }

    #[test]
    fn forecast_adds_up_rounds_that_get_shorter() {
        let forecast = Forecast::new(&numbers(50e6, 1000.0), 24_414, Some(48_828), false);
        assert_eq!((forecast.verdict, forecast.advice), (Verdict::Converging, None));
        // Rounds of 1000 and 500 ms; the remaining 250 ms fit the pause, which is counted as the
        // full limit.
        assert_eq!(forecast.eta_ms, Some(1800.0));
        let idle = Forecast::new(&numbers(0.0, 1000.0), 24_414, None, false);
        assert_eq!(idle.eta_ms, Some(1300.0));
    }

    #[test]
    fn forecast_gives_advice_with_numbers_when_the_guest_outruns_the_link() {
        let forecast = Forecast::new(&numbers(410e6, 1000.0), 24_414, Some(24_414), false);
        assert_eq!((forecast.verdict, forecast.eta_ms), (Verdict::NotConverging, None));
        let advice = forecast.advice.unwrap().to_string();
        for part in [
            "the guest writes 410 MB/s and the link carries 100 MB/s",
            "raise the bandwidth cap to 489 MiB/s",
            "allow a downtime of 1205 ms",
            "take more time from the guest",
        ] {
            assert!(advice.contains(part), "`{part}`: {advice}");
        }
        let throttled = Forecast::new(&numbers(410e6, 1000.0), 24_414, Some(24_414), true);
        assert_eq!((throttled.verdict, throttled.eta_ms), (Verdict::Converging, None));
    }

    /// Pages that are written twice in a round count once, so the rate alone is too optimistic.
    #[test]
    fn forecast_sees_no_convergence_in_rounds_of_equal_length() {
        let forecast = Forecast::new(&numbers(60e6, 1000.0), 24_000, Some(24_414), false);
        assert_eq!(forecast.verdict, Verdict::NotConverging);
    }

    #[test]
    fn forecast_requires_hot_pages_to_fit_the_downtime() {
        let mut numbers = numbers(60e6, 1000.0);
        numbers.rewrites_all = true;
        let advice = numbers.advice().to_string();
        assert!(
            advice.contains("the guest writes all of 100 MB again while they are sent"),
            "{advice}"
        );
        // 100 MB in 296 ms.
        assert!(advice.contains("bandwidth cap to 323 MiB/s"), "{advice}");
    }

    #[test]
    fn forecast_reports_a_limit_below_the_fixed_cost() {
        let mut numbers = numbers(0.0, 10.0);
        numbers.downtime_limit_ms = 3.0;
        let forecast = Forecast::new(&numbers, 1, None, false);
        assert!(forecast.advice.unwrap().to_string().contains("a downtime of 6 ms or more"));
    }
}
