//! How a throttled vCPU divides its time: it runs for a slice, then rests.
//!
//! The rest is computed from the time that the vCPU really ran. On a busy host a slice ends late,
//! and a rest of fixed length would throttle the guest less than requested.

use std::time::Duration;

use crate::error::MachineError;

/// A slice and its rest. It is short, so that a throttled guest is slow but never stops for long.
/// The control group of a throttled QEMU has the same period.
const PERIOD: Duration = Duration::from_millis(10);

/// Minimum length of a slice. Entering and leaving the guest takes 100 µs where KVM is nested, so
/// a slice of less than twice that would leave almost no guest time.
const MIN_SLICE: Duration = Duration::from_micros(200);

/// Maximum length of a rest. On a busy host a slice may last 50 ms instead of 0.2 ms, and the rest
/// grows with it. The limit is about the sleep of QEMU's own throttle at 99 %, which runs the
/// guest for 10 ms and then sleeps for 990 ms (`cpu-throttle.c`).
const MAX_REST: Duration = Duration::from_secs(1);

/// A throttle: the percentage of its time that a vCPU loses, 1 to 99.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    percent: u8,
}

impl Pace {
    /// The pace of a vCPU that loses `percent` of its time. `None` if `percent` is 0.
    pub(crate) fn losing(percent: u8) -> Result<Option<Self>, MachineError> {
        match percent {
            0 => Ok(None),
            1..=99 => Ok(Some(Self { percent })),
            _ => {
                let reason = format!("{percent} %; choose 0 to 99 % of the vCPUs' time");
                Err(MachineError::Config { setting: "throttle", reason })
            }
        }
    }

    /// How long to run before a rest.
    pub(crate) fn slice(self) -> Duration {
        (PERIOD / 100 * self.left()).max(MIN_SLICE)
    }

    /// How long to rest after having run for `ran`.
    pub(crate) fn rest_after(self, ran: Duration) -> Duration {
        (ran.saturating_mul(self.percent.into()) / self.left()).min(MAX_REST)
    }

    fn left(self) -> u32 {
        100 - u32::from(self.percent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(percent: u8) -> Pace {
        Pace::losing(percent).unwrap().unwrap()
    }

    #[test]
    fn rest_is_proportional_to_run_time() {
        for percent in 1..=99 {
            let slice = pace(percent).slice();
            let whole = slice + pace(percent).rest_after(slice);
            let lost = 1.0 - slice.as_secs_f64() / whole.as_secs_f64();
            assert!((lost * 100.0 - f64::from(percent)).abs() < 0.01, "{percent}: {lost}");
            assert!((PERIOD..=PERIOD * 2).contains(&whole.max(PERIOD)), "{percent}: {whole:?}");
        }
        let late = Duration::from_millis(3);
        assert_eq!(
            pace(80).rest_after(late),
            late * 4,
            "a slice that ends late makes the rest longer"
        );
    }

    #[test]
    fn rest_is_at_most_a_second() {
        for ran in [Duration::from_secs(1), Duration::MAX] {
            assert_eq!(pace(99).rest_after(ran), MAX_REST);
        }
    }

    #[test]
    fn losing_refuses_100_percent() {
        assert_eq!(Pace::losing(0).unwrap(), None);
        for percent in [100, u8::MAX] {
            let error = Pace::losing(percent).unwrap_err().to_string();
            assert!(error.contains("throttle") && error.contains("0 to 99"), "{error}");
        }
    }
}
