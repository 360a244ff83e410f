//! KVM's bitmap, read in whichever way cost less in the previous rounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use vmferry_memory::{PageSet, SlotId};

use super::clear::KvmClearLog;
use super::ioctl;
use super::slot::KvmSlot;
use crate::{DirtyLog, DirtyLogError, KvmBitmapLog};

/// [`KvmClearLog`], or [`KvmBitmapLog`] while many dirty pages make manual clear expensive. Every
/// harvest chooses again, by the dirty pages of the last one and the cost of re-arming them.
///
/// Manual clear protects pages just before they are read, so fewer of them are written once more
/// before the next harvest. But each of its calls makes every vCPU leave the guest for a TLB flush,
/// and there are many calls when many pages are dirty. The cost of a call differs by a factor of a
/// hundred between hosts, so it is measured. Both ways read the same bitmap of KVM. Changing from
/// one to the other is a setting and loses nothing, because pages that were reported but not
/// protected yet are reported again.
pub struct KvmAdaptiveLog {
    clear: KvmClearLog,
    /// Whether pages are protected when they are read; otherwise when they are reported.
    manual: AtomicBool,
    /// Nanoseconds spent on protecting since the last harvest, summed over all threads.
    protecting: AtomicU64,
    measured: Mutex<Measured>,
}

/// Measurements of the previous rounds.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// Time of the last harvest.
    since: Instant,
    /// Number of pages in the last harvest.
    dirty: u64,
    /// Number of dirty pages at which manual clear cost too much.
    too_many: u64,
}

/// Manual clear costs too much if it takes more than one part in this many of a round's time.
const TOO_MUCH: u32 = 10;

impl Measured {
    fn begin() -> Self {
        Self { since: Instant::now(), dirty: 0, too_many: u64::MAX }
    }

    /// Whether the next harvest uses manual clear, after a round that took `round`, of which
    /// `protecting` was spent on protecting.
    fn choose(&mut self, manual: bool, round: Duration, protecting: Duration) -> bool {
        if manual && protecting > round / TOO_MUCH {
            self.too_many = self.dirty;
            return false;
        }
        // Switches back only when at most half as many pages are dirty, where the calls may pay
        // off.
        manual || self.dirty <= self.too_many / 2
    }
}

impl KvmAdaptiveLog {
    /// A log of these slots, which must cover everything that the guest writes.
    ///
    /// # Errors
    /// [`DirtyLogError::Unavailable`] if KVM lacks manual clear, so that there is no choice.
    pub fn new(vm: Arc<VmFd>, slots: Vec<KvmSlot>) -> Result<Self, DirtyLogError> {
        Ok(Self {
            clear: KvmClearLog::new(vm, slots)?,
            manual: AtomicBool::new(true),
            protecting: AtomicU64::new(0),
            measured: Mutex::new(Measured::begin()),
        })
    }

    /// Sets whether the next harvests leave pages unprotected (`true`) or protect them.
    pub(crate) fn set_manual(&self, manual: bool) -> Result<(), DirtyLogError> {
        if manual != self.manual.load(Ordering::Relaxed) {
            ioctl::set_manual_clear(self.clear.slots().vm(), manual).map_err(|error| {
                DirtyLogError::Unavailable { log: KvmClearLog::NAME, reason: error.to_string() }
            })?;
            self.manual.store(manual, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Harvests in the current way, and returns the number of pages.
    pub(crate) fn read(&self, into: &mut PageSet) -> Result<u64, DirtyLogError> {
        self.clear.slots().collect(into)
    }
}

impl DirtyLog for KvmAdaptiveLog {
    /// The name of the log used at present.
    fn name(&self) -> &'static str {
        if self.manual.load(Ordering::Relaxed) { KvmClearLog::NAME } else { KvmBitmapLog::NAME }
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        self.manual.store(true, Ordering::Relaxed);
        self.protecting.store(0, Ordering::Relaxed);
        *self.measured.lock() = Measured::begin();
        self.clear.start()
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        let mut measured = self.measured.lock();
        let protecting = Duration::from_nanos(self.protecting.swap(0, Ordering::Relaxed));
        let manual = self.manual.load(Ordering::Relaxed);
        let round = measured.since.elapsed();
        self.set_manual(measured.choose(manual, round, protecting))?;
        measured.since = Instant::now();
        measured.dirty = self.read(into)?;
        Ok(())
    }

    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        if !self.manual.load(Ordering::Relaxed) {
            return Ok(());
        }
        let begun = Instant::now();
        self.clear.rearm(slot, first_word, words)?;
        let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.protecting.fetch_add(took, Ordering::Relaxed);
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.clear.stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND: Duration = Duration::from_millis(100);

    #[test]
    fn manual_clear_ends_when_costly_and_returns_when_fewer_pages_are_dirty() {
        let mut measured = Measured { dirty: 1000, ..Measured::begin() };
        assert!(measured.choose(true, ROUND, Duration::from_millis(9)));
        assert!(!measured.choose(true, ROUND, Duration::from_millis(11)), "a tenth of the round");
        for (dirty, manual) in [(2000, false), (501, false), (500, true)] {
            measured.dirty = dirty;
            assert_eq!(measured.choose(false, ROUND, Duration::ZERO), manual, "{dirty}");
        }
        // If it costs too much with fewer pages, the threshold falls.
        assert!(!measured.choose(true, ROUND, ROUND));
        assert_eq!(measured.too_many, 500);
        measured.dirty = 251;
        assert!(!measured.choose(false, ROUND, Duration::ZERO));
    }
}
