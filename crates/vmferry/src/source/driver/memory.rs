//! A guest whose memory the engine reads: its dirty log, its rounds, its state.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_codec::{HotPages, PageHashes};
use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PageSet, whole_hash_except};

use super::{Core, GuestSide};
use crate::compression::worker_threads;
use crate::error::MigrateError;
use crate::free_pages::FreePages;
use crate::held::Held;
use crate::source::encode::PageEncoder;
use crate::source::freed::{Freed, free_messages};
use crate::source::io::{Action, Input};
use crate::source::lane::FrameSource;
use crate::source::plan::{Job, LanePlan};
use crate::source::pool::{Maker, Pool, PoolLane};
use crate::streamed::StreamEvent;
use crate::vm::{Resume, SourceVm};

/// Frames that a lane has ready beside those that workers are making: one is sent while the next waits.
const FRAMES_AHEAD: usize = 2;

/// Memory, dirty log, and what is sent of them.
pub(super) struct MemoryGuest {
    memory: GuestMemory,
    log: Arc<dyn DirtyLog>,
    logging: bool,
    lanes: Vec<Arc<PoolLane>>,
    pool: Option<Pool>,
    hashes: Arc<PageHashes>,
    hot: Arc<HotPages>,
    /// What the present or next round sends.
    pending: Arc<PageSet>,
    /// What the round before sent, of which pages that are in the present one too go last.
    before: PageSet,
    last: Arc<PageSet>,
    /// Pages that need not be sent.
    freed: Freed,
    throttled: bool,
    /// The other set, so that no harvest allocates.
    spare: PageSet,
    /// The guest ran on after its last harvest: what is pending counts as written.
    recalled: bool,
}

impl MemoryGuest {
    pub(super) fn new<V: Resume>(
        memory: GuestMemory,
        log: Arc<dyn DirtyLog>,
        free_pages: Vec<Arc<dyn FreePages>>,
        core: &Core<'_, V>,
    ) -> Self {
        Self {
            log,
            logging: false,
            lanes: Vec::new(),
            pool: None,
            hashes: Arc::new(PageHashes::for_memory(&memory)),
            hot: Arc::new(HotPages::new(core.config.compression.delta_memory)),
            pending: Arc::new(PageSet::for_memory(&memory)),
            spare: PageSet::for_memory(&memory),
            recalled: false,
            before: PageSet::for_memory(&memory),
            last: Arc::new(PageSet::for_memory(&memory)),
            freed: Freed::new(free_pages, &memory, Arc::clone(&core.signal))
                .hinted_if(core.config.free_page_hints),
            throttled: false,
            memory,
        }
    }

    fn encoder<V: Resume>(&self, core: &Core<'_, V>) -> PageEncoder {
        let (memory, hashes) = (self.memory.clone(), Arc::clone(&self.hashes));
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
            Action::Throttle { percent } => self.throttle(core, percent),
            Action::Pause => Some(pause(core)),
            Action::HarvestLast => Some(self.harvest_last().unwrap_or_else(Input::Failed)),
            Action::Save => Some(save(core)),
            Action::SumDigest => Some(Input::Digest(self.hashes.sum())),
            Action::TellFree => self.tell_free(core),
            Action::Hash { attempt } => self.hash(core, attempt),
            // The others are not the guest's.
            _ => None,
        }
    }

    fn frames_of(&mut self, core: &Core<'_, V>, lane: u8) -> FrameSource {
        let workers = worker_threads(core.config.compression.workers);
        let plan = LanePlan::new(lane, core.config.channels, Arc::clone(&self.log));
        let window = Arc::clone(&core.windows[usize::from(lane)]);
        let signal = Arc::clone(&core.signal);
        let pool_lane = Arc::new(PoolLane::new(plan, window, workers + FRAMES_AHEAD, signal));
        self.lanes.push(Arc::clone(&pool_lane));
        FrameSource::Maker(Box::new(Maker::new(
            lane,
            pool_lane,
            Arc::clone(&core.chooser),
            self.encoder(core),
            Arc::clone(&core.signal),
        )))
    }

    fn lanes_are_open(&mut self, core: &Core<'_, V>) -> Result<(), MigrateError> {
        let workers = worker_threads(core.config.compression.workers);
        let pool = Pool::start(
            std::mem::take(&mut self.lanes),
            Arc::clone(&core.signal),
            Arc::clone(&core.chooser),
            (0..workers).map(|_| self.encoder(core)).collect(),
            core.inputs.0.clone(),
            core.cpu.clone(),
        );
        let no_thread = |source| MigrateError::Local { action: "start a thread", source };
        self.pool = Some(pool.map_err(no_thread)?);
        Ok(())
    }

    fn heard(&mut self, _core: &mut Core<'_, V>, _event: StreamEvent) -> Input {
        Input::Tick
    }

    fn review(&mut self, _core: &mut Core<'_, V>) -> Option<Duration> {
        self.freed.review()
    }

    fn give_up(&mut self) {}

    fn stop(&mut self, core: &mut Core<'_, V>) {
        if self.throttled
            && let Held::Running(running) = &mut core.held
            && let Err(error) = running.throttle(0)
        {
            core.resume_failure.get_or_insert(error);
        }
        if !matches!(core.held, Held::Released(_)) {
            self.freed.end();
        }
        if matches!(core.held, Held::Running(_)) && self.logging {
            // Taken from the log and perhaps not sent: whoever uses the log next must see them.
            self.log.give_back(&self.pending);
        }
        if self.logging {
            let _ = self.log.stop();
        }
    }
}

