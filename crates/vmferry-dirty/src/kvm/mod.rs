//! KVM's dirty logs.
//!
//! Both read the same bitmap with `KVM_GET_DIRTY_LOG`. [`KvmBitmapLog`] lets that call protect
//! every page that it reports; [`KvmClearLog`] has KVM leave the bits and the protection alone
//! until `KVM_CLEAR_DIRTY_LOG`, just before a run of pages is read: pages that are written again
//! in between are then sent once instead of twice.
//!
//! Source: Linux `Documentation/virt/kvm/api.rst`, sections 4.8 and 4.117, and
//! `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`.

mod adaptive;
mod bitmap;
mod clear;
mod ioctl;
mod slots;

pub use adaptive::KvmAdaptiveLog;
pub use bitmap::KvmBitmapLog;
pub use clear::KvmClearLog;
pub use slots::KvmSlot;
