//! Counts the allocations of a test program.
//!
//! zstd and LZ4 are C, so the C library's `malloc` is counted, which Rust's allocator calls too. A
//! definition in the program replaces the library's own.

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

// SAFETY: this calls the C library's own function, by the name that glibc documents for
// replacements of `malloc`. Counting does not allocate.
#[unsafe(no_mangle)]
unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    count();
    // SAFETY: the caller upholds the contract of the function.
    unsafe { __libc_malloc(bytes) }
}

// SAFETY: as `malloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn calloc(count_: usize, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: the caller upholds the contract of the function.
    unsafe { __libc_calloc(count_, bytes) }
}

// SAFETY: as `malloc`.
#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: the caller upholds the contract of the function.
    unsafe { __libc_realloc(pointer, bytes) }
}

// SAFETY: as `malloc`; the C library's own function checks the alignment.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(
    into: *mut *mut c_void,
    alignment: usize,
    bytes: usize,
) -> std::ffi::c_int {
    count();
    // SAFETY: the caller upholds the contract of the function.
    let pointer = unsafe { __libc_memalign(alignment, bytes) };
    if pointer.is_null() {
        return 12; // ENOMEM
    }
    // SAFETY: the caller provides a place for the pointer.
    unsafe { *into = pointer };
    0
}

/// Number of allocations by this thread during `work`.
pub fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

/// Number of allocations by all threads so far.
pub fn of_all_threads() -> u64 {
    OF_ALL_THREADS.load(Ordering::Relaxed)
}