impl MemoryGuest {
    /// Logging first, then the populated pages: a page populated in between is in the log.
    fn start_log<V: SourceVm>(&mut self, core: &mut Core<'_, V>) -> Result<Input, MigrateError> {
        let log = Arc::clone(&self.log);
        let (result, stood_still) = quiesced(core, move || log.start())?;
        result?;
        self.logging = true;
        self.freed.begin();
        self.pending = Arc::new(self.memory.populated()?);
        self.freed.sending(&self.pending);
        if self.freed.can_ask() {
            // The start of the log has protected everything.
            self.freed.ask(&*self.log, &self.pending, false)?;
        }
        Ok(Input::LogStarted { populated_pages: self.pending.count(), stood_still })
    }

    /// Harvests into the spare set and makes it the pending one.
    fn harvest<V: SourceVm>(&mut self, core: &mut Core<'_, V>) -> Result<Input, MigrateError> {
        let begun = Instant::now();
        self.freed.stop();
        let log = Arc::clone(&self.log);
        let mut pages = std::mem::replace(&mut self.spare, PageSet::for_layout(&[]));
        pages.clear_all();
        let (result, stood_still) = quiesced(core, || log.collect(&mut pages))?;
        result?;
        if std::mem::take(&mut self.recalled) {
            // These were read without being protected again, as nobody was to write them any more.
            pages.union_with(&self.pending);
        }
        self.freed.harvested(&mut pages)?;
        self.spare = pages;
        let took = begun.elapsed();
        if let Some(pending) = Arc::get_mut(&mut self.pending) {
            std::mem::swap(pending, &mut self.spare);
        } else {
            let fresh = PageSet::for_memory(&self.memory);
            self.pending = Arc::new(std::mem::replace(&mut self.spare, fresh));
        }
        Ok(Input::Harvested { pages: self.pending.count(), took, stood_still })
    }

    /// Gives the pool its work. Pages that were in the round before too go last, and in the first round those that may
    /// turn out to be free.
    fn send_round<V: Resume>(
        &mut self,
        core: &Core<'_, V>,
        round: u32,
        rearm: bool,
    ) -> Result<(), MigrateError> {
        let Some(pool) = &self.pool else { return Ok(()) };
        if rearm && round > 1 && self.freed.can_ask() {
            self.freed.ask(&*self.log, &self.pending, true)?;
        }
        // Every lane has reported the end of the round before, so nobody holds the set any more.
        if let Some(last) = Arc::get_mut(&mut self.last) {
            last.set_to_intersection(&self.pending, &self.before);
            if round == 1 {
                self.freed.may_be_hinted(&self.pending, last);
                self.freed.hold(core.config.max_bandwidth);
            }
        }
        // What the first round sends was populated, which says nothing of how often it is written.
        self.before.clear_all();
        if round > 1 {
            self.before.union_with(&self.pending);
        }
        pool.send_round(&Job {
            round,
            rearm: rearm && self.freed.hinted().is_none(),
            pages: Arc::clone(&self.pending),
            last: (!self.last.is_empty()).then(|| Arc::clone(&self.last)),
            zero: self.freed.zero(),
            hinted: self.freed.hinted(),
        });
        Ok(())
    }

