//! The atomics of the software log, and its two fences. The model in `tests/switch_model.rs` compiles
//! the same code against loom's.
//!
//! `unsafe` here makes one system call that takes numbers only.

pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize};

use std::sync::atomic::{AtomicU8, Ordering, compiler_fence, fence};

/// A full fence right after an atomic read-modify-write. On x86 that is one already: no load or store
/// passes a locked instruction (Intel SDM volume 3, 9.2.3.9).
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

/// To be called before any thread uses [`light_fence`].
pub(super) fn prepare() {
    if MEMBARRIER.load(Ordering::Relaxed) == UNKNOWN {
        let usable = membarrier(REGISTER_PRIVATE_EXPEDITED) && membarrier(PRIVATE_EXPEDITED);
        MEMBARRIER.store(if usable { USABLE } else { MISSING }, Ordering::SeqCst);
    }
}

/// One half of a pair of fences: what a thread does before this, and what it does after, is seen in
/// that order by one that makes a [`heavy_fence`] in between. Costs nothing where Linux has membarrier.
#[inline]
pub(super) fn light_fence() {
    if MEMBARRIER.load(Ordering::Relaxed) == USABLE {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The other half: every running thread of this process makes a full fence before this returns.
/// `false` if the system refuses what it had allowed: then nothing is known.
#[must_use]
pub(super) fn heavy_fence() -> bool {
    fence(Ordering::SeqCst);
    MEMBARRIER.load(Ordering::Relaxed) != USABLE || membarrier(PRIVATE_EXPEDITED)
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes three numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
