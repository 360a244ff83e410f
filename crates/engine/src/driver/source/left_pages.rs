//! Serving the pages of a guest whose migrating process has died, from the memory that its VMM
//! still has.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{HotPages, PageHashes};
use vmferry_memory::{GuestMemory, PageSet};
use vmferry_transport::{Dialer, RateLimiter};
use vmferry_wire::{FetchLanes, Role};

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
use crate::vmm::streamed::LateStreams;
use vmferry_handover::VmError;

/// The fetch lanes of a recovered source.
pub struct LeftPages {
    /// `None` if the VMM of a carried guest sends its pages.
    memory: Option<Memory>,
    config: SourceConfig,
    servers: FetchServers,
    redialer: Redialer,
}

/// The memory that pages are read from.
struct Memory {
    memory: GuestMemory,
    hashes: Arc<PageHashes>,
    hot: Arc<HotPages>,
}

impl LeftPages {
    /// Serves the pages of this memory, or with `None` those that the VMM sends once it is
    /// [connected](Self::reconnect).
    pub fn new(
        (memory, lanes): (Option<GuestMemory>, FetchLanes),
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
        let mut servers = FetchServers::new(channels, lanes, way, reports);
        if memory.is_none() {
            servers = servers.tunnelled(channels, lanes);
        }
        let memory = memory.map(|memory| Memory {
            hashes: Arc::new(PageHashes::for_memory(&memory)),
            // No page is a base for a delta here.
            hot: Arc::new(HotPages::new(0)),
            memory,
        });
        Self { memory, config: config.clone(), servers, redialer: Redialer::new(dialer, config) }
    }

    /// Whether this process reads the pages from memory, and not the VMM.
    pub fn are_read_here(&self) -> bool {
        self.memory.is_some()
    }

    /// Connects the VMM of a carried guest to new streams.
    ///
    /// # Errors
    /// See [`FetchServers::reconnect`].
    pub fn reconnect(
        &mut self,
        connect: impl FnOnce() -> Result<LateStreams, VmError>,
    ) -> Result<(), MigrateError> {
        self.servers.reconnect(connect)
    }

    /// Carries out an action on the fetch lanes.
    pub fn execute(&mut self, action: Action) -> Option<Input> {
        match action {
            Action::ServePages { round } => {
                let Memory { memory, .. } = self.memory.as_ref()?;
                match unpopulated(memory) {
                    Ok(zero) => {
                        // Only the destination knows what it lacks.
                        let unsent = PageSet::for_memory(memory).into();
                        self.servers.serve(Served { round, zero: Some(Arc::new(zero)), unsent });
                        None
                    }
                    Err(error) => Some(Input::Failed(error)),
                }
            }
            Action::RejoinLane { lane, token, attempt, delay } => {
                self.redialer.dial(Purpose { role: Role::Data, lane, token, attempt }, delay);
                None
            }
            _ => None,
        }
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
        let joined = joined.and_then(|JoinedLane { channel, .. }| match self.encoder() {
            Some(encoder) => self.servers.join((lane, attempt), channel, encoder),
            None => self.servers.attach((lane, attempt), channel),
        });
        match joined {
            Ok(()) => Input::LaneRejoined { lane, placed: 0 },
            Err(error) => Input::LaneNotRejoined { lane, error },
        }
    }

    /// `None` for a carried guest.
    fn encoder(&self) -> Option<PageEncoder> {
        let Memory { memory, hashes, hot } = self.memory.as_ref()?;
        let compressors = self.config.compression.compressors.clone();
        Some(PageEncoder::new(memory.clone(), Arc::clone(hashes), compressors, Arc::clone(hot)))
    }

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    pub fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.servers.is_at(lane, attempt)
    }
}

/// Reading a page that was never populated would populate it.
fn unpopulated(memory: &GuestMemory) -> Result<PageSet, MigrateError> {
    let mut pages = PageSet::for_memory(memory);
    for slot in memory.slots() {
        pages.bitmap_mut(slot.id()).set_run(0, slot.pages());
    }
    pages.subtract(&memory.populated()?);
    Ok(pages)
}
