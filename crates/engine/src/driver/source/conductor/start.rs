//! Begins a migration: connects, and opens the journal. The guest is not affected yet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_handover::journal::{FileJournal, Opening, Side};
use vmferry_handover::{Resume, Running, SourceGuest, SourceState};
use vmferry_transport::{Dialer, RateLimiter};
use vmferry_wire::Role;

use super::Core;
use crate::config::compression::worker_threads;
use crate::config::{BandwidthCap, SourceConfig, window_frames};
use crate::cpu::CpuMeter;
use crate::data::source::chooser::Chooser;
use crate::data::source::lane::{LaneSizes, Signal, SourceLane};
use crate::driver::greeting::Purpose;
use crate::driver::life::Life;
use crate::driver::source::connect;
use crate::driver::source::control::ControlLink;
use crate::driver::source::fetch::{FetchServers, Reports};
use crate::driver::source::orders::Orders;
use crate::driver::source::redial::Redialer;
use crate::error::MigrateError;
use crate::machine::peer::SourceSide;
use crate::machine::source::Source;
use crate::machine::source::common::FIELDS_SINCE;
use crate::machine::source::io::Input;
use crate::vmm::GuestDescription;
use crate::witness::witness_id;

impl<'a, V: Resume> Core<'a, V> {
    /// Everything that can fail before the guest is affected.
    pub(super) fn connect(
        vm: V,
        (guest, mut our_side): (GuestDescription, SourceSide),
        dialer: &Dialer,
        config: SourceConfig,
        orders: &'a Orders,
        cpu: &CpuMeter,
    ) -> Result<Self, (V, Box<MigrateError>)> {
        let inputs = crossbeam_channel::unbounded();
        if orders.attach(inputs.0.clone()) {
            let during = "the connection";
            return Err((vm, Box::new(MigrateError::Cancelled { during })));
        }
        orders.publish_destination(dialer.address.to_string());
        orders.publish("connecting", SourceState::Holding);
        let (purpose, silence) = (Purpose::control(Role::Control), config.timeouts.silence);
        let witness = witness_id(config.witness.as_deref());
        let made = connect::control(dialer, purpose, config.protocol.range(), silence).and_then(
            |channel| {
                if witness.is_some() && channel.version < FIELDS_SINCE {
                    return Err(MigrateError::NoWitnessThere);
                }
                let journal = FileJournal::begin_for(
                    &config.journal_directory,
                    config.session,
                    Side::Source,
                    Opening {
                        guest: guest.identity.clone(),
                        process: config.process.clone(),
                        witness: witness.clone(),
                    },
                    (&channel.transport, &channel.peer_names),
                )?;
                Ok((channel, journal))
            },
        );
        let (channel, journal) = match made {
            Ok(made) => made,
            Err(error) => return Err((vm, Box::new(error))),
        };
        (our_side.protocol, our_side.witness) = (channel.version, witness);
        let signal = Arc::new(Signal::default());
        let workers = worker_threads(config.compression.workers);
        let channels = config.channels.get();
        let window = window_frames(channels, workers, Duration::ZERO);
        let sizes = LaneSizes { lanes: channels, workers, window };
        let cap = config.max_bandwidth.map(BandwidthCap::get);
        let chooser = Arc::new(Chooser::new(&config.compression, channels, cap));
        let lane = |number| {
            let (chooser, signal) = (Arc::clone(&chooser), Arc::clone(&signal));
            Arc::new(SourceLane::new(number, &sizes, chooser, signal))
        };
        let lanes: Vec<_> = (0..channels).map(lane).collect();
        let control = ControlLink::new(dialer, &config, lanes.clone(), cpu.clone());
        let life = match Life::begin(control.slot()) {
            Ok(life) => life,
            Err(source) => {
                return Err((vm, Box::new(MigrateError::no_thread(source))));
            }
        };
        let limiter = RateLimiter::new(cap);
        let reports = Reports { results: inputs.0.clone(), cpu: cpu.clone(), sent: orders.sent() };
        let way = (limiter.clone(), Arc::clone(&chooser));
        let fetch_lanes = our_side.fetch_lanes(&config);
        let mut fetch = FetchServers::new(channels, fetch_lanes, way, reports);
        if our_side.streams {
            fetch = fetch.tunnelled(channels, fetch_lanes);
        }
        let mut core = Self {
            machine: Source::new(config.clone(), guest, our_side, Duration::ZERO),
            guest: SourceGuest::Running(Running::new(vm)),
            dialer: dialer.clone(),
            orders,
            started: Instant::now(),
            resume_failure: None,
            journal,
            control,
            life,
            inputs,
            signal,
            lanes,
            senders: Vec::new(),
            fetch,
            redialer: Redialer::new(dialer, &config),
            limiter,
            chooser,
            cpu: cpu.clone(),
            transport: channel.transport.clone(),
            sent_frames: 0,
            config,
        };
        if let Err(error) = core.control.begin(channel) {
            let _ = core.inputs.0.send(Input::LinkLost(error));
        }
        Ok(core)
    }
}
