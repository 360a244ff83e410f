//! The channels of the source's driver.

use std::sync::Arc;
use std::time::Duration;
use vmferry_handover::Resume;

use vmferry_wire::{ControlMessage, Role, Token};

use super::{Core, GuestSide};
use crate::data::source::lane::{LaneSender, SenderContext};
use crate::driver::greeting::Purpose;
use crate::driver::source::connect;
use crate::driver::source::connect::JoinedLane;
use crate::driver::source::redial::Redialed;
use crate::error::MigrateError;
use crate::link::{DataChannel, lost};
use crate::machine::source::io::Input;

impl<V: Resume> Core<'_, V> {
    pub(super) fn send(&mut self, message: &ControlMessage) -> Option<Input> {
        match self.control.send(message) {
            Ok(()) => None,
            // A source that keeps its guest only has to try to notify the peer.
            Err(_) if self.machine.handover().is_final() => None,
            Err(error) => {
                let error = lost("control", self.machine.phase_name(), &error);
                Some(Input::LinkLost(error))
            }
        }
    }

    pub(super) fn open_lanes(
        &mut self,
        side: &mut impl GuestSide<V>,
        token: &Token,
    ) -> Result<(), MigrateError> {
        let context = SenderContext {
            limiter: self.limiter.clone(),
            results: self.inputs.0.clone(),
            cpu: self.cpu.clone(),
            sent: self.orders.sent(),
        };
        for lane in &self.lanes {
            let number = lane.number();
            let purpose = Purpose { role: Role::Data, lane: number, token: *token, attempt: 0 };
            let versions = self.config.protocol.range();
            let joined = connect::data(&self.dialer, purpose, versions, &self.config.timeouts)?;
            let encoder = side.sender_encoder(self);
            let sender =
                LaneSender::start(Arc::clone(lane), encoder, context.clone(), joined.channel);
            self.senders.push(sender.map_err(MigrateError::no_thread)?);
        }
        side.lanes_are_open(self)
    }

    /// Whether data channels have accepted frames since the last call.
    pub(super) fn has_sent(&mut self) -> bool {
        let (_, frames) = self.orders.sent().so_far();
        std::mem::replace(&mut self.sent_frames, frames) != frames
    }

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    pub(super) fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.fetch.is_at(lane, attempt)
            || self.senders.get(usize::from(lane)).is_some_and(|sender| sender.attempt() == attempt)
    }

    /// Closes a lane's channel and redials it.
    pub(super) fn redial(&mut self, lane: u8, token: Token, attempt: u64, delay: Duration) {
        if let Some(sender) = self.senders.get(usize::from(lane)) {
            sender.close_channel();
        }
        self.redialer.dial(Purpose { role: Role::Data, lane, token, attempt }, delay);
    }

    /// Continues a lane on the redialed channel, unless it was redialed again meanwhile.
    pub(super) fn rejoin(&mut self, side: &impl GuestSide<V>, redialed: Redialed) -> Input {
        let Redialed { lane, attempt, joined } = redialed;
        if !self.redialer.is_latest(lane, attempt) {
            return Input::Tick;
        }
        let Some(sender) = self.senders.get_mut(usize::from(lane)) else {
            return match joined {
                Ok(JoinedLane { channel, .. }) => {
                    self.rejoin_fetch_lane(side, (lane, attempt), channel)
                }
                Err(error) => Input::LaneNotRejoined { lane, error },
            };
        };
        match joined {
            Ok(JoinedLane { channel, placed }) => {
                if let Some(lane) = self.lanes.get(usize::from(lane)) {
                    lane.acknowledge(placed);
                }
                match sender.attach(attempt, channel) {
                    Ok(()) => Input::LaneRejoined { lane, placed },
                    Err(source) => Input::Failed(MigrateError::no_thread(source)),
                }
            }
            Err(error) => Input::LaneNotRejoined { lane, error },
        }
    }
}

/// The fetch lanes.
impl<V: Resume> Core<'_, V> {
    /// Opens all fetch lanes, which are numbered after the data lanes.
    pub(super) fn open_fetch_lanes(
        &mut self,
        side: &impl GuestSide<V>,
        token: Token,
        attempts: &[u64],
    ) -> Result<(), MigrateError> {
        self.fetch.stop();
        let versions = self.config.protocol.range().clone();
        for (lane, &attempt) in (self.config.channels.get()..).zip(attempts) {
            let purpose = Purpose { role: Role::Data, lane, token, attempt };
            let joined = connect::data(&self.dialer, purpose, &versions, &self.config.timeouts)?;
            self.join_fetch_lane(side, (lane, attempt), joined.channel)?;
        }
        Ok(())
    }

    /// Uses a greeted channel for a fetch lane.
    fn join_fetch_lane(
        &mut self,
        side: &impl GuestSide<V>,
        lane: (u8, u64),
        channel: DataChannel,
    ) -> Result<(), MigrateError> {
        match side.sender_encoder(self) {
            Some(encoder) => self.fetch.join(lane, channel, encoder),
            None => self.fetch.attach(lane, channel),
        }
    }

    /// Continues a fetch lane on the redialed channel.
    fn rejoin_fetch_lane(
        &mut self,
        side: &impl GuestSide<V>,
        (lane, attempt): (u8, u64),
        channel: DataChannel,
    ) -> Input {
        match self.join_fetch_lane(side, (lane, attempt), channel) {
            Ok(()) => Input::LaneRejoined { lane, placed: 0 },
            Err(error) => Input::LaneNotRejoined { lane, error },
        }
    }
}
