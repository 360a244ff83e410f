//! Dialling the channels of lanes again.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};
use vmferry_transport::Dialer;

use super::connect::{self, DataChannel};
use crate::config::{SourceConfig, Timeouts};
use crate::error::MigrateError;
use crate::greeting::Purpose;

/// Dials in threads of its own, and says what came of it.
pub struct Redialler {
    dialer: Dialer,
    versions: RangeInclusive<u16>,
    timeouts: Timeouts,
    /// By lane: the latest attempt, and what ends the wait before it when it is dropped.
    waiting: BTreeMap<u8, (u64, Sender<()>)>,
    dialled: (Sender<Redialled>, Receiver<Redialled>),
}

/// What came of an attempt.
pub struct Redialled {
    /// Whose channel it is to be.
    pub lane: u8,
    /// Which attempt.
    pub attempt: u64,
    /// The channel, greeted.
    pub channel: Result<DataChannel, MigrateError>,
}

impl Redialler {
    /// One that dials a destination.
    pub fn new(dialer: &Dialer, config: &SourceConfig) -> Self {
        Self {
            dialer: dialer.clone(),
            versions: config.protocol.clone(),
            timeouts: config.timeouts,
            waiting: BTreeMap::new(),
            dialled: crossbeam_channel::unbounded(),
        }
    }

    /// Dials the channel of a lane after a while, and gives up the attempt before.
    pub fn dial(&mut self, purpose: Purpose, delay: Duration) {
        let (stop, stopped) = crossbeam_channel::bounded(1);
        let Purpose { lane, attempt, .. } = purpose;
        self.waiting.insert(lane, (attempt, stop));
        let (dialer, versions) = (self.dialer.clone(), self.versions.clone());
        let (timeouts, results) = (self.timeouts, self.dialled.0.clone());
        let spawned =
            std::thread::Builder::new().name(format!("lane{lane}-dial")).spawn(move || {
                if connect::wait(delay, &stopped) {
                    let channel = connect::data(&dialer, purpose, &versions, &timeouts);
                    let _ = results.send(Redialled { lane, attempt, channel });
                }
            });
        if let Err(source) = spawned {
            let channel = Err(MigrateError::Local { action: "start a thread", source });
            let _ = self.dialled.0.send(Redialled { lane, attempt, channel });
        }
    }

    /// What came of the attempts.
    pub fn dialled(&self) -> &Receiver<Redialled> {
        &self.dialled.1
    }

    /// Whether no other attempt at a lane was begun since.
    pub fn is_latest(&self, lane: u8, attempt: u64) -> bool {
        self.waiting.get(&lane).is_some_and(|(latest, _)| *latest == attempt)
    }

    /// Gives all attempts up.
    pub fn stop(&mut self) {
        self.waiting.clear();
    }
}
