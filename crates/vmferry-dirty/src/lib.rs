//! Dirty logs: which guest pages were written since the last look.
//!
//! One trait, [`DirtyLog`], and a backend for each way of knowing: KVM's bitmap ([`KvmBitmapLog`]),
//! the same with manual clear ([`KvmClearLog`]), KVM's dirty ring ([`KvmRingLog`]), userfaultfd's asynchronous write protection
//! ([`UffdLog`]), and software ([`SoftwareLog`]) for what the VMM writes itself. [`UnionLog`] joins
//! several. Pages come out as a [`PageSet`]; nothing here knows sockets or codecs.
//!
//! # The rule that every log keeps
//!
//! A write that happens after [`start`](DirtyLog::start) has returned is in a later
//! [`collect`](DirtyLog::collect), or was made before the page is copied. So the engine collects,
//! re-arms, and only then copies: a copy that a write has torn is dirty again. Mostly it is the next
//! collect; a writer that is interrupted between its write and its mark may be later. When every writer
//! has stopped, [`collect_last`](DirtyLog::collect_last) finds all that is left.
//!
//! No log allocates in a collect, but for the software log's `get.org`, whose nature it is.
//!
//! `unsafe` is confined to `kvm::ioctl`, `kvm::ring_memory`, `userfaultfd::ioctl` and `software::sync`.

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

    /// Begins to log. Every write after the return is logged.
    ///
    /// # Errors
    /// What the kernel refuses; nothing is logged then.
    fn start(&self) -> Result<(), DirtyLogError>;

    /// Adds the pages written since the start or the last collect to `into`, and protects them
    /// again, except for what [`rearm`](Self::rearm) does.
    ///
    /// # Errors
    /// What the kernel refuses. Pages may have been taken from the log and be lost, so the
    /// migration must end.
    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError>;

    /// The collect after which no other follows, when nobody writes any more: it also finds what writers
    /// that were interrupted have marked late.
    ///
    /// # Errors
    /// As [`collect`](Self::collect).
    fn collect_last(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        self.collect(into)
    }

    /// Called just before the pages whose bits are set are copied out: bit `b` of `words[i]` is
    /// page `64 * (first_word + i) + b` of the slot. A log that collects without protecting
    /// protects them here.
    ///
    /// # Errors
    /// What the kernel refuses.
    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        let _ = (slot, first_word, words);
        Ok(())
    }

    /// Takes back pages that were collected and not sent: they come out of the next collect
    /// again. A log that nobody continues after a stop needs nothing, since whoever starts it
    /// again sends everything that is populated.
    fn give_back(&self, pages: &PageSet) {
        let _ = pages;
    }

    /// Ends logging, so that writes cost nothing any more. Idempotent.
    ///
    /// # Errors
    /// What the kernel refuses.
    fn stop(&self) -> Result<(), DirtyLogError>;
}

/// Logs nothing: for memory that nobody writes.
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
