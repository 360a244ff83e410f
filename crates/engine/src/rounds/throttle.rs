//! Throttling of the vCPUs, in steps, when rounds do not get shorter.

/// The throttling of the vCPUs when the guest writes faster than the link carries.
///
/// QEMU's auto-converge begins with 20 % and adds 10 % at a time up to 99 % (`migration/ram.c`,
/// `mig_throttle_guest_down`). Here a step is 20 %, because each step follows a measured round
/// rather than a fixed period.
#[derive(Clone, Copy, Debug)]
pub struct Throttle {
    most: u8,
    percent: u8,
    pages_before: Option<u64>,
}

/// The increment of one step, in percent.
const THROTTLE_STEP: u8 = 20;

impl Throttle {
    /// Throttles up to `most` percent; 0 never throttles.
    #[must_use]
    pub fn new(most: u8) -> Self {
        Self { most, percent: 0, pages_before: None }
    }

    /// The present setting in percent.
    #[must_use]
    pub fn percent(&self) -> u8 {
        self.percent
    }

    /// The upper limit in percent.
    #[must_use]
    pub fn most(&self) -> u8 {
        self.most
    }

    /// Whether the throttling can be increased.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.percent < self.most
    }

    /// Changes the upper limit to `most` percent, and returns the new setting if it must change.
    pub fn set_most(&mut self, most: u8) -> Option<u8> {
        self.most = most;
        (self.percent > most).then(|| {
            self.percent = most;
            most
        })
    }

    /// Processes a harvest that another round follows, and returns the new setting if it must
    /// change: it increases when a round left more than three quarters of what the previous round
    /// had to send.
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

    #[test]
    fn throttle_grows_by_a_step_when_a_round_is_stuck() {
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
}
