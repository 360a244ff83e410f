//! What the driver of the source does to the guest: its log, its state, its life.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_memory::{PageSet, whole_hash_except};

use super::{Driver, Held};
use crate::error::MigrateError;
use crate::held::{returned, write_commit};
use crate::source::freed::free_messages;
use crate::source::io::Input;
use crate::source::plan::Job;
use crate::vm::SourceVm;

impl<V: SourceVm> Driver<'_, V> {
    /// Logging first, then the populated pages: a page populated in between is in the log.
    pub(super) fn start_log(&mut self) -> Result<Input, MigrateError> {
        let log = Arc::clone(&self.log);
        let (result, stood_still) = self.quiesced(move || log.start())?;
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
    pub(super) fn harvest(&mut self) -> Result<Input, MigrateError> {
        let begun = Instant::now();
        self.freed.stop();
        let log = Arc::clone(&self.log);
        let mut pages = std::mem::replace(&mut self.spare, PageSet::for_layout(&[]));
        pages.clear_all();
        let (result, stood_still) = self.quiesced(|| log.collect(&mut pages))?;
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
    pub(super) fn send_round(&mut self, round: u32, rearm: bool) -> Result<(), MigrateError> {
        let Some(pool) = &self.pool else { return Ok(()) };
        if rearm && round > 1 && self.freed.can_ask() {
            self.freed.ask(&*self.log, &self.pending, true)?;
        }
        // Every lane has reported the end of the round before, so nobody holds the set any more.
        if let Some(last) = Arc::get_mut(&mut self.last) {
            last.set_to_intersection(&self.pending, &self.before);
            if round == 1 {
                self.freed.may_be_hinted(&self.pending, last);
                self.freed.hold(self.config.max_bandwidth);
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

    /// Does what must not miss what devices write, and says for how long the guest stood still for it.
    fn quiesced<R>(&mut self, act: impl FnOnce() -> R) -> Result<(R, Duration), MigrateError> {
        let failed = |source| MigrateError::Vm { action: "stop the guest for a harvest", source };
        let Held::Running(running) = &mut self.held else { return Ok((act(), Duration::ZERO)) };
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

    pub(super) fn throttle(&mut self, percent: u8) -> Option<Input> {
        let Held::Running(running) = &mut self.held else { return None };
        self.throttled = true;
        let throttled = running.throttle(percent);
        throttled.err().map(|source| {
            Input::Failed(MigrateError::Vm { action: "throttle the guest's vCPUs", source })
        })
    }

    /// Adds what was written before the pause to what the last harvest found.
    pub(super) fn harvest_last(&mut self) -> Result<Input, MigrateError> {
        let begun = Instant::now();
        let mut pages = std::mem::replace(&mut self.spare, PageSet::for_layout(&[]));
        pages.clear_all();
        pages.union_with(&self.pending);
        self.log.collect_last(&mut pages)?;
        self.freed.harvested(&mut pages)?;
        self.pending = Arc::new(pages);
        Ok(Input::LastHarvest { pages: self.pending.count(), took: begun.elapsed() })
    }

    pub(super) fn pause(&mut self) -> Input {
        let (held, input) = match std::mem::replace(&mut self.held, Held::Moving) {
            Held::Running(running) => match running.pause() {
                Ok((paused, stood_still)) => (Held::Paused(paused), Input::Paused { stood_still }),
                Err((running, source)) => {
                    let error = MigrateError::Vm { action: "pause the guest", source };
                    (Held::Running(running), Input::Failed(error))
                }
            },
            other => (other, Input::Tick),
        };
        self.held = held;
        input
    }

    /// Lets the guest run on after its last harvest.
    pub(super) fn recall(&mut self) -> Option<Input> {
        self.recalled = true;
        // The last harvest has used it up.
        self.spare = PageSet::for_memory(&self.memory);
        self.resume();
        self.resume_failure.take().map(|source| {
            Input::Failed(MigrateError::Vm { action: "let the guest run on", source })
        })
    }

    pub(super) fn save(&mut self) -> Input {
        let begun = Instant::now();
        let Held::Paused(paused) = &mut self.held else { return Input::Tick };
        match paused.save() {
            Ok(state) => Input::Saved { state, took: begun.elapsed() },
            Err(source) => Input::Failed(MigrateError::Vm { action: "save its state", source }),
        }
    }

    /// Tells the destination which pages it need not have as they are here.
    pub(super) fn tell_free(&mut self) -> Option<Input> {
        let messages = free_messages(self.freed.free());
        messages.iter().find_map(|message| self.send(message))
    }

    pub(super) fn hash(&mut self) -> Option<Input> {
        let (memory, results) = (self.memory.clone(), self.inputs.0.clone());
        let free = self.freed.free().clone();
        let spawned = std::thread::Builder::new().name("verify".into()).spawn(move || {
            let hash = whole_hash_except(&memory, &free);
            let _ =
                results.send(hash.map_or_else(|error| Input::Failed(error.into()), Input::Hashed));
        });
        spawned
            .err()
            .map(|source| Input::Failed(MigrateError::Local { action: "start a thread", source }))
    }

    pub(super) fn commit(&mut self) -> Input {
        match write_commit(&mut self.journal) {
            Ok(proof) => {
                self.held = match std::mem::replace(&mut self.held, Held::Moving) {
                    Held::Paused(paused) => {
                        paused.commit(proof).map_or(Held::Moving, Held::Committed)
                    }
                    other => other,
                };
                Input::CommitWritten(Ok(()))
            }
            Err(error) => Input::CommitWritten(Err(error.into())),
        }
    }

    pub(super) fn resume(&mut self) -> Option<Input> {
        let paused = match std::mem::replace(&mut self.held, Held::Moving) {
            Held::Paused(paused) => paused,
            Held::Committed(committed) => match returned(self.machine.handover()) {
                Some(proof) => committed.take_back(proof),
                None => {
                    self.held = Held::Committed(committed);
                    return None;
                }
            },
            other => {
                self.held = other;
                return None;
            }
        };
        match paused.resume() {
            Ok(running) => self.held = Held::Running(running),
            Err((paused, error)) => {
                self.held = paused.map_or(Held::Moving, Held::Paused);
                self.resume_failure = Some(error);
            }
        }
        None
    }
}
