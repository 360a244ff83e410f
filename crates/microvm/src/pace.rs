//! How a throttled vCPU divides its time: it runs for a slice, then rests.
//!
//! A rest is reckoned from how long the vCPU did run, not from a timetable: on a busy host a slice ends
//! late, and the guest would keep what it gained by that.

use std::time::Duration;

use crate::error::MachineError;

/// A slice and its rest: short, so that a throttled guest is slow and does not stand still. It is what
/// the control group of a QEMU has, too.
const PERIOD: Duration = Duration::from_millis(10);

/// What a slice has at least. Entering and leaving the guest takes 100 µs where KVM is nested: less than
/// twice that would be no guest time at all.
const LEAST_SLICE: Duration = Duration::from_micros(200);

/// On a host without time for it a slice may last 50 ms instead of 0.2, and only a rest that grows with it
/// takes what was asked for. But no guest stands still for longer than by QEMU's own throttle at 99 %, which
/// lets it run for 10 ms and sleep for 990 (`cpu-throttle.c`).
const LONGEST_REST: Duration = Duration::from_secs(1);

/// Hundredths of its time that a throttled vCPU loses: 1 to 99.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    percent: u8,
}

impl Pace {
    /// The pace of a vCPU that loses `percent` hundredths of its time: none if it loses nothing.
    pub(crate) fn losing(percent: u8) -> Result<Option<Self>, MachineError> {
        match percent {
            0 => Ok(None),
            1..=99 => Ok(Some(Self { percent })),
            _ => {
                let reason = format!("{percent} %: a guest can lose 0 to 99 % of its vCPUs' time");
                Err(MachineError::Config { setting: "throttle", reason })
            }
        }
    }

    /// For how long to run before a rest.
    pub(crate) fn slice(self) -> Duration {
        (PERIOD / 100 * self.left()).max(LEAST_SLICE)
    }

    /// For how long to rest after having run for `ran`.
    pub(crate) fn rest_after(self, ran: Duration) -> Duration {
        (ran.saturating_mul(self.percent.into()) / self.left()).min(LONGEST_REST)
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
    fn the_rest_takes_its_part_of_the_time() {
        for percent in 1..=99 {
            let slice = pace(percent).slice();
            let whole = slice + pace(percent).rest_after(slice);
            let lost = 1.0 - slice.as_secs_f64() / whole.as_secs_f64();
            assert!((lost * 100.0 - f64::from(percent)).abs() < 0.01, "{percent}: {lost}");
            assert!((PERIOD..=PERIOD * 2).contains(&whole.max(PERIOD)), "{percent}: {whole:?}");
        }
        let late = Duration::from_millis(3);
        assert_eq!(pace(80).rest_after(late), late * 4, "what it gained by a late end is taken");
    }

    #[test]
    fn no_rest_is_long() {
        for ran in [Duration::from_secs(1), Duration::MAX] {
            assert_eq!(pace(99).rest_after(ran), LONGEST_REST);
        }
    }

    #[test]
    fn a_guest_can_lose_no_more_than_it_has() {
        assert_eq!(Pace::losing(0).unwrap(), None);
        for percent in [100, u8::MAX] {
            let error = Pace::losing(percent).unwrap_err().to_string();
            assert!(error.contains("throttle") && error.contains("0 to 99"), "{error}");
        }
    }
}
