//! The channels of the driver of the source.

use std::sync::Arc;

use vmferry_wire::{ControlMessage, Token};

use super::Driver;
use crate::compression::worker_threads;
use crate::error::MigrateError;
use crate::link::lost;
use crate::source::connect;
use crate::source::encode::PageEncoder;
use crate::source::io::Input;
use crate::source::lane::{Lane, LaneContext};
use crate::source::plan::LanePlan;
use crate::source::pool::{Maker, Pool, PoolLane};
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
            let timeouts = &self.config.timeouts;
            let (writer, reader, closer) =
                connect::data(&self.dialer, lane, *token, timeouts.silence, timeouts.stall)?;
            self.lane_ends.push((reader, closer));
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
            let lane = Lane::start(lane, pool_lane, maker, context.clone(), writer);
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
}
