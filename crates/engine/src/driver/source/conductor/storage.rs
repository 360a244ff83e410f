//! The sample of a guest's storage.

use std::time::Instant;

use vmferry_handover::{Paused, Resume, SourceGuest};

use super::Core;
use crate::machine::source::io::StorageSample;
use crate::vmm::storage::SourceStorage;

/// The storage of either kind of VMM.
type StorageOf<V> = fn(&mut V) -> Option<&mut dyn SourceStorage>;

/// Lets a VMM prepare to read a sample. Returns whether it can.
pub(super) fn prepare_sample<V: Resume>(core: &mut Core<'_, V>, of: StorageOf<V>) -> bool {
    let SourceGuest::Running(running) = &mut core.guest else { return false };
    let session = core.config.session;
    let Some(storage) = of(running.vm()) else { return false };
    storage.prepare(session);
    true
}

/// Reads the sample of a paused guest.
pub(super) fn sample<V: Resume>(paused: &mut Paused<V>, of: StorageOf<V>) -> Option<StorageSample> {
    let begun = Instant::now();
    let bytes = paused.with_vm(|vm| Ok(of(vm).map(SourceStorage::sample))).ok()??;
    Some(StorageSample { bytes, took: begun.elapsed() })
}
