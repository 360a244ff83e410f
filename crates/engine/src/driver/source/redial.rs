//! Redialing the channels of lanes.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::Dialer;

use super::connect;
use super::connect::JoinedLane;
use crate::config::{SourceConfig, Timeouts};
use crate::driver::greeting::Purpose;
use crate::error::MigrateError;

/// Dials in separate threads, and reports the results.
pub struct Redialer {
    dialer: Dialer,
    versions: RangeInclusive<u16>,
    timeouts: Timeouts,
    /// By lane: the latest attempt, and a sender whose drop ends the delay before it.
    waiting: BTreeMap<u8, (u64, Sender<()>)>,
    dialed: (Sender<Redialed>, Receiver<Redialed>),
}

/// The result of an attempt.
pub struct Redialed {
    /// The lane of the channel.
    pub lane: u8,
    /// The number of the attempt.
    pub attempt: u64,
    /// The channel.
    pub joined: Result<JoinedLane, MigrateError>,
}

impl Redialer {
    /// A redialer for a destination.
    pub fn new(dialer: &Dialer, config: &SourceConfig) -> Self {
        Self {
            dialer: dialer.clone(),
            versions: config.protocol.range().clone(),
            timeouts: config.timeouts,
            waiting: BTreeMap::new(),
            dialed: crossbeam_channel::unbounded(),
        }
    }

    /// Dials the channel of a lane after a delay, and abandons the previous attempt.
    pub fn dial(&mut self, purpose: Purpose, delay: Duration) {
        let (stop, stopped) = crossbeam_channel::bounded(1);
        let Purpose { lane, attempt, .. } = purpose;
        self.waiting.insert(lane, (attempt, stop));
        let (dialer, versions) = (self.dialer.clone(), self.versions.clone());
        let (timeouts, results) = (self.timeouts, self.dialed.0.clone());
        let spawned =
            std::thread::Builder::new().name(format!("lane{lane}-dial")).spawn(move || {
                if connect::wait(delay, &stopped) {
                    let joined = connect::data(&dialer, purpose, &versions, &timeouts);
                    let _ = results.send(Redialed { lane, attempt, joined });
                }
            });
        if let Err(source) = spawned {
            let joined = Err(MigrateError::no_thread(source));
            let _ = self.dialed.0.send(Redialed { lane, attempt, joined });
        }
    }

    /// The results of the attempts.
    pub fn dialed(&self) -> &Receiver<Redialed> {
        &self.dialed.1
    }

    /// Whether this is the latest attempt for a lane.
    pub fn is_latest(&self, lane: u8, attempt: u64) -> bool {
        self.waiting.get(&lane).is_some_and(|(latest, _)| *latest == attempt)
    }

    /// Abandons all attempts.
    pub fn stop(&mut self) {
        self.waiting.clear();
    }
}
