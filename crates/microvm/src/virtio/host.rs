//! What becomes of what the guest's driver says.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use serde::Serialize;
use vmferry_balloon::{BalloonHost, CommandId, GuestRange, PAGE_BYTES, Statistics, Warning};
use vmferry_memory::{GuestMemory, MemoryError, PageRun};

/// Hears of hints and discards as they come, by the device's thread or whoever orders the device about, with
/// the device locked: it must be quick, and must not use the device itself.
pub trait BalloonListener: Send + Sync {
    /// The guest has said that these pages were free at some time since the round of hints began. `poison` is what
    /// they are filled with, repeated, if the guest says so.
    fn hint(&self, run: PageRun, poison: Option<u32>);

    /// These pages have lost their content and read as zeros: no dirty log knows.
    fn discarded(&self, run: PageRun);

    /// There are no more hints in this round.
    fn complete(&self);
}

/// A round of hints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HintRound {
    /// Its command ID.
    pub id: u32,
    /// Ranges hinted.
    pub ranges: u64,
    /// Bytes hinted; those hinted twice count twice.
    pub bytes: u64,
    /// Whether the guest has said that it has no more.
    pub complete: bool,
}

/// The embedder's side of the device.
pub(super) struct Host {
    memory: GuestMemory,
    pub(super) listener: Option<Arc<dyn BalloonListener>>,
    /// The last round of hints.
    pub(super) hints: Option<HintRound>,
    pub(super) discarded_bytes: u64,
    pub(super) deflated_bytes: u64,
    pub(super) warnings: Vec<String>,
    /// How often statistics have come.
    pub(super) answers: u64,
}

impl Host {
    pub(super) fn new(memory: GuestMemory) -> Self {
        Self {
            memory,
            listener: None,
            hints: None,
            discarded_bytes: 0,
            deflated_bytes: 0,
            warnings: Vec::new(),
            answers: 0,
        }
    }

    /// The device reports whole pages within one region, and regions are slots.
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
        let result = self.memory.discard(run);
        // Some may be gone even if it failed.
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

/// Statistics by name, for people and programs.
pub(super) fn by_name(statistics: &Statistics) -> BTreeMap<&'static str, u64> {
    statistics.named().collect()
}
