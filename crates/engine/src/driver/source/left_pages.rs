//! Serving the pages of a guest whose migrating process has died, from the memory that its VMM
//! still has.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{HotPages, PageHashes};
use vmferry_memory::{GuestMemory, PageSet};
use vmferry_transport::{Dialer, RateLimiter};
use vmferry_wire::Role;

use super::connect::JoinedLane;
use super::fetch::{FetchServers, Reports};
use super::orders::Orders;
use super::redial::{Redialed, Redialer};
use crate::config::{BandwidthCap, SourceConfig};
use crate::cpu::CpuMeter;
use crate::data::source::chooser::Chooser;
use crate::data::source::page_encoder::PageEncoder;
use crate::data::source::page_server::Served;
use crate::driver::greeting::Purpose;
use crate::error::MigrateError;
use crate::machine::source::io::{Action, Input};

/// The fetch lanes of a recovered source.
pub struct LeftPages {
    memory: GuestMemory,
    hashes: Arc<PageHashes>,
    hot: Arc<HotPages>,
    config: SourceConfig,
    servers: FetchServers,
    redialer: Redialer,
}

impl LeftPages {
    /// Serves the pages of this memory.
    pub fn new(
        memory: GuestMemory,
        dialer: &Dialer,
        config: &SourceConfig,
        orders: &Orders,
        inputs: Sender<Input>,
    ) -> Self {
        let cap = config.max_bandwidth.map(BandwidthCap::get);
        let channels = config.channels.get();
        let chooser = Arc::new(Chooser::new(&config.compression, channels, cap));
        let way = (RateLimiter::new(cap), chooser);
        let reports = Reports { results: inputs, cpu: CpuMeter::default(), sent: orders.sent() };
        Self {
            hashes: Arc::new(PageHashes::for_memory(&memory)),
            // No page is a base for a delta here.
            hot: Arc::new(HotPages::new(0)),
            memory,
            config: config.clone(),
            servers: FetchServers::new(channels, config.fetch_lanes(), way, reports),
            redialer: Redialer::new(dialer, config),
        }
    }

    /// Carries out an action on the fetch lanes.
    pub fn execute(&mut self, action: Action) -> Option<Input> {
        match action {
            Action::ServePages { round } => match self.unpopulated() {
                Ok(zero) => {
                    // Only the destination knows what it lacks.
                    let unsent = PageSet::for_memory(&self.memory).into();
                    self.servers.serve(Served { round, zero: Some(Arc::new(zero)), unsent });
                    None
                }
                Err(error) => Some(Input::Failed(error)),
            },
            Action::RejoinLane { lane, token, attempt, delay } => {
                self.redialer.dial(Purpose { role: Role::Data, lane, token, attempt }, delay);
                None
            }
            _ => None,
        }
    }

    /// Reading a page that was never populated would populate it.
    fn unpopulated(&self) -> Result<PageSet, MigrateError> {
        let mut pages = PageSet::for_memory(&self.memory);
        for slot in self.memory.slots() {
            pages.bitmap_mut(slot.id()).set_run(0, slot.pages());
        }
        pages.subtract(&self.memory.populated()?);
        Ok(pages)
    }

    /// Results of dialing; for [`rejoin`](Self::rejoin).
    pub fn dialed(&self) -> &Receiver<Redialed> {
        self.redialer.dialed()
    }

    /// Continues a lane on the dialed channel, unless it was dialed again meanwhile.
    pub fn rejoin(&mut self, redialed: Redialed) -> Input {
        let Redialed { lane, attempt, joined } = redialed;
        if !self.redialer.is_latest(lane, attempt) {
            return Input::Tick;
        }
        let joined = joined.and_then(|JoinedLane { channel, .. }| {
            let encoder = self.encoder();
            self.servers.join((lane, attempt), channel, encoder)
        });
        match joined {
            Ok(()) => Input::LaneRejoined { lane, placed: 0 },
            Err(error) => Input::LaneNotRejoined { lane, error },
        }
    }

    fn encoder(&self) -> PageEncoder {
        let compressors = self.config.compression.compressors.clone();
        let (hashes, hot) = (Arc::clone(&self.hashes), Arc::clone(&self.hot));
        PageEncoder::new(self.memory.clone(), hashes, compressors, hot)
    }

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    pub fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.servers.is_at(lane, attempt)
    }
}
