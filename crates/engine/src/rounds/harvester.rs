//! The pages of the rounds: which ones each round sends, and in which order.
//!
//! The driver and the simulator share it. It owns the dirty log and what is known of freed pages;
//! it knows neither threads nor time.

use std::sync::Arc;

use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PageSet};

use super::freed::Freed;
use crate::data::source::plan::RoundOrder;
use crate::error::MigrateError;

/// What is pending, and where it comes from.
pub struct Harvester {
    memory: GuestMemory,
    log: Arc<dyn DirtyLog>,
    logging: bool,
    freed: Freed,
    /// What the present or next round sends.
    pending: Arc<PageSet>,
    /// What the round before sent. Empty after the first round, whose pages were populated: that
    /// says nothing of how often they are written.
    before: PageSet,
    /// The part of `pending` that goes last.
    last: Arc<PageSet>,
    /// The set of the round before, so that no harvest allocates.
    spare: PageSet,
    /// The guest ran on after its last harvest: what is pending counts as written.
    recalled: bool,
    omitted: Option<Omission>,
}

/// A step that a simulation leaves out, to see that its absence is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Omission {
    /// Hints are still taken while the log is harvested.
    StopOfHints,
    /// Hints are asked for without protecting the round's pages.
    ProtectionOfHints,
    /// The pages of a recalled last round do not count as written.
    RecalledPages,
}

impl Harvester {
    /// Nothing is logged yet.
    #[must_use]
    pub fn new(memory: GuestMemory, log: Arc<dyn DirtyLog>, freed: Freed) -> Self {
        Self {
            log,
            logging: false,
            freed,
            pending: Arc::new(PageSet::for_memory(&memory)),
            before: PageSet::for_memory(&memory),
            last: Arc::new(PageSet::for_memory(&memory)),
            spare: PageSet::for_memory(&memory),
            recalled: false,
            omitted: None,
            memory,
        }
    }

    /// Leaves a step out, in a simulation.
    pub fn omit(&mut self, step: Omission) {
        self.omitted = Some(step);
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The dirty log.
    #[must_use]
    pub fn log(&self) -> &Arc<dyn DirtyLog> {
        &self.log
    }

    /// Whether a step is done, and not left out.
    fn does(&self, step: Omission) -> bool {
        self.omitted != Some(step)
    }

    /// The log has started: what is populated now is pending. A page that was populated in between
    /// is in the log. Returns the number of pending pages.
    ///
    /// # Errors
    /// What the memory or the log says.
    pub fn started(&mut self) -> Result<u64, MigrateError> {
        self.logging = true;
        self.freed.begin();
        self.pending = Arc::new(self.memory.populated()?);
        self.freed.sending(&self.pending);
        if self.freed.can_ask() {
            // The start of the log has protected everything.
            self.freed.ask(&*self.log, &self.pending, false)?;
        }
        Ok(self.pending.count())
    }

    /// Harvests with `collect`, which reads the log into an empty set; what it found is pending.
    /// Returns the number of pending pages and what `collect` returned.
    ///
    /// # Errors
    /// Those of `collect`, and what an origin of free pages says.
    pub fn harvest<T>(
        &mut self,
        collect: impl FnOnce(&dyn DirtyLog, &mut PageSet) -> Result<T, MigrateError>,
    ) -> Result<(u64, T), MigrateError> {
        if self.does(Omission::StopOfHints) {
            self.freed.stop();
        }
        let mut pages = std::mem::replace(&mut self.spare, PageSet::for_layout(&[]));
        pages.clear_all();
        let collected = collect(&*self.log, &mut pages)?;
        if std::mem::take(&mut self.recalled) && self.does(Omission::RecalledPages) {
            // These were read without being protected again, as nothing was to write them.
            pages.union_with(&self.pending);
        }
        self.freed.harvested(&mut pages)?;
        self.spare = pages;
        if let Some(pending) = Arc::get_mut(&mut self.pending) {
            std::mem::swap(pending, &mut self.spare);
        } else {
            let fresh = PageSet::for_memory(&self.memory);
            self.pending = Arc::new(std::mem::replace(&mut self.spare, fresh));
        }
        Ok((self.pending.count(), collected))
    }

    /// Adds what was written before the pause to what is pending. Returns the number of pending
    /// pages.
    ///
    /// # Errors
    /// What the log or an origin of free pages says.
    pub fn harvest_last(&mut self) -> Result<u64, MigrateError> {
        let mut pages = std::mem::replace(&mut self.spare, PageSet::for_layout(&[]));
        pages.clear_all();
        pages.union_with(&self.pending);
        self.log.collect_last(&mut pages)?;
        self.freed.harvested(&mut pages)?;
        self.pending = Arc::new(pages);
        Ok(self.pending.count())
    }

    /// The guest runs on after its last harvest.
    pub fn recall(&mut self) {
        self.recalled = true;
        // The last harvest has used it up.
        self.spare = PageSet::for_memory(&self.memory);
    }

    /// The pages to send in a round. `rearm` is set while the guest runs. Pages that the previous
    /// round sent too go last, and in the first round also pages that may turn out to be free.
    /// Every lane has reported the end of the previous round.
    ///
    /// # Errors
    /// What the log says.
    pub fn order(&mut self, round: u32, rearm: bool) -> Result<RoundOrder, MigrateError> {
        if rearm && round > 1 && self.freed.can_ask() {
            let protect = self.does(Omission::ProtectionOfHints);
            self.freed.ask(&*self.log, &self.pending, protect)?;
        }
        // No lane holds the set any longer.
        if let Some(last) = Arc::get_mut(&mut self.last) {
            last.set_to_intersection(&self.pending, &self.before);
            if round == 1 {
                self.freed.may_be_hinted(&self.pending, last);
            }
        }
        self.before.clear_all();
        if round > 1 {
            self.before.union_with(&self.pending);
        }
        Ok(RoundOrder {
            round,
            log: Arc::clone(&self.log),
            rearm_first: rearm && self.freed.hinted().is_none(),
            pages: Arc::clone(&self.pending),
            deferred: (!self.last.is_empty()).then(|| Arc::clone(&self.last)),
            zero: self.freed.zero(),
            hinted: self.freed.hinted(),
        })
    }

    /// What is known of freed pages.
    #[must_use]
    pub fn freed(&mut self) -> &mut Freed {
        &mut self.freed
    }

    /// Pages that the destination need not have as the source has them.
    #[must_use]
    pub fn free(&self) -> &PageSet {
        self.freed.free()
    }

    /// Ends the migration's use of guest and log. `keeps`: the guest stays at the source. `runs`:
    /// it runs, so that the next user of the log must see what was taken from the log and perhaps
    /// not sent.
    pub fn stop(&mut self, keeps: bool, runs: bool) {
        if keeps {
            self.freed.end();
        }
        if !self.logging {
            return;
        }
        if runs {
            self.log.give_back(&self.pending);
        }
        let _ = self.log.stop();
    }
}
