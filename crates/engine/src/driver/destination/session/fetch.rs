//! A session's missing pages, with post-copy.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use vmferry_handover::journal::{FileJournal, Record};
use vmferry_memory::{PageRun, PageSet};
use vmferry_transport::PeerIdentity;
use vmferry_wire::{
    ControlMessage, GuestIdentity, LaneOffer, LaneToken, LateStreamsId, PROTOCOL_VERSION_MAX,
    SessionId, SessionWord,
};

use super::{Session, random_token};
use crate::config::DestinationConfig;
use crate::data::destination::fetch::handle::FetchHandle;
use crate::data::destination::fetch::lanes::FetchLanes;
use crate::data::destination::late_lanes::LateLanes;
use crate::data::destination::missing::MissingPages;
use crate::data::destination::target::Target;
use crate::data::destination::tunnel_lanes::TunnelLanes;
use crate::data::tunnel::TunnelEnd;
use crate::driver::destination::notice::Notice;
use crate::driver::destination::reception::Reception;
use crate::error::MigrateError;
use crate::link::lost;
use crate::machine::destination::io::{Input, LinkId, Loaded, Report};
use crate::machine::destination::{Destination, Left};
use crate::stats::FetchStats;
use crate::vmm::DestinationVm;
use crate::vmm::streamed::LateStreams;

/// A session whose receiver has died while its guest lacked pages.
pub struct LeftSession {
    /// The session.
    pub session: SessionId,
    /// Its guest.
    pub guest: Option<GuestIdentity>,
    /// Its journal.
    pub journal: FileJournal,
    /// What the journal holds.
    pub records: Vec<Record>,
    /// The source.
    pub peer: PeerIdentity,
    /// The guest stays paused.
    pub paused: bool,
    /// Its missing pages, unless its VMM fetches them itself.
    pub missing: Option<MissingPages>,
}

impl<'a, V: DestinationVm> Session<'a, V> {
    /// Frees pages that are outdated.
    pub(super) fn free_outdated(&self, runs: &[PageRun]) -> Result<(), MigrateError> {
        match &self.target {
            Some(Target::Memory(target)) => target.free_outdated(runs),
            _ => Ok(()),
        }
    }

    /// Fetches all missing pages that are touched from now on.
    pub(super) fn fetch_missing(&mut self, missing: PageSet) -> Result<(), MigrateError> {
        // No thread places pages in the old way from here on.
        self.end_lanes();
        let (target, lanes) = match (&self.target, &mut self.fetch_lanes) {
            (Some(Target::Memory(target)), Some(LateLanes::Pages(lanes))) => (target, lanes),
            (Some(Target::Streams(target)), Some(LateLanes::Tunnels(lanes))) => {
                let failed = |source| MigrateError::Vm { action: "go on with its stream", source };
                let late = self.vm.late_streams().map_err(failed)?;
                let rest = target.kept.as_ref().and_then(|kept| kept.lock().remove(&0));
                let ends = tunnel_ends(late, rest, self.inputs.0.clone());
                return lanes.begin(LateStreamsId::FIRST, ends).map_err(MigrateError::no_thread);
            }
            _ => {
                let reason = "post-copy, which was not accepted";
                return Err(MigrateError::protocol("control", 0, reason));
            }
        };
        let target = target.clone();
        let missing = MissingPages::register(target.memory, target.hashes, missing, |memory| {
            self.vm.register_faults(memory).map_err(|source| MigrateError::Vm {
                action: "register its memory for missing pages",
                source,
            })
        })?;
        lanes.start(missing, self.inputs.0.clone(), self.cpu.clone())
    }

