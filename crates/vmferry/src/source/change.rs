//! What the user changes of a migration under way.

use std::time::Duration;

use crate::config::{ConfigError, check_bandwidth, check_rounds, check_throttle};

/// What the user changes; what is `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The cap on all data channels together, in bytes per second; `Some(None)` takes it back.
    pub max_bandwidth: Option<Option<u64>>,
    /// The longest accepted downtime.
    pub downtime_limit: Option<Duration>,
    /// The most rounds with the guest running, those that were sent already among them.
    pub max_rounds: Option<u32>,
    /// The most per cent of their time that the vCPUs may lose; 0 gives them all of it back.
    pub throttle: Option<u8>,
}

impl Change {
    /// Checks the ranges.
    ///
    /// # Errors
    /// The first setting that is out of its range.
    pub fn check(&self) -> Result<(), ConfigError> {
        check_bandwidth(self.max_bandwidth.flatten())?;
        self.max_rounds.map_or(Ok(()), check_rounds)?;
        self.throttle.map_or(Ok(()), check_throttle)
    }

    /// Takes what a later one changes.
    pub(super) fn join(&mut self, later: &Self) {
        self.max_bandwidth = later.max_bandwidth.or(self.max_bandwidth);
        self.downtime_limit = later.downtime_limit.or(self.downtime_limit);
        self.max_rounds = later.max_rounds.or(self.max_rounds);
        self.throttle = later.throttle.or(self.throttle);
    }
}
