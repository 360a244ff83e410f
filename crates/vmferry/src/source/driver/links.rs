//! The channels of the driver of the source.

use std::sync::Arc;

use vmferry_wire::{ControlMessage, Token};

use super::Driver;
use crate::error::MigrateError;
use crate::link::lost;
use crate::source::connect;
use crate::source::io::Input;
use crate::source::lane::{Lane, LaneContext};
use crate::vm::SourceVm;

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
        let context = LaneContext {
            memory: self.memory.clone(),
            log: Arc::clone(&self.log),
            hashes: Arc::clone(&self.hashes),
            limiter: self.limiter.clone(),
            results: self.inputs.0.clone(),
            cpu: self.cpu.clone(),
            lanes: self.config.channels,
            sent_bytes: self.orders.sent_bytes(),
        };
        for (lane, window) in (0..self.config.channels).zip(&self.windows) {
            let timeouts = &self.config.timeouts;
            let (writer, reader, closer) =
                connect::data(&self.dialer, lane, *token, timeouts.silence, timeouts.stall)?;
            let lane = Lane::start(lane, &context, Arc::clone(window), writer)
                .map_err(|source| MigrateError::Local { action: "start a thread", source })?;
            self.lanes.push(lane);
            self.lane_ends.push((reader, closer));
        }
        Ok(())
    }
}
