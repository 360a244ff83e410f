//! What the driver of the source does to the guest: its log, its state, its life.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_memory::{PageSet, whole_hash};

use super::{Driver, Held};
use crate::error::MigrateError;
use crate::held::{returned, write_commit};
use crate::source::io::Input;
use crate::vm::SourceVm;

/// Attempts to resume a guest before its VMM is believed to be broken.
const RESUME_ATTEMPTS: u32 = 3;

impl<V: SourceVm> Driver<'_, V> {
    /// Logging first, then the populated pages: a page populated in between is in the log.
    pub(super) fn start_log(&mut self) -> Result<Input, MigrateError> {
        self.log.start()?;
        self.logging = true;
        self.pending = Arc::new(self.memory.populated()?);
        Ok(Input::LogStarted { populated_pages: self.pending.count() })
    }

    /// Harvests into the spare set and makes it the pending one.
    pub(super) fn harvest(&mut self) -> Result<(u64, Duration), MigrateError> {
        let begun = Instant::now();
        self.spare.clear_all();
        self.log.collect(&mut self.spare)?;
        let took = begun.elapsed();
        if let Some(pending) = Arc::get_mut(&mut self.pending) {
            std::mem::swap(pending, &mut self.spare);
        } else {
            let fresh = PageSet::for_memory(&self.memory);
            self.pending = Arc::new(std::mem::replace(&mut self.spare, fresh));
        }
        Ok((self.pending.count(), took))
    }

    /// Adds what was written before the pause to what the last harvest found.
    pub(super) fn harvest_last(&mut self) -> Result<Input, MigrateError> {
        let begun = Instant::now();
        let mut pages = std::mem::replace(&mut self.spare, PageSet::for_memory(&self.memory));
        pages.clear_all();
        pages.union_with(&self.pending);
        self.log.collect(&mut pages)?;
        self.pending = Arc::new(pages);
        Ok(Input::LastHarvest { pages: self.pending.count(), took: begun.elapsed() })
    }

    pub(super) fn pause(&mut self) -> Input {
        let begun = Instant::now();
        let (held, input) = match std::mem::replace(&mut self.held, Held::Moving) {
            Held::Running(running) => match running.pause() {
                Ok(paused) => (Held::Paused(paused), Input::Paused { took: begun.elapsed() }),
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

    pub(super) fn save(&mut self) -> Input {
        let begun = Instant::now();
        let Held::Paused(paused) = &mut self.held else { return Input::Tick };
        match paused.save() {
            Ok(state) => Input::Saved { state, took: begun.elapsed() },
            Err(source) => Input::Failed(MigrateError::Vm { action: "save its state", source }),
        }
    }

    pub(super) fn hash(&mut self) -> Option<Input> {
        let (memory, results) = (self.memory.clone(), self.inputs.0.clone());
        let spawned = std::thread::Builder::new().name("verify".into()).spawn(move || {
            let _ = results.send(
                whole_hash(&memory).map_or_else(|error| Input::Failed(error.into()), Input::Hashed),
            );
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
        // A VMM that can't resume once may do so when asked again: the guest's life hangs on it.
        let mut attempt = Some(paused);
        for _ in 0..RESUME_ATTEMPTS {
            let Some(paused) = attempt.take() else { break };
            match paused.resume() {
                Ok(running) => {
                    self.held = Held::Running(running);
                    self.resume_failure = None;
                    return None;
                }
                Err((again, error)) => {
                    attempt = again;
                    self.resume_failure = Some(error);
                }
            }
        }
        if let Some(paused) = attempt {
            self.held = Held::Paused(paused);
        }
        None
    }
}
