//! The atomics of the software log, and its two fences. The model in `tests/switch_model.rs`
//! compiles the same code against loom's atomics.
//!
//! `unsafe` here makes one system call that takes numbers only.

pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, fence};

use std::sync::atomic::{AtomicU8, Ordering, compiler_fence};

/// A full fence right after an atomic read-modify-write. On x86 the locked instruction already is
/// one: no load or store passes it (Intel SDM volume 3, 9.2.3.9).
#[inline]
pub(super) fn fence_after_rmw() {
    if cfg!(target_arch = "x86_64") {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// Whether [`heavy_fence`] fences for the other threads too.
static MEMBARRIER: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const USABLE: u8 = 1;
const MISSING: u8 = 2;

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED`, membarrier(2).
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
/// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED`.
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

/// Whether [`heavy_fence`] is the only fence needed. If so, the other threads need only a compiler
/// fence. If not, every thread whose order matters makes a full fence itself.
pub(super) fn fences_for_all() -> bool {
    if MEMBARRIER.load(Ordering::Relaxed) == UNKNOWN {
        let usable = membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED);
        MEMBARRIER.store(if usable { USABLE } else { MISSING }, Ordering::SeqCst);
    }
    MEMBARRIER.load(Ordering::Relaxed) == USABLE
}

/// If [`fences_for_all`], every running thread of this process makes a full fence before this
/// returns; otherwise only this thread does. Returns `false` if the system refuses what it allowed
/// before; the order is then unknown.
#[must_use]
pub(super) fn heavy_fence() -> bool {
    fence(Ordering::SeqCst);
    MEMBARRIER.load(Ordering::Relaxed) != USABLE || membarrier(PRIVATE_EXPEDITED)
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes three numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
