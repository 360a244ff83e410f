//! A session at the destination: its resources, and how it carries out the machine's actions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vmferry::link::lost;
use vmferry::machine::destination::Destination;
use vmferry::machine::destination::io::{Action, Input, LinkId, Loaded, Prepared};
use vmferry::{DestinationVm, Landing, MigrateError, SourceVm};
use vmferry_codec::PageHashes;
use vmferry_handover::journal::{Journal, JournalError, Record};
use vmferry_handover::{WitnessId, WitnessRequest};
use vmferry_memory::{GuestMemory, whole_hash_except};
use vmferry_wire::{ControlMessage, Reason, ReasonCode, SessionId, Token};

use super::fetch::FetchLanes;
use super::lane::Lane;
use crate::disk::{Disk, SimJournal};
use crate::guest::Vm;
use crate::host::Host;
use crate::network::{ChannelId, Event, Network};
use crate::plan::Sabotage;
use crate::witness::{Witness, witness_id};

pub(super) struct Session {
    pub(super) machine: Destination,
    pub(super) vm: Vm,
    pub(super) token: Token,
    pub(super) links: BTreeMap<LinkId, ChannelId>,
    /// How often the control channel was dialed before.
    pub(super) attempt: u64,
    journal: Option<SimJournal>,
    pub(super) memory: Option<(GuestMemory, Arc<PageHashes>)>,
    pub(super) expected_lanes: u8,
    pub(super) lanes: BTreeMap<u8, Lane>,
    /// The fetch lanes, if the guest may run before all its pages have arrived.
    pub(super) fetch: Option<FetchLanes>,
    /// Whether post-copy is accepted.
    post_copy: Result<(), String>,
    /// The last FINAL that was received, for the sabotage that remembers it.
    pub(super) heard_final: Option<ControlMessage>,
    pub(super) sabotage: Option<Sabotage>,
    /// The guest was left by an earlier process.
    is_left: bool,
}

impl Session {
    pub(super) fn new(
        machine: Destination,
        vm: Vm,
        token: Token,
        control: Option<ChannelId>,
        (post_copy, sabotage): (bool, Option<Sabotage>),
    ) -> Self {
        Self {
            machine,
            vm,
            token,
            links: control.map(|control| (LinkId::CONTROL, control)).into_iter().collect(),
            attempt: 0,
            journal: None,
            memory: None,
            expected_lanes: 0,
            lanes: BTreeMap::new(),
            fetch: None,
            post_copy: post_copy.then_some(()).ok_or_else(|| "it has none".to_owned()),
            heard_final: None,
            sabotage,
            is_left: false,
        }
    }

    /// Continues with a guest that an earlier process has left without all its pages.
    pub(super) fn of_left(
        machine: Destination,
        vm: Vm,
        journal: SimJournal,
        sabotage: Option<Sabotage>,
    ) -> Self {
        let memory = vm.memory();
        let hashes = Arc::new(PageHashes::for_memory(&memory));
        let session = Self::new(machine, vm, Token([0; 16]), None, (true, sabotage));
        Self {
            journal: Some(journal),
            memory: Some((memory, hashes)),
            fetch: Some(FetchLanes::of_left()),
            is_left: true,
            ..session
        }
    }

    pub(super) fn close(self, network: &mut Network) {
        for channel in self.lanes.values().map(|lane| lane.channel).chain(self.links.into_values())
        {
            network.close(channel, Host::Destination);
        }
        if let Some(fetch) = self.fetch {
            fetch.close(network);
        }
    }

