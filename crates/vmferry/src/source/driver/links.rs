//! The channels of the driver of the source.

use std::sync::Arc;
use std::time::Duration;

use vmferry_wire::{ControlMessage, Role, Token};

use super::Driver;
use crate::compression::worker_threads;
use crate::error::MigrateError;
use crate::greeting::Purpose;
use crate::link::lost;
use crate::source::connect;
use crate::source::encode::PageEncoder;
use crate::source::io::Input;
use crate::source::lane::{Lane, LaneContext};
use crate::source::plan::LanePlan;
use crate::source::pool::{Maker, Pool, PoolLane};
use crate::source::redial::Redialled;
use crate::vm::SourceVm;

/// Frames that a lane has ready beside those that workers are making: one is sent while the next waits.
const FRAMES_AHEAD: usize = 2;

impl<V: SourceVm> Driver<'_, V> {
    pub(super) fn send(&mut self, message: &ControlMessage) -> Option<Input> {
        match self.control.send(message) {
            Ok(()) => None,
            // A source that keeps its guest owes the peer no more than the attempt.
            Err(_) if self.machine.handover().is_final() => None,
            Err(error) => {
                let error = lost("control", self.machine.phase_name(), &error);
                Some(Input::LinkLost(error))
            }
        }
    }

    pub(super) fn open_lanes(&mut self, token: &Token) -> Result<(), MigrateError> {
        let no_thread = |source| MigrateError::Local { action: "start a thread", source };
        let context = LaneContext {
            limiter: self.limiter.clone(),
            chooser: Arc::clone(&self.chooser),
            results: self.inputs.0.clone(),
            cpu: self.cpu.clone(),
            sent: self.orders.sent(),
        };
        let compression = &self.config.compression;
        let workers = worker_threads(compression.workers);
        let encoder = || {
            let (memory, hashes) = (self.memory.clone(), Arc::clone(&self.hashes));
            PageEncoder::new(memory, hashes, compression.compressors.clone(), Arc::clone(&self.hot))
        };
        let mut pool_lanes = Vec::new();
        for (lane, window) in (0..self.config.channels).zip(&self.windows) {
            let purpose = Purpose { role: Role::Data, lane, token: *token, attempt: 0 };
            let channel = connect::data(&self.dialer, purpose, &self.config.timeouts)?;
            let log = Arc::clone(&self.log);
            let plan = LanePlan::new(lane, self.config.channels, log);
            let (window, signal) = (Arc::clone(window), Arc::clone(&self.signal));
            let pool_lane = Arc::new(PoolLane::new(plan, window, workers + FRAMES_AHEAD, signal));
            pool_lanes.push(Arc::clone(&pool_lane));
            let maker = Maker::new(
                lane,
                Arc::clone(&pool_lane),
                Arc::clone(&self.chooser),
                encoder(),
                Arc::clone(&self.signal),
            );
            let lane = Lane::start(lane, pool_lane, maker, context.clone(), channel);
            let lane = lane.map_err(no_thread)?;
            self.lanes.push(lane);
        }
        let pool = Pool::start(
            pool_lanes,
            Arc::clone(&self.signal),
            Arc::clone(&self.chooser),
            (0..workers).map(|_| encoder()).collect(),
            self.inputs.0.clone(),
            self.cpu.clone(),
        );
        self.pool = Some(pool.map_err(no_thread)?);
        Ok(())
    }

    /// Whether a lane's present channel is the one that was dialled so often before.
    pub(super) fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.lanes.get(usize::from(lane)).is_some_and(|lane| lane.attempt() == attempt)
    }

    /// Closes a lane's channel and dials it again.
    pub(super) fn redial(&mut self, lane: u8, token: Token, attempt: u64, delay: Duration) {
        if let Some(lane) = self.lanes.get(usize::from(lane)) {
            lane.close();
        }
        self.redialler.dial(Purpose { role: Role::Data, lane, token, attempt }, delay);
    }

    /// Goes on with a lane on the channel that was dialled, if no other was meanwhile.
    pub(super) fn rejoin(&mut self, redialled: Redialled) -> Input {
        let Redialled { lane, attempt, channel } = redialled;
        if !self.redialler.is_latest(lane, attempt) {
            return Input::Tick;
        }
        let Some(joined) = self.lanes.get_mut(usize::from(lane)) else { return Input::Tick };
        match channel {
            Ok(channel) => {
                let placed = channel.placed;
                if let Some(window) = self.windows.get(usize::from(lane)) {
                    window.placed(placed);
                }
                match joined.attach(attempt, channel) {
                    Ok(()) => Input::LaneRejoined { lane, placed },
                    Err(source) => {
                        Input::Failed(MigrateError::Local { action: "start a thread", source })
                    }
                }
            }
            Err(error) => Input::LaneNotRejoined { lane, error },
        }
    }
}
