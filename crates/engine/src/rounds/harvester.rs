//! Decides which pages each round sends, and in which order.
//!
//! The driver and the simulator share this code. It owns the dirty log and the record of freed
//! pages, and uses neither threads nor time.

use std::sync::Arc;

use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestMemory, PageSet};

use super::freed::Freed;
use crate::data::source::plan::RoundOrder;
use crate::error::MigrateError;

/// The pages to send, and the dirty log that they come from.
pub struct Harvester {
    memory: GuestMemory,
    log: Arc<dyn DirtyLog>,
    logging: bool,
    freed: Freed,
    /// The pages of the present or next round.
    pending: Arc<PageSet>,
    /// The pages of the previous round. Empty after the first round: its pages are all populated
    /// pages, which need not have been written recently.
    before: PageSet,
    /// The pages of `pending` that are sent last.
    last: Arc<PageSet>,
    /// The pages of `pending` that the destination knows to be missing.
    named: PageSet,
    /// A set for the next harvest, so that it does not allocate.
    spare: PageSet,
    /// The next harvest adds the pending pages: the guest was resumed after the last harvest, or
    /// they were not sent.
    keeps_pending: bool,
    omitted: Option<Omission>,
}

/// A step that the simulator leaves out, to test that it detects the omission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Omission {
    /// Hints are still accepted while the log is harvested.
    StopOfHints,
    /// Hints are requested although the round's pages are not write-protected.
    ProtectionOfHints,
    /// The pages of a recalled last round do not count as written.
    RecalledPages,
}

impl Harvester {
    /// A harvester whose log has not started.
    #[must_use]
    pub fn new(memory: GuestMemory, log: Arc<dyn DirtyLog>, freed: Freed) -> Self {
        Self {
            log,
            logging: false,
            freed,
            pending: Arc::new(PageSet::for_memory(&memory)),
            before: PageSet::for_memory(&memory),
            last: Arc::new(PageSet::for_memory(&memory)),
            named: PageSet::for_memory(&memory),
            spare: PageSet::for_memory(&memory),
            keeps_pending: false,
            omitted: None,
            memory,
        }
    }

