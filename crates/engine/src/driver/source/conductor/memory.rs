//! Guests whose memory the engine reads: dirty log, rounds and state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_codec::{HotPages, PageHashes};
use vmferry_dirty::{DirtyLog, DirtyLogError};
use vmferry_memory::{GuestMemory, whole_hash_except};

use super::storage::{prepare_sample, sample};
use super::{Core, GuestSide};
use crate::config::BandwidthCap;
use crate::config::compression::worker_threads;
use crate::data::source::page_encoder::PageEncoder;
use crate::data::source::page_server::Served;
use crate::data::source::workers::{WorkerContext, Workers};
use crate::error::MigrateError;
use crate::machine::source::io::{Action, Input, Saved};
use crate::rounds::freed::{Freed, free_messages};
use crate::rounds::harvester::Harvester;
use crate::rounds::lacking::lacking_messages;
use crate::vmm::SourceVm;
use crate::vmm::free_pages::FreePages;
use crate::vmm::streamed::StreamEvent;
use vmferry_handover::{Resume, SourceGuest};

/// Memory, dirty log, and the state of sending them.
pub(super) struct MemoryGuest {
    harvester: Harvester,
    /// Runs once all lanes have channels.
    workers: Option<Workers>,
    hashes: Arc<PageHashes>,
    hot: Arc<HotPages>,
    throttled: bool,
    /// The destination compares a sample of the guest's storage.
    samples_storage: bool,
}

impl MemoryGuest {
    pub(super) fn new<V: Resume>(
        memory: GuestMemory,
        log: Arc<dyn DirtyLog>,
        free_pages: Vec<Arc<dyn FreePages>>,
        core: &Core<'_, V>,
    ) -> Self {
        let freed = Freed::new(free_pages, &memory, Arc::clone(&core.signal))
            .hinted_if(core.config.free_page_hints);
        Self {
            workers: None,
            hashes: Arc::new(PageHashes::for_memory(&memory)),
            hot: Arc::new(HotPages::new(core.config.compression.delta_memory)),
            throttled: false,
            samples_storage: false,
            harvester: Harvester::new(memory, log, freed),
        }
    }

    fn encoder<V: Resume>(&self, core: &Core<'_, V>) -> PageEncoder {
        let (memory, hashes) = (self.harvester.memory().clone(), Arc::clone(&self.hashes));
        let compressors = core.config.compression.compressors.clone();
        PageEncoder::new(memory, hashes, compressors, Arc::clone(&self.hot))
    }
}

impl<V: SourceVm> GuestSide<V> for MemoryGuest {
    fn execute(&mut self, core: &mut Core<'_, V>, action: Action) -> Option<Input> {
        match action {
            Action::Recall => self.recall(core),
            Action::StartLog => Some(self.start_log(core).unwrap_or_else(Input::Failed)),
            Action::SendRound { round, rearm } => {
                self.send_round(core, round, rearm).err().map(Input::Failed)
            }
            Action::Harvest => Some(self.harvest(core).unwrap_or_else(Input::Failed)),
            Action::HarvestMore => {
                self.harvester.keep_pending();
                Some(self.harvest(core).unwrap_or_else(Input::Failed))
            }
            Action::Throttle { percent } => self.throttle(core, percent),
            Action::Pause => Some(pause(core)),
            Action::HarvestLast => Some(self.harvest_last().unwrap_or_else(Input::Failed)),
            Action::PrepareStorageSample => {
                self.samples_storage = prepare_sample(core, SourceVm::storage);
                None
            }
            Action::Save => Some(self.save(core)),
            Action::SumDigest => Some(Input::Digest(self.hashes.sum())),
            Action::TellLacking => self.tell_lacking(core),
            Action::ServePages { round } => {
                let unsent = self.harvester.pending().clone().into();
                let zero = self.harvester.freed().zero();
                core.fetch.serve(Served { round, zero, unsent });
                None
            }
            Action::TellFree => self.tell_free(core),
            Action::Hash { attempt } => self.hash(core, attempt),
            // The other actions do not concern the guest.
            _ => None,
        }
    }

    fn sender_encoder(&self, core: &Core<'_, V>) -> Option<PageEncoder> {
        Some(self.encoder(core))
    }

    fn lanes_are_open(&mut self, core: &Core<'_, V>) -> Result<(), MigrateError> {
        let workers = worker_threads(core.config.compression.workers);
        let encoders = (0..workers).map(|_| self.encoder(core)).collect();
        let context = WorkerContext {
            lanes: core.lanes.clone(),
            signal: Arc::clone(&core.signal),
            chooser: Arc::clone(&core.chooser),
            results: core.inputs.0.clone(),
            cpu: core.cpu.clone(),
        };
        self.workers = Some(Workers::start(context, encoders).map_err(MigrateError::no_thread)?);
        Ok(())
    }

    fn heard(&mut self, _core: &mut Core<'_, V>, _event: StreamEvent) -> Input {
        Input::Tick
    }

    fn review(&mut self, _core: &mut Core<'_, V>) -> Option<Duration> {
        self.harvester.freed().review()
    }

    fn give_up(&mut self) {}

    fn stop(&mut self, core: &mut Core<'_, V>) {
        if self.throttled
            && let SourceGuest::Running(running) = &mut core.guest
            && let Err(error) = running.vm().throttle(0)
        {
            core.resume_failure.get_or_insert(error);
        }
        let keeps = !matches!(core.guest, SourceGuest::Released(_));
        self.harvester.stop(keeps, matches!(core.guest, SourceGuest::Running(_)));
    }
}