    pub(super) fn execute(
        &mut self,
        action: Action,
        number: u64,
        disk: &Disk,
        network: &mut Network,
    ) -> Option<Input> {
        match action {
            Action::Send { link, message } => self.send(link, &message, network),
            Action::Broadcast(message) => {
                let links: Vec<LinkId> = self.links.keys().copied().collect();
                links.into_iter().filter_map(|link| self.send(link, &message, network)).next()
            }
            Action::Prepare { guest, .. } => Some(Input::Prepared(
                self.vm
                    .prepare(&guest)
                    .map(|landing| {
                        let Landing::Memory(memory) = landing else { return };
                        let hashes = Arc::new(PageHashes::for_memory(&memory));
                        self.memory = Some((memory, hashes));
                    })
                    .map(|()| Prepared {
                        post_copy: self.post_copy.clone(),
                        compares_storage: false,
                    })
                    .map_err(|error| MigrateError::Refused {
                        peer: "destination",
                        reason: Reason::new(ReasonCode::VmRefused, &error.to_string()),
                    }),
            )),
            Action::Open(session) => {
                // Without an answer the guest would be refused here, and nothing handed over.
                network.witness.iter_mut().for_each(Witness::open);
                let witness = network.witness.is_some().then(witness_id);
                Some(Input::Opened(self.open(session, disk, witness)))
            }
            Action::ExpectLanes { lanes, fetch_lanes } => {
                self.expected_lanes = lanes;
                self.fetch = fetch_lanes.map(|announced| FetchLanes::new(lanes, announced));
                None
            }
            Action::SumDigest => {
                Some(Input::Digest(self.memory.as_ref().map_or(0, |(_, hashes)| hashes.sum())))
            }
            Action::Load { state, .. } => Some(Input::Loaded(
                self.vm
                    .load(&state)
                    .map(|()| Loaded { took: Duration::from_micros(100), ..Loaded::default() })
                    .map_err(|source| MigrateError::Vm { action: "load the state", source }),
            )),
            Action::Hash { except } => {
                let (memory, _) = self.memory.as_ref()?;
                let takes = Duration::from_millis(network.rng.u64(1..2_000));
                let input = whole_hash_except(memory, &except).map_or_else(
                    |error| Input::Failed(error.into()),
                    |hash| Input::Hashed(hash, takes),
                );
                network.after(takes, Event::Destination(number, input));
                None
            }
            Action::Claim => {
                let request = Some(WitnessRequest::Claim);
                network.ask_witness(Host::Destination, Some(number), request);
                None
            }
            Action::WriteIntent(kind) => {
                Some(Input::IntentWritten(self.write(&Record::run_intent(kind))))
            }
            Action::FreeOutdated { runs } => self.free_outdated(&runs).err().map(Input::Failed),
            Action::FetchMissing { missing } => {
                self.fetch_missing(missing, network);
                None
            }
            Action::UseOffer { link, offer } => self.use_offer(link, offer, network),
            Action::FetchAll => self.begin_background(network).then_some(Input::Fetched),
            Action::WriteFetched => Some(Input::FetchedWritten(self.write_again(&Record::Fetched))),
            Action::WriteEnded => Some(Input::EndedWritten(self.write_again(&Record::Ended))),
            Action::WriteAborted { reason } => {
                Some(Input::AbortWritten(self.write(&Record::Aborted { reason })))
            }
            // It may have run before an earlier process died.
            Action::Run if self.is_left && !self.vm.guest().waits() => Some(Input::Started(Ok(()))),
            Action::Run => {
                let started = self.vm.run();
                Some(Input::Started(
                    started
                        .map_err(|source| MigrateError::Vm { action: "start the guest", source }),
                ))
            }
            Action::Discard => {
                for lane in std::mem::take(&mut self.lanes).into_values() {
                    network.close(lane.channel, Host::Destination);
                }
                if let Some(fetch) = self.fetch.take() {
                    fetch.close(network);
                }
                self.memory = None;
                self.vm.discard();
                None
            }
            Action::Report(_) => None,
        }
    }

    pub(super) fn send(
        &mut self,
        link: LinkId,
        message: &ControlMessage,
        network: &mut Network,
    ) -> Option<Input> {
        let channel = *self.links.get(&link)?;
        if network.say(channel, Host::Source, message) {
            return None;
        }
        self.links.remove(&link);
        network.close(channel, Host::Destination);
        let broken = std::io::ErrorKind::BrokenPipe.into();
        (link == LinkId::CONTROL && !self.machine.handover().is_final())
            .then(|| Input::LinkLost(lost("control", "sending", &broken)))
    }

    fn open(
        &mut self,
        session: SessionId,
        disk: &Disk,
        witness: Option<WitnessId>,
    ) -> Result<(), MigrateError> {
        match disk.create(session, "source", witness) {
            Ok(journal) => {
                self.journal = Some(journal);
                Ok(())
            }
            Err(error) => {
                self.memory = None;
                self.vm.discard();
                Err(error.into())
            }
        }
    }

    /// As the driver does.
    fn write_again(&mut self, record: &Record) -> Result<(), MigrateError> {
        match (self.write(record), &mut self.journal) {
            (Err(MigrateError::Journal(JournalError::Poisoned { .. })), Some(journal)) => {
                if journal.renew()?.contains(record) {
                    return Ok(());
                }
                self.write(record)
            }
            (written, _) => written,
        }
    }

    fn write(&mut self, record: &Record) -> Result<(), MigrateError> {
        match &mut self.journal {
            Some(journal) => Ok(journal.append(record)?),
            None => Err(MigrateError::Local {
                action: "write a journal that was never opened",
                source: std::io::ErrorKind::NotFound.into(),
            }),
        }
    }
}
