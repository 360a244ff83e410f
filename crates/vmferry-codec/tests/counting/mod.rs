//! Counts what a test program allocates.
//!
//! zstd and LZ4 are C, so what is counted is the C library's `malloc`, which Rust's allocator
//! calls too: a definition in the program takes the place of the library's own.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

static OF_ALL_THREADS: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void;
    fn __libc_memalign(alignment: usize, bytes: usize) -> *mut c_void;
}

fn count() {
    ALLOCATIONS.with(|count| count.set(count.get() + 1));
    OF_ALL_THREADS.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: the C library's own, under the name that it documents for those who replace it.
// Counting allocates nothing.
#[unsafe(no_mangle)]
unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    count();
    // SAFETY: the caller's promise is passed on.
    unsafe { __libc_malloc(bytes) }
}

// SAFETY: as `malloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn calloc(count_: usize, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: the caller's promise is passed on.
    unsafe { __libc_calloc(count_, bytes) }
}

// SAFETY: as `malloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: the caller's promise is passed on.
    unsafe { __libc_realloc(pointer, bytes) }
}

// SAFETY: as `malloc`; the alignment's rules are checked by the C library's own.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(
    into: *mut *mut c_void,
    alignment: usize,
    bytes: usize,
) -> std::ffi::c_int {
    count();
    // SAFETY: the caller's promise is passed on.
    let pointer = unsafe { __libc_memalign(alignment, bytes) };
    if pointer.is_null() {
        return 12; // ENOMEM
    }
    // SAFETY: the caller gives a place for the pointer.
    unsafe { *into = pointer };
    0
}

/// What this thread allocates for something.
pub fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

/// What all threads have allocated so far.
pub fn of_all_threads() -> u64 {
    OF_ALL_THREADS.load(Ordering::Relaxed)
}
