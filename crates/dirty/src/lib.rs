//! Dirty logs: which guest pages were written since the last harvest.
//!
//! The trait is [`DirtyLog`], and there is one backend for each source of this information: KVM's
//! bitmap ([`KvmBitmapLog`]), the same with manual clear ([`KvmClearLog`]), KVM's dirty ring
//! ([`KvmRingLog`]), userfaultfd's asynchronous write protection ([`UffdLog`]), and software
//! ([`SoftwareLog`]) for the VMM's own writes. [`UnionLog`] combines several. Pages are reported as
//! a [`PageSet`]. This crate does not depend on sockets or codecs.
//!
//! # The rule that every log keeps
//!
//! A write that happens after [`start`](DirtyLog::start) has returned is in a later
//! [`collect`](DirtyLog::collect), or it happens before the page is copied. Therefore the engine
//! collects, re-arms, and only then copies: a copy that a write has torn is dirty again. Usually
//! the write is in the next collect; if the writer is interrupted between its write and its mark,
//! it may be in a later one. When every writer has stopped,
//! [`collect_last`](DirtyLog::collect_last) finds everything that is left.
//!
//! No log allocates in a collect, except the software log's `get.org`, which replaces the whole
//! bitmap.
//!
//! `unsafe` is confined to `kvm::ioctl`, `kvm::ring_memory`, `userfaultfd::ioctl` and
//! `software::sync`.

mod choice;
mod error;
mod kvm;
mod software;
mod union;
mod userfaultfd;

#[cfg(test)]
mod tests;

pub use choice::{LogChoice, RING_FROM_BYTES};
pub use error::DirtyLogError;
pub use kvm::{
    DEFAULT_RING_ENTRIES, DirtyRings, KvmAdaptiveLog, KvmBitmapLog, KvmClearLog, KvmRingLog,
    KvmSlot, MIN_RING_ENTRIES, enable_dirty_ring, max_ring_entries,
};
pub use software::{DirtyBitmap, Marks, SoftwareLog, SoftwareWay};
pub use union::UnionLog;
pub use userfaultfd::UffdLog;

use vmferry_memory::{PageSet, SlotId};

/// A log of writes to guest memory.
///
/// ```
/// use vmferry_dirty::{DirtyLog, UffdLog};
/// use vmferry_memory::{GuestMemory, MemoryKind, PageSet, SlotId, SlotLayout};
///
/// let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: 1024 }];
/// let memory = GuestMemory::allocate(&layout, MemoryKind::Private)?;
/// let log = UffdLog::new(&memory)?;
/// log.start()?;
/// memory.write_at(5 << 12, b"written")?;
///
/// let mut dirty = PageSet::for_memory(&memory);
/// log.collect(&mut dirty)?;
/// assert!(dirty.bitmap(SlotId(0)).is_set(5));
/// dirty.clear_all();
/// log.collect(&mut dirty)?;
/// assert!(dirty.is_empty(), "nothing was written since");
/// log.stop()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait DirtyLog: Send + Sync {
    /// The log's name in statistics, such as `kvm-clear`.
    fn name(&self) -> &'static str;

    /// Starts logging. Every write after the return is logged.
    ///
    /// # Errors
    /// The kernel's refusal; in that case nothing is logged.
    fn start(&self) -> Result<(), DirtyLogError>;

    /// Adds the pages written since the start or the last collect to `into`, and protects them
    /// again, unless [`rearm`](Self::rearm) does that.
    ///
    /// # Errors
    /// The kernel's refusal. Pages may have been taken from the log and lost, so the migration must
    /// end.
    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError>;

    /// The last collect, after all writers have stopped. It also finds what interrupted writers
    /// have marked late.
    ///
    /// # Errors
    /// As [`collect`](Self::collect).
    fn collect_last(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        self.collect(into)
    }

    /// Called just before the pages whose bits are set are copied out: bit `b` of `words[i]` is
    /// page `64 * (first_word + i) + b` of the slot. A log that does not protect pages when it
    /// collects them protects them here.
    ///
    /// # Errors
    /// The kernel's refusal.
    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        let _ = (slot, first_word, words);
        Ok(())
    }

    /// Returns pages that were collected but not sent: the next collect reports them again. A log
    /// that is not continued after a stop need not implement this, because after a new start all
    /// populated pages are sent.
    fn give_back(&self, pages: &PageSet) {
        let _ = pages;
    }

    /// Stops logging, so that writes have no further cost. Idempotent.
    ///
    /// # Errors
    /// The kernel's refusal.
    fn stop(&self) -> Result<(), DirtyLogError>;
}

/// Logs nothing, for memory without writers.
impl DirtyLog for () {
    fn name(&self) -> &'static str {
        "none"
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        Ok(())
    }

    fn collect(&self, _into: &mut PageSet) -> Result<(), DirtyLogError> {
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        Ok(())
    }
}
