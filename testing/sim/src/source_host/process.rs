//! A process of the source: its resources, and how it carries out the machine's actions.

use std::sync::Arc;
use std::time::Duration;

use vmferry::data::source::page_encoder::PageEncoder;
use vmferry::link::lost;
use vmferry::machine::source::Source;
use vmferry::machine::source::io::{Action, Input, Saved};
use vmferry::rounds::freed::{Freed, free_messages};
use vmferry::rounds::harvester::{Harvester, Omission};
use vmferry::{MigrateError, SourceConfig, SourceVm};
use vmferry_codec::{HotPages, PageHashes};
use vmferry_handover::journal::Journal;
use vmferry_handover::{Running, SourceGuest};
use vmferry_memory::whole_hash_except;
use vmferry_wire::{ControlMessage, LaneOffer, Role, SessionId, Token};

use super::dialing::Dialing;
use super::fetch::FetchServers;
use super::lanes::Lane;
use crate::disk::SimJournal;
use crate::guest::{Guest, Vm};
use crate::host::Host;
use crate::network::{ChannelId, Event, Network};
use crate::plan::Sabotage;

/// Fewer copies of pages than the guest has hot ones, so that some are not kept.
const HOT_BYTES: u64 = 32 * 4096;

pub(super) struct Process {
    /// Its number.
    pub(super) number: u64,
    pub(super) machine: Source,
    pub(super) held: SourceGuest<Vm>,
    pub(super) harvester: Harvester,
    pub(super) hashes: Arc<PageHashes>,
    pub(super) journal: Option<SimJournal>,
    pub(super) session: SessionId,
    /// The control channel, or the query channel.
    pub(super) control: Option<ChannelId>,
    /// Attempts in progress.
    pub(super) dialing: Vec<Dialing>,
    pub(super) dials: u64,
    /// The number of lanes to open.
    pub(super) channels: u8,
    pub(super) lanes: Vec<Lane>,
    pub(super) fetch: FetchServers,
    /// The fetch lanes to offer with the next question.
    pub(super) offer: Option<LaneOffer>,
    /// One worker for all lanes.
    pub(super) encoder: PageEncoder,
    pub(super) sabotage: Option<Sabotage>,
}

/// The parameters of a process.
pub(super) struct Start {
    pub(super) number: u64,
    pub(super) machine: Source,
    pub(super) vm: Vm,
    pub(super) journal: Option<SimJournal>,
    pub(super) control: Option<ChannelId>,
    pub(super) config: SourceConfig,
    pub(super) sabotage: Option<Sabotage>,
}

impl Process {
    pub(super) fn new(start: Start) -> Self {
        let Start { number, machine, vm, journal, control, config, sabotage } = start;
        let (session, channels) = (config.session, config.channels.get());
        let first_background = channels + config.fetch_lanes().faults;
        let memory = vm.memory();
        let hashes = Arc::new(PageHashes::for_memory(&memory));
        let hot = Arc::new(HotPages::new(HOT_BYTES));
        let encoder = PageEncoder::new(memory.clone(), Arc::clone(&hashes), vm.compressors(), hot);
        let freed = Freed::new(vm.free_pages(), &memory, Arc::default());
        let mut harvester = Harvester::new(memory, vm.dirty_log(), freed);
        match sabotage {
            Some(Sabotage::HintAcrossHarvest) => harvester.omit(Omission::StopOfHints),
            Some(Sabotage::HintUnprotected) => harvester.omit(Omission::ProtectionOfHints),
            Some(Sabotage::ForgetRecalled) => harvester.omit(Omission::RecalledPages),
            _ => {}
        }
        Self {
            number,
            machine,
            held: SourceGuest::Running(Running::new(vm)),
            harvester,
            hashes,
            journal,
            session,
            control,
            dialing: Vec::new(),
            dials: 0,
            channels,
            lanes: Vec::new(),
            offer: None,
            fetch: FetchServers::new(first_background),
            encoder,
            sabotage,
        }
    }

    pub(super) fn close(mut self, network: &mut Network) {
        self.harvester.freed().end();
        let dialed = self.dialing.iter().filter_map(|dialing| dialing.channel);
        let lanes = self.lanes.iter().map(|lane| lane.channel);
        for channel in lanes.chain(self.fetch.channels()).chain(self.control).chain(dialed) {
            network.close(channel, Host::Source);
        }
    }

    /// Gives up the control channel and dials a new one after a delay.
    fn dial_control(
        &mut self,
        role: Role,
        token: (Token, u64),
        delay: Duration,
        network: &mut Network,
    ) {
        if let Some(channel) = self.control.take() {
            network.close(channel, Host::Source);
        }
        self.dial(role, 0, token, delay, network);
    }