    /// Continues a session of an earlier receiver.
    ///
    /// # Errors
    /// The journal says that the guest lacks none, or the system lacks random numbers or threads.
    pub fn take_over(
        vm: &'a mut V,
        config: &'a DestinationConfig,
        (door, stop): (&'a Reception, &'a Receiver<()>),
        left: LeftSession,
    ) -> Result<Self, MigrateError> {
        let LeftSession { session, guest, journal, records, peer, paused, missing } = left;
        let our_side = Self::side(vm, config, PROTOCOL_VERSION_MAX);
        let missing_pages = missing.as_ref().map_or(0, MissingPages::left);
        let left = Left { session, missing_pages, paused };
        let machine =
            Destination::recovered(config.timeouts, our_side, left, &records, Duration::ZERO)
                .ok_or(MigrateError::NothingLeft { session })?;
        let mut taken = Self::new(vm, config, (door, stop), (machine, random_token()?), peer)?;
        (taken.guest, taken.journal) = (guest, Some(journal));
        let results = taken.inputs.0.clone();
        taken.fetch_lanes = Some(if let Some(missing) = missing {
            let mut lanes = FetchLanes::unannounced();
            lanes.start(missing, results, taken.cpu.clone())?;
            LateLanes::Pages(lanes)
        } else {
            LateLanes::Tunnels(TunnelLanes::unannounced(results, &taken.cpu))
        });
        Ok(taken)
    }

    /// Expects the offered lanes instead of earlier ones, and tells the source their token.
    pub(super) fn use_offer(&mut self, link: LinkId, offer: LaneOffer) -> Option<Input> {
        let (Some(session), Some(lanes)) = (self.machine.session(), &self.fetch_lanes) else {
            return None;
        };
        let streams = match lanes {
            LateLanes::Pages(lanes) => {
                lanes.renew(offer);
                None
            }
            LateLanes::Tunnels(lanes) => {
                let is_other = |theirs| theirs != lanes.streams() || theirs == LateStreamsId::NONE;
                if offer.streams.is_some_and(is_other) {
                    let begun = begin_again(self.vm, lanes, offer, self.inputs.0.clone());
                    if let Err(error) = begun {
                        // The source asks again.
                        return Some(Input::Failed(error));
                    }
                } else {
                    lanes.renew(offer);
                }
                Some(lanes.streams())
            }
        };
        let token = match random_token() {
            Ok(token) => token,
            // The source asks again.
            Err(error) => return Some(Input::Failed(error)),
        };
        self.token = token;
        let (word, token) = (SessionWord::Fetching, Some(LaneToken { token, streams }));
        self.send(link, &ControlMessage::Answer { session, word, token })
    }

    /// Compares the guest's storage with the source's sample of it, and loads the guest's state.
    pub(super) fn compare_and_load(
        &mut self,
        state: &[u8],
        paused: bool,
        storage_sample: &[u8],
    ) -> Result<Loaded, MigrateError> {
        let begun = Instant::now();
        let storage = self.vm.storage().filter(|_| !storage_sample.is_empty());
        let comparison = storage.map(|storage| storage.compare(storage_sample));
        let began = begun.elapsed();
        let loaded = self.load(state, paused);
        let Some(comparison) = comparison else {
            return Ok(Loaded { took: loaded?, compared: Duration::ZERO });
        };
        let waits = Instant::now();
        let failed = |source| MigrateError::Vm { action: "compare the guest's disks", source };
        comparison().map_err(failed)?;
        Ok(Loaded { took: loaded?, compared: began + waits.elapsed() })
    }

