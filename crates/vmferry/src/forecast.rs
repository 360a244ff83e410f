//! What a harvest says of how a migration will go on, for whoever watches: rates, time left, and in plain words why it
//! does not converge and what would help.

use serde::{Deserialize, Serialize};

use crate::convergence::NotConverging;

/// What a harvest says of how it will go on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    /// Rounds sent so far.
    pub round: u32,
    /// Time since the first round began, in milliseconds.
    pub elapsed_ms: f64,
    /// Pages to be sent.
    pub pending_pages: u64,
    /// What the guest writes, in bytes of whole pages per second.
    pub dirty_bytes_per_s: f64,
    /// What the link carries, in bytes of whole pages per second, however short they are on it.
    pub link_bytes_per_s: f64,
    /// Bytes of whole pages over the bytes that travel.
    pub compression_ratio: f64,
    /// What the vCPUs lose of their time, in per cent.
    pub throttle_percent: u8,
    /// The downtime that a handover now would cost, in milliseconds.
    pub predicted_downtime_ms: f64,
    /// The limit, in milliseconds.
    pub downtime_limit_ms: f64,
    /// How it looks.
    pub verdict: Verdict,
    /// Time until the guest runs at the destination if it goes on like this, in milliseconds.
    pub eta_ms: Option<f64>,
    /// What would help, in words, if it does not converge.
    pub advice: Option<String>,
}

/// How a migration looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// What is left fits the downtime limit.
    Fits,
    /// Rounds get shorter.
    Converging,
    /// Rounds don't get shorter, or nothing that is sent brings the downtime below the limit.
    NotConverging,
}

/// A guest that writes this share of what the link carries leaves rounds that hardly get shorter.
const HOPELESS_SHARE: f64 = 0.95;

/// More rounds than this are no forecast.
const MOST_ROUNDS_AHEAD: f64 = 1000.0;

impl Forecast {
    /// The forecast for the numbers of a harvest that says `pending_pages`. `before` are the pages of the round that
    /// was just sent, and `may_throttle` says whether more of the guest's time can be taken.
    #[must_use]
    pub fn new(
        numbers: &NotConverging,
        pending_pages: u64,
        before: Option<u64>,
        may_throttle: bool,
    ) -> Self {
        let mut forecast = Self {
            round: numbers.rounds,
            elapsed_ms: numbers.elapsed_ms,
            pending_pages,
            dirty_bytes_per_s: numbers.dirty_bytes_per_s,
            link_bytes_per_s: numbers.link_bytes_per_s,
            compression_ratio: numbers.compression_ratio,
            throttle_percent: numbers.throttle_percent,
            predicted_downtime_ms: numbers.predicted_downtime_ms,
            downtime_limit_ms: numbers.downtime_limit_ms,
            verdict: Verdict::Converging,
            eta_ms: None,
            advice: None,
        };
        let spare_ms = numbers.downtime_limit_ms - numbers.fixed_cost_ms;
        if numbers.predicted_downtime_ms <= numbers.downtime_limit_ms {
            forecast.verdict = Verdict::Fits;
            forecast.eta_ms = Some(numbers.predicted_downtime_ms);
            return forecast;
        }
        // What was dirtied in a long round is less than what the guest writes, as it writes pages twice: the second
        // sign is that a round did not get shorter.
        let share = numbers.dirty_bytes_per_s / numbers.link_bytes_per_s.max(1.0);
        let no_shorter = before.is_some_and(|before| pending_pages > before - before / 4);
        let stuck = (share >= HOPELESS_SHARE || no_shorter) && !may_throttle;
        if stuck || spare_ms <= 0.0 {
            forecast.verdict = Verdict::NotConverging;
            forecast.advice = Some(Advice(numbers).to_string());
            return forecast;
        }
        let pending_ms = numbers.predicted_downtime_ms - numbers.fixed_cost_ms;
        forecast.eta_ms = eta_ms(pending_ms, share, spare_ms, numbers.downtime_limit_ms);
        forecast
    }
}

/// Rounds take `pending_ms`, that times `share`, and so on, until one would take at most `spare_ms` of the pause.
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

/// Bytes in megabytes, for sentences.
fn mb(bytes: f64) -> f64 {
    bytes / 1e6
}

/// What stands in the way, and what would help, with the options of the command.
pub(crate) struct Advice<'a>(pub(crate) &'a NotConverging);

