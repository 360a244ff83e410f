//! The fetch lanes of the source's driver: each has a thread that answers requests for pages.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use vmferry_handover::Resume;
use vmferry_wire::{FetchLanes, Role, Token};

use super::{Core, GuestSide};
use crate::data::source::page_server::{BackgroundWay, FetchLaneContext, PageServer, Served};
use crate::driver::greeting::Purpose;
use crate::driver::source::connect;
use crate::error::MigrateError;
use crate::link::DataChannel;
use crate::machine::source::io::Input;

/// The running page servers.
#[derive(Default)]
pub(super) struct FetchServers {
    /// By lane.
    servers: BTreeMap<u8, Server>,
    /// The first lane that is not for faults.
    first_background: u8,
    served: Arc<OnceLock<Served>>,
}

struct Server {
    /// How often the lane's channel was dialed before.
    attempt: u64,
    _running: PageServer,
}

impl FetchServers {
    /// Answers requests from now on.
    pub(super) fn serve(&self, served: Served) {
        // A migration serves pages once.
        let _ = self.served.set(served);
    }

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    pub(super) fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.servers.get(&lane).is_some_and(|server| server.attempt == attempt)
    }

    /// Closes all channels and waits for the threads.
    pub(super) fn stop(&mut self) {
        self.servers.clear();
    }
}

impl<V: Resume> Core<'_, V> {
    /// Opens all fetch lanes, which are numbered after the data lanes.
    pub(super) fn open_fetch_lanes(
        &mut self,
        side: &impl GuestSide<V>,
        token: Token,
        lanes: FetchLanes,
        attempts: &[u64],
    ) -> Result<(), MigrateError> {
        let first = self.config.channels.get();
        self.fetch.stop();
        self.fetch.first_background = first.saturating_add(lanes.faults);
        let versions = self.config.protocol.range().clone();
        for (lane, &attempt) in (first..).zip(attempts) {
            let purpose = Purpose { role: Role::Data, lane, token, attempt };
            let joined = connect::data(&self.dialer, purpose, &versions, &self.config.timeouts)?;
            self.serve_lane(side, lane, attempt, joined.channel)?;
        }
        Ok(())
    }

    /// Answers requests on a greeted channel.
    pub(super) fn serve_lane(
        &mut self,
        side: &impl GuestSide<V>,
        lane: u8,
        attempt: u64,
        channel: DataChannel,
    ) -> Result<(), MigrateError> {
        let Some(encoder) = side.sender_encoder(self) else { return Ok(()) };
        let background = (lane >= self.fetch.first_background).then(|| BackgroundWay {
            limiter: self.limiter.clone(),
            chooser: Arc::clone(&self.chooser),
        });
        let context = FetchLaneContext {
            lane,
            attempt,
            served: Arc::clone(&self.fetch.served),
            background,
            results: self.inputs.0.clone(),
            cpu: self.cpu.clone(),
            sent: self.orders.sent(),
        };
        let running = PageServer::start(channel, encoder, context);
        let server = Server { attempt, _running: running.map_err(MigrateError::no_thread)? };
        self.fetch.servers.insert(lane, server);
        Ok(())
    }

    /// Continues a fetch lane on the redialed channel.
    pub(super) fn rejoin_fetch_lane(
        &mut self,
        side: &impl GuestSide<V>,
        (lane, attempt): (u8, u64),
        channel: DataChannel,
    ) -> Input {
        match self.serve_lane(side, lane, attempt, channel) {
            Ok(()) => Input::LaneRejoined { lane, placed: 0 },
            Err(error) => Input::LaneNotRejoined { lane, error },
        }
    }
}
