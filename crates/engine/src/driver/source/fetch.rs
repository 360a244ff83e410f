//! The fetch lanes of the source's driver: each has a thread that answers requests for pages.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use crossbeam_channel::Sender;
use vmferry_transport::RateLimiter;
use vmferry_wire::FetchLanes;

use crate::cpu::CpuMeter;
use crate::data::source::chooser::Chooser;
use crate::data::source::page_encoder::PageEncoder;
use crate::data::source::page_server::{BackgroundWay, FetchLaneContext, PageServer, Served};
use crate::data::source::sent::SentCounters;
use crate::data::tunnel::{Tunnel, TunnelEnd, TunnelWay};
use crate::error::MigrateError;
use crate::link::DataChannel;
use crate::machine::source::io::Input;
use crate::vmm::streamed::LateStreams;
use vmferry_handover::VmError;

/// The running page servers.
pub struct FetchServers {
    /// By lane.
    servers: BTreeMap<u8, Server>,
    /// The first lane that is not for faults.
    first_background: u8,
    served: Arc<OnceLock<Served>>,
    way: BackgroundWay,
    reports: Reports,
    /// The lanes of a carried guest, in order, which has no page servers.
    tunnels: Vec<Tunnelled>,
}

/// A lane that is a tunnel.
struct Tunnelled {
    lane: u8,
    tunnel: Tunnel,
    /// How often the present channel was dialed before.
    attempt: Option<u64>,
}

/// What page servers report to.
#[derive(Clone)]
pub struct Reports {
    /// Queue for lost channels.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// Counters of what was sent.
    pub sent: Arc<SentCounters>,
}

struct Server {
    /// How often the lane's channel was dialed before.
    attempt: u64,
    _running: PageServer,
}

impl FetchServers {
    /// Servers without lanes, which are numbered after the data lanes.
    pub fn new(
        channels: u8,
        lanes: FetchLanes,
        (limiter, chooser): (RateLimiter, Arc<Chooser>),
        reports: Reports,
    ) -> Self {
        Self {
            servers: BTreeMap::new(),
            first_background: channels.saturating_add(lanes.faults),
            served: Arc::default(),
            way: BackgroundWay { limiter, chooser },
            reports,
            tunnels: Vec::new(),
        }
    }

    /// Makes all lanes tunnels, for a carried guest.
    #[must_use]
    pub fn tunnelled(mut self, channels: u8, lanes: FetchLanes) -> Self {
        let lanes = channels..channels + lanes.count();
        self.tunnels = lanes.map(|lane| self.new_tunnel(lane)).collect();
        self
    }

    fn new_tunnel(&self, lane: u8) -> Tunnelled {
        let is_background = lane >= self.first_background;
        let sent = Arc::clone(&self.reports.sent);
        let way = TunnelWay {
            background: is_background.then(|| self.way.limiter.clone()),
            on_sent: Some(Arc::new(move |bytes| sent.tunnelled(bytes))),
        };
        let tunnel = Tunnel::new(lane, way, self.reports.cpu.clone());
        Tunnelled { lane, tunnel, attempt: None }
    }

    /// Begins all tunnels again, with the streams of a VMM that `connect` has connected to new
    /// ones.
    ///
    /// # Errors
    /// Errors of `connect`, or the system can't create a thread.
    pub fn reconnect(
        &mut self,
        connect: impl FnOnce() -> Result<LateStreams, VmError>,
    ) -> Result<(), MigrateError> {
        let lanes: Vec<u8> = self.tunnels.iter().map(|known| known.lane).collect();
        // Their threads must not take the end of the old streams for the VMM's.
        self.tunnels.clear();
        let failed = |source| MigrateError::Vm { action: "go on with its post-copy", source };
        let connected = connect();
        self.tunnels = lanes.into_iter().map(|lane| self.new_tunnel(lane)).collect();
        let LateStreams { requests, urgent, failure } = connected.map_err(failed)?;
        let main = requests.try_clone().map_err(|error| failed(error.into()))?;
        let urgent =
            TunnelEnd { into_vmm: Some(requests), from_vmm: urgent, ..TunnelEnd::default() };
        let results = self.reports.results.clone();
        let on_end = move || {
            // A VMM that has sent everything ends its streams, too.
            if let Some(reason) = failure.take() {
                let _ = results.send(Input::NotReconnected(failed(reason)));
            }
        };
        let rest = TunnelEnd {
            from_vmm: Some(main),
            on_end: Some(Box::new(on_end)),
            ..TunnelEnd::default()
        };
        self.begin([urgent, rest])
    }

    /// Connects the tunnels, in their order, with the VMM of the carried guest.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn begin(&mut self, ends: impl IntoIterator<Item = TunnelEnd>) -> Result<(), MigrateError> {
        for (tunnelled, end) in self.tunnels.iter_mut().zip(ends) {
            tunnelled.tunnel.begin(end).map_err(MigrateError::no_thread)?;
        }
        Ok(())
    }

    /// Uses a greeted channel for a tunnel, in place of its earlier one.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn attach(
        &mut self,
        (lane, attempt): (u8, u64),
        channel: DataChannel,
    ) -> Result<(), MigrateError> {
        let Some(known) = self.tunnels.iter_mut().find(|known| known.lane == lane) else {
            return Ok(());
        };
        known.attempt = Some(attempt);
        let results = self.reports.results.clone();
        let on_loss = Box::new(move |error| {
            let _ = results.send(match error {
                error @ MigrateError::LinkLost { .. } => Input::LaneLost { lane, attempt, error },
                error => Input::Failed(error),
            });
        });
        known.tunnel.attach(channel, on_loss).map_err(MigrateError::no_thread)
    }

    /// The guest stays here, and its VMM uses its sockets alone from now on.
    pub fn end_tunnels(&mut self) {
        self.tunnels.clear();
    }

    /// Answers requests from now on.
    pub fn serve(&self, served: Served) {
        // A migration serves pages once.
        let _ = self.served.set(served);
    }

    /// Answers requests on a greeted channel, which replaces the lane's earlier one.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn join(
        &mut self,
        (lane, attempt): (u8, u64),
        channel: DataChannel,
        encoder: PageEncoder,
    ) -> Result<(), MigrateError> {
        let Reports { results, cpu, sent } = self.reports.clone();
        let background = (lane >= self.first_background).then(|| self.way.clone());
        let served = Arc::clone(&self.served);
        let context = FetchLaneContext { lane, attempt, served, background, results, cpu, sent };
        let running = PageServer::start(channel, encoder, context);
        let server = Server { attempt, _running: running.map_err(MigrateError::no_thread)? };
        self.servers.insert(lane, server);
        Ok(())
    }

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    pub fn is_at(&self, lane: u8, attempt: u64) -> bool {
        let is_tunnel = |known: &Tunnelled| known.lane == lane && known.attempt == Some(attempt);
        self.servers.get(&lane).is_some_and(|server| server.attempt == attempt)
            || self.tunnels.iter().any(is_tunnel)
    }

    /// Closes all channels and waits for the threads.
    pub fn stop(&mut self) {
        self.servers.clear();
        self.tunnels.iter_mut().for_each(|known| known.tunnel.detach());
    }
}
