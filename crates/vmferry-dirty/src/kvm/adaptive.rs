//! KVM's bitmap, read in the way that suits how much is dirty.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvm_ioctls::VmFd;
use vmferry_memory::{PageSet, SlotId};

use super::clear::KvmClearLog;
use super::ioctl;
use super::slots::KvmSlot;
use crate::{DirtyLog, DirtyLogError, KvmBitmapLog};

/// [`KvmClearLog`] while little is dirty, [`KvmBitmapLog`] while much is, chosen anew at every harvest by what
/// the last one found.
///
/// Manual clear protects pages just before they are read, frame by frame: a page that is written twice
/// before that is sent once. But each of these calls makes every vCPU leave the guest for a TLB flush,
/// and when much of memory is dirty there is one for every few pages; then it costs less to let the one
/// call that reads the bitmap protect everything. Both read the same bitmap of KVM, so changing from one
/// to the other is a setting, and loses nothing: what was reported and not protected yet is reported
/// again.
pub struct KvmAdaptiveLog {
    clear: KvmClearLog,
    pages: u64,
    /// Whether pages are protected when they are read; else when they are reported.
    manual: AtomicBool,
    /// What the next harvest is to do.
    next_manual: AtomicBool,
}

/// From this part of all pages on, much is dirty: one in so many. `vmferry-bench dirty-log` measures both
/// ways at each density.
const DENSE: u64 = 16;

impl KvmAdaptiveLog {
    /// A log of these slots, which must be all that the guest writes.
    ///
    /// # Errors
    /// [`DirtyLogError::Unavailable`] where KVM lacks manual clear: there is nothing to choose then.
    pub fn new(vm: Arc<VmFd>, slots: Vec<KvmSlot>) -> Result<Self, DirtyLogError> {
        let pages = slots.iter().map(KvmSlot::pages).sum();
        let clear = KvmClearLog::new(vm, slots)?;
        let [manual, next_manual] = [true; 2].map(AtomicBool::new);
        Ok(Self { clear, pages, manual, next_manual })
    }
}

impl DirtyLog for KvmAdaptiveLog {
    /// That of the present way.
    fn name(&self) -> &'static str {
        if self.manual.load(Ordering::Relaxed) { KvmClearLog::NAME } else { KvmBitmapLog::NAME }
    }

    fn start(&self) -> Result<(), DirtyLogError> {
        self.manual.store(true, Ordering::Relaxed);
        self.next_manual.store(true, Ordering::Relaxed);
        self.clear.start()
    }

    fn collect(&self, into: &mut PageSet) -> Result<(), DirtyLogError> {
        let manual = self.next_manual.load(Ordering::Relaxed);
        if manual != self.manual.load(Ordering::Relaxed) {
            ioctl::set_manual_clear(self.clear.slots().vm(), manual).map_err(|error| {
                DirtyLogError::Unavailable { log: KvmClearLog::NAME, reason: error.to_string() }
            })?;
            self.manual.store(manual, Ordering::Relaxed);
        }
        let dirty = self.clear.slots().collect(into)?;
        self.next_manual.store(dirty < self.pages.div_ceil(DENSE), Ordering::Relaxed);
        Ok(())
    }

    fn rearm(&self, slot: SlotId, first_word: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        if self.manual.load(Ordering::Relaxed) {
            self.clear.rearm(slot, first_word, words)
        } else {
            Ok(())
        }
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.clear.stop()
    }
}
