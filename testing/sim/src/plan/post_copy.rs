//! Schedules in which the guest is handed over with post-copy.

use vmferry_wire::PROTOCOL_VERSION_MAX;

use super::Plan;

/// Data channels, whether both memories are verified, and the reconnect timeout in seconds.
pub(super) const SHAPES: [(u8, bool, u32); 2] = [(2, false, 0), (1, false, 20)];

/// Whether a random schedule is one with post-copy: a fifth of them are, whatever their faults are.
pub(super) fn is_random(number: u64) -> bool {
    number % 5 == 3
}

impl Plan {
    /// The same schedule with post-copy.
    #[must_use]
    pub fn with_post_copy(mut self) -> Self {
        self.post_copy = true;
        self.protocol = PROTOCOL_VERSION_MAX;
        self.verify = false;
        self
    }
}