    /// Leaves a step out, for the simulator.
    pub fn omit(&mut self, step: Omission) {
        self.omitted = Some(step);
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The pages of the present or next round.
    #[must_use]
    pub fn pending(&self) -> &PageSet {
        &self.pending
    }

    /// The dirty log.
    #[must_use]
    pub fn log(&self) -> &Arc<dyn DirtyLog> {
        &self.log
    }

    /// Whether a step is carried out.
    fn does(&self, step: Omission) -> bool {
        self.omitted != Some(step)
    }

    /// The log has started. All pages that are populated now become pending. A page that is
    /// populated later is in the log. Returns the number of pending pages.
    ///
    /// # Errors
    /// Errors of the memory or the dirty log.
    pub fn started(&mut self) -> Result<u64, MigrateError> {
        self.logging = true;
        self.freed.begin();
        self.pending = Arc::new(self.memory.populated()?);
        self.freed.sending(&self.pending);
        if self.freed.can_ask() {
            // Starting the log has write-protected all pages.
            self.freed.ask(&*self.log, &self.pending, false)?;
        }
        Ok(self.pending.count())
    }

    /// Harvests with `collect`, which reads the log into an empty set. The pages found become
    /// pending. Returns their number and the result of `collect`.
    ///
    /// # Errors
    /// Errors of `collect` or of a source of free pages.
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
        if std::mem::take(&mut self.keeps_pending) {
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

    /// The pending pages will not be sent before the next harvest, which adds them.
    pub fn keep_pending(&mut self) {
        self.keeps_pending = true;
    }

    /// The pending pages, without those that this has returned since the last round or recall.
    pub fn name_pending(&mut self) -> PageSet {
        let mut new = (*self.pending).clone();
        new.subtract(&self.named);
        self.named.union_with(&new);
        new
    }

    /// Adds the pages written before the pause to the pending pages. Returns the number of pending
    /// pages.
    ///
    /// # Errors
    /// Errors of the dirty log or of a source of free pages.
    pub fn harvest_last(&mut self) -> Result<u64, MigrateError> {
        let mut pages = std::mem::replace(&mut self.spare, PageSet::for_layout(&[]));
        pages.clear_all();
        pages.union_with(&self.pending);
        self.log.collect_last(&mut pages)?;
        self.freed.harvested(&mut pages)?;
        self.pending = Arc::new(pages);
        Ok(self.pending.count())
    }

    /// The guest was resumed after its last harvest.
    pub fn recall(&mut self) {
        // The last round read the pages of a paused guest, and did not protect them again.
        self.keeps_pending = self.does(Omission::RecalledPages);
        self.named.clear_all();
        // `harvest_last` has made the spare set the pending one.
        self.spare = PageSet::for_memory(&self.memory);
    }

    /// The pages to send in a round. `rearm` is set while the guest runs. Called after every lane
    /// has reported the end of the previous round.
    ///
    /// Pages that the previous round also sent are sent last. So are pages of the first round that
    /// the guest may still report free.
    ///
    /// # Errors
    /// Errors of the dirty log.
    pub fn order(&mut self, round: u32, rearm: bool) -> Result<RoundOrder, MigrateError> {
        self.named.clear_all();
        if rearm && round > 1 && self.freed.can_ask() {
            let protect = self.does(Omission::ProtectionOfHints);
            self.freed.ask(&*self.log, &self.pending, protect)?;
        }
        // No lane holds the set any more.
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

    /// The record of freed pages.
    #[must_use]
    pub fn freed(&mut self) -> &mut Freed {
        &mut self.freed
    }

    /// Pages whose content the destination need not have.
    #[must_use]
    pub fn free(&self) -> &PageSet {
        self.freed.free()
    }

    /// Ends the migration's use of the guest and the log. `keeps` means that the guest stays at the
    /// source, and `runs` that it runs. In that case the pending pages, which may not have been
    /// sent, are returned to the log for its next user.
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

#[cfg(test)]
mod tests {
    use vmferry_dirty::UffdLog;
    use vmferry_memory::{MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

    use super::*;
    use crate::data::source::lane::Signal;

    const SLOT: SlotId = SlotId(0);

    fn harvester() -> Harvester {
        let layout = [SlotLayout { slot: SLOT, gpa: 0, pages: 64 }];
        let memory = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
        let log = Arc::new(UffdLog::new(&memory).unwrap());
        let freed = Freed::new(Vec::new(), &memory, Arc::new(Signal::default()));
        log.start().unwrap();
        let mut harvester = Harvester::new(memory, log, freed);
        assert_eq!(harvester.started().unwrap(), 0);
        harvester
    }

    fn write(harvester: &Harvester, pages: &[u64]) {
        for page in pages {
            harvester.memory().write_at(page * PAGE_SIZE as u64, &[1]).unwrap();
        }
    }

    fn harvest(harvester: &mut Harvester) -> u64 {
        harvester.harvest(|log, pages| Ok(log.collect(pages).map(drop)?)).unwrap().0
    }

    fn named(harvester: &mut Harvester) -> Vec<u64> {
        let pages = harvester.name_pending();
        pages.bitmap(SLOT).runs().flat_map(|(first, count)| first..first + count).collect()
    }

    #[test]
    fn pages_that_are_not_sent_stay_pending_and_are_named_once() {
        let mut harvester = harvester();
        write(&harvester, &[3, 4, 9]);
        assert_eq!(harvest(&mut harvester), 3);
        assert_eq!(named(&mut harvester), [3, 4, 9]);
        write(&harvester, &[4, 20]);
        harvester.keep_pending();
        assert_eq!(harvest(&mut harvester), 4);
        assert_eq!(named(&mut harvester), [20]);
        write(&harvester, &[21]);
        assert_eq!(harvester.harvest_last().unwrap(), 5);
        assert_eq!(named(&mut harvester), [21]);
    }

    /// The destination forgets what was named when the guest is sent or resumed after all.
    #[test]
    fn pages_are_named_again_after_a_round_or_a_recall() {
        let mut harvester = harvester();
        write(&harvester, &[3]);
        assert_eq!(harvest(&mut harvester), 1);
        assert_eq!(named(&mut harvester), [3]);
        drop(harvester.order(2, true).unwrap());
        write(&harvester, &[3]);
        assert_eq!(harvest(&mut harvester), 1, "what was sent is not pending any more");
        assert_eq!(named(&mut harvester), [3]);
        harvester.recall();
        assert_eq!(harvest(&mut harvester), 1);
        assert_eq!(named(&mut harvester), [3]);
    }
}
