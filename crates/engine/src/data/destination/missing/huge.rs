//! Missing pages of memory on hugetlbfs. The guest sees a huge page once all its pages are there.

use std::time::Instant;

use vmferry_faults::FaultRanges;
use vmferry_memory::{GuestMemory, PageRun, SlotId};

use super::{MissingPages, MissingSet, Phase, State, parts};
use crate::error::MigrateError;

/// Hides all huge pages that have a missing page.
pub fn hide_incomplete(
    memory: &GuestMemory,
    ranges: &FaultRanges,
    missing: &MissingSet,
) -> Result<(), MigrateError> {
    for slot in memory.slots().iter().filter(|slot| ranges.unit_pages(slot.id()) > 1) {
        let mut hidden_to = 0;
        for run in missing.runs(slot.id()) {
            let whole = whole(ranges, run);
            let first = whole.first.max(hidden_to);
            hidden_to = whole.first + whole.pages;
            if first < hidden_to {
                ranges.hide(PageRun { first, pages: hidden_to - first, ..whole })?;
            }
        }
    }
    Ok(())
}

/// The huge pages that have pages of a run.
pub fn whole(ranges: &FaultRanges, run: PageRun) -> PageRun {
    let unit = ranges.unit_pages(run.slot);
    let first = run.first / unit * unit;
    let end = (run.first + run.pages).next_multiple_of(unit);
    PageRun { first, pages: end - first, ..run }
}

impl MissingPages {
    /// A thread touched a huge page that is hidden, or was never populated.
    pub(super) fn fault_in_huge_page(
        &self,
        slot: SlotId,
        page: u64,
        requests: &mut Vec<PageRun>,
    ) -> Result<(), MigrateError> {
        let huge_page = whole(&self.ranges, PageRun { slot, first: page, pages: 1 });
        {
            let mut state = self.state.lock();
            let State { set, phase, waits, counts, .. } = &mut *state;
            counts.faults += 1;
            if *phase != Phase::GivenUp && has_any(set, huge_page) {
                waits.entry((slot, huge_page.first)).or_insert_with(Instant::now);
                parts(huge_page).for_each(|(part, _)| set.fault_all(part, requests));
                return Ok(());
            }
        }
        if self.ranges.show(huge_page)? {
            self.state.lock().counts.zero_faults += 1;
        }
        Ok(())
    }

    /// Shows the huge pages of a part that are complete.
    pub(super) fn show_complete(&self, part: PageRun) -> Result<(), MigrateError> {
        let unit = self.ranges.unit_pages(part.slot);
        let all = whole(&self.ranges, part);
        for first in (all.first..all.first + all.pages).step_by(unit as usize) {
            let huge_page = PageRun { first, pages: unit, ..all };
            if has_any(&self.state.lock().set, huge_page) {
                continue;
            }
            self.ranges.show(huge_page)?;
            let mut state = self.state.lock();
            if let Some(since) = state.waits.remove(&(part.slot, first)) {
                state.waited.record(since.elapsed());
            }
        }
        Ok(())
    }
}

fn has_any(set: &MissingSet, run: PageRun) -> bool {
    parts(run).any(|(part, _)| set.missing_of(part).next().is_some())
}
