//! The host's side of the balloon: handles what the guest's driver reports.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use vmferry_balloon::{BalloonHost, CommandId, GuestRange, PAGE_BYTES, Statistics, Warning};
use vmferry_memory::{GuestMemory, MemoryError, PageRun};

/// Receives hints and discards as they arrive. It is called with the device locked, so it must
/// return quickly and must not use the device.
pub trait BalloonListener: Send + Sync {
    /// The guest reports that these pages were free at some time since the round of hints began.
    /// `poison` is the pattern they are filled with, if the guest reports one.
    fn hint(&self, run: PageRun, poison: Option<u32>);

    /// These pages were discarded and read as zeros. Dirty logs do not see that.
    fn discarded(&self, run: PageRun);

    /// This round has no more hints.
    fn complete(&self);
}

/// A round of hints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HintRound {
    /// The command ID of the round.
    pub id: u32,
    /// Ranges hinted.
    pub ranges: u64,
    /// Bytes hinted. Bytes that were hinted twice count twice.
    pub bytes: u64,
    /// Whether the guest has ended the round.
    pub complete: bool,
}

/// The embedder's side of the device.
pub(super) struct Host {
    memory: GuestMemory,
    /// Whether no page is returned to the system.
    keeps_pages: Arc<AtomicBool>,
    pub(super) listener: Option<Arc<dyn BalloonListener>>,
    /// The last round of hints.
    pub(super) hints: Option<HintRound>,
    pub(super) discarded_bytes: u64,
    pub(super) deflated_bytes: u64,
    pub(super) warnings: Vec<String>,
    /// How often statistics have arrived.
    pub(super) answers: u64,
}

impl Host {
    /// While `keeps_pages` is set, no page is returned to the system.
    pub(super) fn new(memory: GuestMemory, keeps_pages: Arc<AtomicBool>) -> Self {
        Self {
            memory,
            keeps_pages,
            listener: None,
            hints: None,
            discarded_bytes: 0,
            deflated_bytes: 0,
            warnings: Vec::new(),
            answers: 0,
        }
    }

    /// Converts a range. The device reports whole pages within one region, and regions are slots.
    fn run(&self, range: GuestRange) -> Option<PageRun> {
        let slots = self.memory.slots();
        let after = slots.partition_point(|slot| slot.gpa().0 <= range.start.0);
        let slot = slots.get(after.checked_sub(1)?)?;
        let first = (range.start.0 - slot.gpa().0) / PAGE_BYTES;
        let run = PageRun { slot: slot.id(), first, pages: range.bytes / PAGE_BYTES };
        self.memory.check_run(run).is_ok().then_some(run)
    }
}

impl BalloonHost for Host {
    fn discard(&mut self, range: GuestRange) -> io::Result<()> {
        let Some(run) = self.run(range) else { return Err(io::ErrorKind::InvalidInput.into()) };
        if self.keeps_pages.load(Ordering::Acquire) {
            return Ok(());
        }
        let result = self.memory.discard(run);
        // Even if it failed, some of the pages may be discarded.
        let gone = result.as_ref().map_or(Some(run), |gone| *gone);
        if let (Some(listener), Some(gone)) = (&self.listener, gone) {
            listener.discarded(gone);
        }
        match result {
            Ok(gone) => {
                self.discarded_bytes += gone.map_or(0, |run| run.pages * PAGE_BYTES);
                Ok(())
            }
            Err(MemoryError::Slot { source, .. }) => Err(source),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn hint(&mut self, range: GuestRange, id: CommandId, poison: Option<u32>) {
        let round = self.hints.get_or_insert_default();
        round.id = id.number();
        round.ranges += 1;
        round.bytes += range.bytes;
        if let (Some(listener), Some(run)) = (&self.listener, self.run(range)) {
            listener.hint(run, poison);
        }
    }

    fn hints_complete(&mut self, _: CommandId) {
        if let Some(round) = &mut self.hints {
            round.complete = true;
        }
        if let Some(listener) = &self.listener {
            listener.complete();
        }
    }

    fn deflated(&mut self, range: GuestRange) {
        self.deflated_bytes += range.bytes;
    }

    fn statistics(&mut self, _: &Statistics) {
        self.answers += 1;
    }

    fn warning(&mut self, warning: Warning) {
        self.warnings.push(warning.to_string());
    }
}

/// The statistics by name.
pub(super) fn by_name(statistics: &Statistics) -> BTreeMap<&'static str, u64> {
    statistics.named().collect()
}