    pub(super) fn execute(
        &mut self,
        action: Action,
        guest: &Guest,
        network: &mut Network,
    ) -> Option<Input> {
        match action {
            Action::Send(ControlMessage::Withdraw {})
                if self.sabotage == Some(Sabotage::ForgetWithdraw) =>
            {
                None
            }
            Action::Send(message) => {
                let sent = self
                    .control
                    .is_none_or(|channel| network.say(channel, Host::Destination, &message));
                let phase = self.machine.phase_name();
                let end = || lost("control", phase, &std::io::ErrorKind::BrokenPipe.into());
                (!sent && !self.machine.handover().is_final()).then(|| Input::LinkLost(end()))
            }
            Action::OpenLanes(token) => {
                self.open_lanes(token, network);
                None
            }
            Action::ResumeControl { token, attempt, delay } => {
                self.dial_control(Role::Resume, (token, attempt), delay, network);
                None
            }
            Action::RejoinLane { lane, token, attempt, delay } => {
                // The channel of a fetch lane is closed once another one replaces it.
                if let Some(lane) = self.lanes.get(usize::from(lane)) {
                    network.close(lane.channel, Host::Source);
                }
                self.dial(Role::Data, lane, (token, attempt), delay, network);
                None
            }
            Action::Recall => self.recall(),
            Action::StartLog => Some(self.start_log().unwrap_or_else(Input::Failed)),
            Action::SendRound { round, rearm } => {
                self.send_round(round, rearm, guest, network).err().map(Input::Failed)
            }
            harvest @ (Action::Harvest | Action::HarvestMore) => {
                if matches!(harvest, Action::HarvestMore) {
                    self.harvester.keep_pending();
                }
                let writes = network.rng.usize(..30);
                guest.work(&mut network.rng, writes);
                Some(self.harvest().unwrap_or_else(Input::Failed))
            }
            Action::OpenFetchLanes { token, attempts } => {
                self.open_fetch_lanes(token, &attempts, network);
                None
            }
            Action::TellLacking => self
                .tell_lacking()
                .into_iter()
                .find_map(|message| self.execute(Action::Send(message), guest, network)),
            Action::ServePages { round } => {
                self.fetch.serve(round);
                None
            }
            // No guest of the simulation is carried or has disks.
            Action::BeginCarriedPostCopy
            | Action::ReconnectVmm
            | Action::PrepareStorageSample
            | Action::CutStreams { .. }
            | Action::Throttle { .. }
            | Action::SwitchOver
            | Action::LimitDowntime(_)
            | Action::Cap(_)
            | Action::FitWindows { .. } => None,
            Action::Pause => Some(self.pause()),
            Action::HarvestLast => Some(self.harvest_last().unwrap_or_else(Input::Failed)),
            Action::Save => {
                let SourceGuest::Paused(paused) = &mut self.held else { return None };
                let took = Duration::from_micros(100);
                Some(paused.with_vm(|vm| vm.save_for(network.protocol)).map_or_else(
                    |source| Input::Failed(MigrateError::Vm { action: "save its state", source }),
                    |state| Input::Saved(Saved { state, took, ..Saved::default() }),
                ))
            }
            Action::SumDigest => Some(Input::Digest(self.hashes.sum())),
            Action::TellFree => free_messages(self.harvester.free())
                .into_iter()
                .find_map(|message| self.execute(Action::Send(message), guest, network)),
            Action::Hash { attempt } => {
                let input = whole_hash_except(self.harvester.memory(), self.harvester.free())
                    .map_or_else(
                        |error| Input::Failed(error.into()),
                        |hash| Input::Hashed { attempt, hash },
                    );
                let takes = Duration::from_millis(network.rng.u64(1..2_000));
                network.after(takes, Event::Source(self.number, input));
                None
            }
            Action::WriteCommit(kind) => Some(self.commit(kind)),
            Action::WriteOutcome(record) => {
                if let Some(journal) = &mut self.journal {
                    // The promise that counts is already written.
                    let _ = journal.append(&record);
                }
                None
            }
            Action::Resume => {
                // There is no caller to report the failure to.
                let _ = self.held.resume(self.machine.handover());
                None
            }
            Action::Release => {
                guest.is_released();
                self.held.release();
                None
            }
            Action::Ask { delay, offer } => {
                self.offer = offer;
                self.dial_control(Role::Query, (Token([0; 16]), 0), delay, network);
                None
            }
            Action::AskWitness(request) => {
                network.ask_witness(Host::Source, Some(self.number), request);
                None
            }
            // This source compresses its frames with algorithms that every destination knows.
            Action::Report(_) | Action::PackWith(_) => None,
        }
    }
}