    /// Loads the guest's state. With post-copy the VMM may wait for pages meanwhile, so this ends
    /// when the source is lost or silent.
    fn load(&mut self, state: &[u8], paused: bool) -> Result<Duration, MigrateError> {
        let begun = Instant::now();
        let pages = self.fetch_lanes.as_ref().and_then(LateLanes::pages);
        let missing = pages.and_then(FetchLanes::missing).cloned();
        if let Some(Target::Streams(target)) = &self.target {
            target.end_kept();
        }
        let patience = self.config.timeouts.ready;
        let failed = |source| MigrateError::Vm { action: "load the guest's state", source };
        let (loaded, loads) = crossbeam_channel::bounded::<()>(0);
        let watched = missing.clone().map(|missing| {
            std::thread::Builder::new().name("load-watch".into()).spawn(move || {
                // The other end is dropped when the load has ended.
                if loads.recv_timeout(patience).is_err_and(|error| error.is_timeout()) {
                    // Fails only for memory that was unmapped meanwhile.
                    let _ = missing.give_up_load();
                }
            })
        });
        let ready = if paused { self.vm.stay_paused() } else { Ok(()) };
        let done = match ready {
            Ok(()) if !self.is_loaded => self.vm.load(state),
            ready => ready,
        };
        drop(loaded);
        watched.transpose().map_err(MigrateError::no_thread)?;
        if missing.is_some_and(|missing| !missing.end_load()) {
            let cut = std::io::Error::other("the pages that the state needs have not arrived");
            return Err(lost("fetch lanes", "the loading of the state", &cut));
        }
        done.map(|()| begun.elapsed()).map_err(failed)
    }

    /// The guest runs: all missing pages are fetched, and the VMM may show that.
    pub(super) fn fetch_all(&mut self) {
        let Some(LateLanes::Pages(lanes)) = &self.fetch_lanes else { return };
        self.fetch = lanes.handle(self.peer.to_string());
        if let Some(fetch) = &self.fetch {
            self.vm.fetch_begins(fetch.clone());
        }
        lanes.begin_background();
    }

    /// Reports the progress once a second.
    pub(super) fn show_fetch(&self, watch: &mut dyn FnMut(&Notice)) {
        if self.fetch_stats.is_none()
            && let Some(progress) = self.fetch.as_ref().and_then(FetchHandle::sample)
        {
            watch(&Notice::Session(Report::FetchProgress(Box::new(progress))));
        }
    }

    /// The last missing page has arrived.
    pub(super) fn note_fetched(&mut self) {
        self.fetch_stats = self.fetch.as_ref().and_then(FetchHandle::stats);
    }

    /// The session has ended. Returns the statistics of its fetch.
    pub(super) fn end_fetch(&mut self) -> Option<FetchStats> {
        let fetch = self.fetch.take()?;
        // Without `Fetched` after the start: the last page had arrived before.
        let stats = self.fetch_stats.take().or_else(|| fetch.stats());
        fetch.end();
        stats
    }
}

/// A process that carried the guest has died, and the VMM's streams with it: connects the VMM to
/// new ones, and begins the tunnels again.
fn begin_again<V: DestinationVm>(
    vm: &mut V,
    lanes: &TunnelLanes,
    offer: LaneOffer,
    results: Sender<Input>,
) -> Result<(), MigrateError> {
    // Their threads must not take the end of the old streams for the VMM's.
    lanes.restart(offer);
    let failed = |source| MigrateError::Vm { action: "go on with its post-copy", source };
    let late = vm.reconnect().map_err(failed)?;
    let rest = late.requests.try_clone().map_err(|error| failed(error.into()))?;
    let [number @ .., _, _, _, _, _, _, _, _] = random_token()?.0;
    let streams = LateStreamsId(u64::from_le_bytes(number));
    lanes.begin(streams, tunnel_ends(late, Some(rest), results)).map_err(MigrateError::no_thread)
}

/// What the two tunnels connect: first the pages that threads wait for, with the requests, then the
/// rest of the main stream.
fn tunnel_ends(
    LateStreams { requests, urgent, .. }: LateStreams,
    rest: Option<UnixStream>,
    results: Sender<Input>,
) -> [TunnelEnd; 2] {
    let ended = move || {
        let _ = results.send(Input::RequestsEnded);
    };
    let urgent = TunnelEnd {
        into_vmm: urgent,
        from_vmm: Some(requests),
        on_end: Some(Box::new(ended)),
        first: None,
    };
    [urgent, TunnelEnd { into_vmm: rest, ..TunnelEnd::default() }]
}
