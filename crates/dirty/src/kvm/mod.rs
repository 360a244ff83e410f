//! KVM's dirty logs.
//!
//! Two logs read the same bitmap with `KVM_GET_DIRTY_LOG`. With [`KvmBitmapLog`], that call
//! protects every page that it reports. With [`KvmClearLog`], KVM leaves the bits and the
//! protection alone until `KVM_CLEAR_DIRTY_LOG`, just before a run of pages is read: pages that are
//! written again in between are then sent once instead of twice. [`KvmRingLog`] reads rings of
//! entries instead, one for each vCPU. A machine has either the bitmap or the rings.
//!
//! Source: Linux `Documentation/virt/kvm/api.rst`, sections 4.8, 4.117 and 8.29, and
//! `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`.

mod adaptive;
mod bitmap;
mod clear;
mod ioctl;
mod ring;
mod ring_memory;
mod rings;
mod slot;
mod slots;

pub use adaptive::KvmAdaptiveLog;
pub use bitmap::KvmBitmapLog;
pub use clear::KvmClearLog;
pub use ring::KvmRingLog;
pub use rings::{
    DEFAULT_RING_ENTRIES, DirtyRings, MIN_RING_ENTRIES, enable_dirty_ring, max_ring_entries,
};
pub use slot::KvmSlot;