    fn throttle<V: SourceVm>(&mut self, core: &mut Core<'_, V>, percent: u8) -> Option<Input> {
        let Held::Running(running) = &mut core.held else { return None };
        self.throttled = true;
        let throttled = running.throttle(percent);
        throttled.err().map(|source| {
            Input::Failed(MigrateError::Vm { action: "throttle the guest's vCPUs", source })
        })
    }

    /// Adds what was written before the pause to what the last harvest found.
    fn harvest_last(&mut self) -> Result<Input, MigrateError> {
        let begun = Instant::now();
        let mut pages = std::mem::replace(&mut self.spare, PageSet::for_layout(&[]));
        pages.clear_all();
        pages.union_with(&self.pending);
        self.log.collect_last(&mut pages)?;
        self.freed.harvested(&mut pages)?;
        self.pending = Arc::new(pages);
        Ok(Input::LastHarvest { pages: self.pending.count(), took: begun.elapsed() })
    }

    /// Lets the guest run on after its last harvest.
    fn recall<V: SourceVm>(&mut self, core: &mut Core<'_, V>) -> Option<Input> {
        self.recalled = true;
        // The last harvest has used it up.
        self.spare = PageSet::for_memory(&self.memory);
        let source = core.held.resume(core.machine.handover()).err()?;
        Some(Input::Failed(MigrateError::Vm { action: "let the guest run on", source }))
    }

    /// Tells the destination which pages it need not have as they are here.
    fn tell_free<V: Resume>(&mut self, core: &mut Core<'_, V>) -> Option<Input> {
        let messages = free_messages(self.freed.free());
        messages.iter().find_map(|message| core.send(message))
    }

    fn hash<V: Resume>(&mut self, core: &Core<'_, V>, attempt: u32) -> Option<Input> {
        let (memory, results) = (self.memory.clone(), core.inputs.0.clone());
        let free = self.freed.free().clone();
        let spawned = std::thread::Builder::new().name("verify".into()).spawn(move || {
            let hash = whole_hash_except(&memory, &free);
            let _ = results.send(hash.map_or_else(
                |error| Input::Failed(error.into()),
                |hash| Input::Hashed { attempt, hash },
            ));
        });
        spawned
            .err()
            .map(|source| Input::Failed(MigrateError::Local { action: "start a thread", source }))
    }
}

/// Does what must not miss what devices write, and says for how long the guest stood still for it.
fn quiesced<V: SourceVm, R>(
    core: &mut Core<'_, V>,
    act: impl FnOnce() -> R,
) -> Result<(R, Duration), MigrateError> {
    let failed = |source| MigrateError::of_vm("stop the guest for a harvest", source);
    let Held::Running(running) = &mut core.held else { return Ok((act(), Duration::ZERO)) };
    let (mut act, mut result) = (Some(act), None);
    let stood_still = running
        .quiesced(&mut || {
            if let Some(act) = act.take() {
                result = Some(act());
            }
        })
        .map_err(failed)?;
    let result = result.ok_or_else(|| failed("the VMM did not harvest".into()))?;
    Ok((result, stood_still))
}

fn pause<V: SourceVm>(core: &mut Core<'_, V>) -> Input {
    match core.held.pause() {
        Some(Ok(stood_still)) => Input::Paused { stood_still },
        Some(Err(source)) => Input::Failed(MigrateError::of_vm("pause the guest", source)),
        None => Input::Tick,
    }
}

fn save<V: SourceVm>(core: &mut Core<'_, V>) -> Input {
    let begun = Instant::now();
    let Held::Paused(paused) = &mut core.held else { return Input::Tick };
    match paused.save(core.machine.protocol()) {
        Ok(state) => {
            let paused = paused.is_paused_by_others();
            Input::Saved { state, took: begun.elapsed(), paused }
        }
        Err(source) => Input::Failed(MigrateError::of_vm("save its state", source)),
    }
}
