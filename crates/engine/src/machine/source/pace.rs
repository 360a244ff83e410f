//! When the source switches over: the prediction of the downtime, the throttling, and the hold.

use std::time::Duration;

use crate::config::{BandwidthCap, SourceConfig};
use crate::rounds::convergence::{Harvest, Predictor};
use crate::rounds::throttle::Throttle;

/// The pace of pre-copy and the time of the switchover.
#[derive(Debug)]
pub(super) struct Pace {
    pub(super) predictor: Predictor,
    pub(super) throttle: Throttle,
    pub(super) hold: Hold,
    /// When the start of the dirty log was requested.
    pub(super) log_started: Duration,
    /// When the last harvest with the guest running was done.
    pub(super) last_harvest: Duration,
}

impl Pace {
    pub(super) fn new(config: &SourceConfig, now: Duration) -> Self {
        Self {
            predictor: Predictor::new(config.limits(), config.max_bandwidth.map(BandwidthCap::get)),
            throttle: Throttle::new(config.throttle.get()),
            hold: Hold::new(config.pause_before_switchover),
            log_started: now,
            last_harvest: now,
        }
    }
}

/// Whether the switchover must wait for the user.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hold {
    /// The user has requested a hold.
    pub(super) wanted: bool,
    /// Since when the migration is held.
    pub(super) held: Option<Held>,
    /// Time and rounds that do not count for the user's limits.
    spent: Held,
}

/// A time since the start of the log, and a number of rounds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) elapsed: Duration,
    pub(super) rounds: u32,
}

impl Hold {
    fn new(wanted: bool) -> Self {
        Self { wanted, ..Self::default() }
    }

    /// The harvest without time and rounds that do not count for the limits.
    pub(super) fn without(&self, harvest: Harvest) -> Harvest {
        Harvest {
            rounds: harvest.rounds.saturating_sub(self.spent.rounds),
            elapsed: harvest.elapsed.saturating_sub(self.spent.elapsed),
            ..harvest
        }
    }

    /// The user allows the switchover.
    pub(super) fn release(&mut self, elapsed: Duration, rounds: u32) {
        self.wanted = false;
        if let Some(held) = self.held.take() {
            self.spent = Held {
                elapsed: elapsed.saturating_sub(held.elapsed),
                rounds: rounds - held.rounds,
            };
        }
    }
}