impl MemoryGuest {
    fn start_log<V: SourceVm>(&mut self, core: &mut Core<'_, V>) -> Result<Input, MigrateError> {
        let stood_still = guarded(core, || self.harvester.log().start())?;
        Ok(Input::LogStarted { populated_pages: self.harvester.started()?, stood_still })
    }

    fn harvest<V: SourceVm>(&mut self, core: &mut Core<'_, V>) -> Result<Input, MigrateError> {
        let begun = Instant::now();
        let (pages, stood_still) =
            self.harvester.harvest(|log, pages| guarded(core, || log.collect(pages)))?;
        Ok(Input::Harvested { pages, took: begun.elapsed(), stood_still })
    }

    /// Gives the lanes the pages of a round.
    fn send_round<V: Resume>(
        &mut self,
        core: &Core<'_, V>,
        round: u32,
        rearm: bool,
    ) -> Result<(), MigrateError> {
        let Some(workers) = &self.workers else { return Ok(()) };
        let order = self.harvester.order(round, rearm)?;
        if round == 1 {
            self.harvester.freed().hold(core.config.max_bandwidth.map(BandwidthCap::get));
        }
        workers.send_round(&order);
        Ok(())
    }

    fn throttle<V: SourceVm>(&mut self, core: &mut Core<'_, V>, percent: u8) -> Option<Input> {
        let SourceGuest::Running(running) = &mut core.guest else { return None };
        self.throttled = true;
        let throttled = running.vm().throttle(percent);
        throttled.err().map(|source| {
            Input::Failed(MigrateError::Vm { action: "throttle the guest's vCPUs", source })
        })
    }

    fn harvest_last(&mut self) -> Result<Input, MigrateError> {
        let begun = Instant::now();
        let pages = self.harvester.harvest_last()?;
        Ok(Input::LastHarvest { pages, took: begun.elapsed() })
    }

    /// Resumes the guest after its last harvest.
    fn recall<V: SourceVm>(&mut self, core: &mut Core<'_, V>) -> Option<Input> {
        self.harvester.recall();
        let source = core.guest.resume(core.machine.handover()).err()?;
        Some(Input::Failed(MigrateError::Vm { action: "let the guest run on", source }))
    }

    /// Reports to the destination the pages whose content need not match.
    fn tell_free<V: Resume>(&mut self, core: &mut Core<'_, V>) -> Option<Input> {
        let messages = free_messages(self.harvester.free());
        messages.iter().find_map(|message| core.send(message))
    }

    /// Reports to the destination the pages that were not sent, unless it knows. They count as
    /// never sent.
    fn tell_lacking<V: Resume>(&mut self, core: &mut Core<'_, V>) -> Option<Input> {
        let lacking = self.harvester.name_pending();
        lacking.runs().for_each(|run| self.hashes.forget(run));
        lacking_messages(&lacking).find_map(|message| core.send(&message))
    }

    fn save<V: SourceVm>(&self, core: &mut Core<'_, V>) -> Input {
        let begun = Instant::now();
        let SourceGuest::Paused(paused) = &mut core.guest else { return Input::Tick };
        let protocol = core.machine.protocol();
        let state = match paused.with_vm(|vm| vm.save_for(protocol)) {
            Ok(state) => state,
            Err(source) => return Input::Failed(MigrateError::of_vm("save its state", source)),
        };
        let took = begun.elapsed();
        let sample = self.samples_storage.then(|| sample(paused, SourceVm::storage)).flatten();
        Input::Saved(Saved { state, took, paused: paused.is_paused_by_others(), sample })
    }

    fn hash<V: Resume>(&mut self, core: &Core<'_, V>, attempt: u32) -> Option<Input> {
        let (memory, results) = (self.harvester.memory().clone(), core.inputs.0.clone());
        let free = self.harvester.free().clone();
        let spawned = std::thread::Builder::new().name("verify".into()).spawn(move || {
            let hash = whole_hash_except(&memory, &free);
            let _ = results.send(hash.map_or_else(
                |error| Input::Failed(error.into()),
                |hash| Input::Hashed { attempt, hash },
            ));
        });
        spawned.err().map(|error| Input::Failed(MigrateError::no_thread(error)))
    }
}

/// Runs an operation on the log that must not miss writes of devices. Returns for how long the
/// guest was paused for it.
fn guarded<V: SourceVm>(
    core: &mut Core<'_, V>,
    act: impl FnOnce() -> Result<(), DirtyLogError>,
) -> Result<Duration, MigrateError> {
    let failed = |source| MigrateError::of_vm("stop the guest for a harvest", source);
    let SourceGuest::Running(running) = &mut core.guest else {
        act()?;
        return Ok(Duration::ZERO);
    };
    let guard = running.vm().begin_harvest().map_err(failed)?;
    let result = act();
    // An error of the VMM matters more: the guest may have powered off.
    let stood_still = guard.finish().map_err(failed)?;
    result?;
    Ok(stood_still)
}

fn pause<V: SourceVm>(core: &mut Core<'_, V>) -> Input {
    match core.guest.pause(SourceVm::pause) {
        Some(Ok(stood_still)) => Input::Paused { stood_still },
        Some(Err(source)) => Input::Failed(MigrateError::of_vm("pause the guest", source)),
        None => Input::Tick,
    }
}