impl std::fmt::Display for Advice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let it = self.0;
        if it.fixed_cost_ms >= it.downtime_limit_ms {
            return write!(
                f,
                "the handover itself takes about {:.1} ms, however little memory is left{}; use --downtime-limit \
                 {}ms or more",
                it.fixed_cost_ms,
                StateWords(it.state_bytes),
                (it.fixed_cost_ms * 1.5).ceil()
            );
        }
        if it.rewrites_all {
            // Its rate says no more than that: pages that are written twice in a round count once.
            write!(
                f,
                "the guest writes all of {:.0} MB again while they are sent",
                mb(it.pending_bytes)
            )?;
        } else {
            write!(f, "the guest writes {:.0} MB/s", mb(it.dirty_bytes_per_s))?;
        }
        write!(
            f,
            " and the link carries {:.0} MB/s of that{}{}; ",
            mb(it.link_bytes_per_s),
            RatioWords(it.compression_ratio),
            ThrottleWords(it.throttle_percent),
        )?;
        if let Some(cap) = it.max_bandwidth {
            // What is written all the time must fit the downtime; else as much as the guest writes, and a quarter more.
            let spare_s = (it.downtime_limit_ms - it.fixed_cost_ms) / 1e3;
            let needed = if it.rewrites_all {
                it.pending_bytes / spare_s
            } else {
                it.dirty_bytes_per_s * 1.25
            };
            let wanted = (needed / it.compression_ratio.max(1.0)).max(cap as f64 * 1.25);
            write!(f, "raise --max-bandwidth to {}MiB/s, ", (wanted / 1_048_576.0).ceil())?;
        }
        write!(
            f,
            "allow --downtime-limit {}ms, take more time from the guest with --throttle, or accept the downtime with \
             --when-stuck switch-over",
            (it.predicted_downtime_ms * 1.2).ceil()
        )
    }
}

/// A state of fewer bytes is no reason.
const REMARKABLE_STATE_BYTES: u64 = 1 << 20;

/// The state, if it is large enough to be a reason.
struct StateWords(u64);

impl std::fmt::Display for StateWords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 < REMARKABLE_STATE_BYTES {
            return Ok(());
        }
        write!(f, " ({:.1} MB of device state travel in it)", mb(self.0 as f64))
    }
}

/// What compression does, if it does something.
struct RatioWords(f64);

impl std::fmt::Display for RatioWords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 < 1.1 { Ok(()) } else { write!(f, " (compressed {:.1} to 1)", self.0) }
    }
}

/// What throttling does, if it does something.
struct ThrottleWords(u8);

impl std::fmt::Display for ThrottleWords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            0 => Ok(()),
            percent => write!(f, ", with {percent} % of its time taken from it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 MB/s on the link, 4 ms that no round lowers, 300 ms allowed.
    fn numbers(dirty_bytes_per_s: f64, pending_ms: f64) -> NotConverging {
        NotConverging {
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
    fn what_fits_is_as_good_as_done() {
        let forecast = Forecast::new(&numbers(500e6, 100.0), 2441, Some(2441), false);
        assert_eq!((forecast.verdict, forecast.eta_ms), (Verdict::Fits, Some(104.0)));
    }

    #[test]
    fn rounds_that_get_shorter_add_up() {
        let forecast = Forecast::new(&numbers(50e6, 1000.0), 24_414, Some(48_828), false);
        assert_eq!((forecast.verdict, forecast.advice), (Verdict::Converging, None));
        // 1000, 500 ms, then 250 fit the pause, of which the limit is what is sure.
        assert_eq!(forecast.eta_ms, Some(1800.0));
        let idle = Forecast::new(&numbers(0.0, 1000.0), 24_414, None, false);
        assert_eq!(idle.eta_ms, Some(1300.0));
    }

    #[test]
    fn a_guest_that_outruns_the_link_gets_advice_with_numbers() {
        let forecast = Forecast::new(&numbers(410e6, 1000.0), 24_414, Some(24_414), false);
        assert_eq!((forecast.verdict, forecast.eta_ms), (Verdict::NotConverging, None));
        let advice = forecast.advice.unwrap();
        for part in [
            "the guest writes 410 MB/s and the link carries 100 MB/s",
            "--max-bandwidth to 489MiB/s",
            "--downtime-limit 1205ms",
            "--throttle",
        ] {
            assert!(advice.contains(part), "`{part}`: {advice}");
        }
        let throttled = Forecast::new(&numbers(410e6, 1000.0), 24_414, Some(24_414), true);
        assert_eq!((throttled.verdict, throttled.eta_ms), (Verdict::Converging, None));
    }

    /// Pages that are written twice in a round count once: the rate alone looks better than it is.
    #[test]
    fn a_round_as_long_as_the_one_before_is_a_sign_too() {
        let forecast = Forecast::new(&numbers(60e6, 1000.0), 24_000, Some(24_414), false);
        assert_eq!(forecast.verdict, Verdict::NotConverging);
    }

    #[test]
    fn what_is_written_again_and_again_must_fit_the_downtime() {
        let mut numbers = numbers(60e6, 1000.0);
        numbers.rewrites_all = true;
        let advice = Advice(&numbers).to_string();
        assert!(
            advice.contains("the guest writes all of 100 MB again while they are sent"),
            "{advice}"
        );
        // 100 MB in 296 ms.
        assert!(advice.contains("--max-bandwidth to 323MiB/s"), "{advice}");
    }

    #[test]
    fn a_limit_below_the_fixed_cost_is_said() {
        let mut numbers = numbers(0.0, 10.0);
        numbers.downtime_limit_ms = 3.0;
        let forecast = Forecast::new(&numbers, 1, None, false);
        assert!(forecast.advice.unwrap().contains("--downtime-limit 6ms or more"));
    }
}
