//! Changes of the settings of a running migration.

use std::time::Duration;

use crate::config::{BandwidthCap, PostCopy, RoundLimit, ThrottleLimit};

/// The settings to change. A setting that is `None` is not changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The cap on all data channels together; `Some(None)` removes it.
    pub max_bandwidth: Option<Option<BandwidthCap>>,
    /// The longest accepted downtime.
    pub downtime_limit: Option<Duration>,
    /// The most rounds with the guest running, including those already sent.
    pub max_rounds: Option<RoundLimit>,
    /// The most percent of their time that the vCPUs may lose; 0 removes the throttling.
    pub throttle: Option<ThrottleLimit>,
    /// Whether to switch over with post-copy.
    pub post_copy: Option<PostCopy>,
}

impl Change {
    /// Merges a later change into this one.
    pub(crate) fn join(&mut self, later: &Self) {
        self.max_bandwidth = later.max_bandwidth.or(self.max_bandwidth);
        self.downtime_limit = later.downtime_limit.or(self.downtime_limit);
        self.max_rounds = later.max_rounds.or(self.max_rounds);
        self.throttle = later.throttle.or(self.throttle);
        self.post_copy = later.post_copy.or(self.post_copy);
    }
}
