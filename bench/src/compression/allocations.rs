//! Counts memory allocations of everything in this process.
//!
//! Why `unsafe`: this program defines `malloc`, `calloc` and so on, which count and then call the C
//! library's functions. A `#[global_allocator]` would see only Rust's allocations, but the point is
//! the contexts of zlib and zstd, which C code allocates. Why sound: each function has the
//! signature and the meaning of the function it replaces, because every call goes to the C
//! library's own function. `free` is not replaced.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod counted {
    use std::ffi::{c_int, c_void};
    use std::sync::atomic::Ordering;

    use super::{ALLOCATIONS, COUNTING};

    unsafe extern "C" {
        fn __libc_malloc(size: usize) -> *mut c_void;
        fn __libc_calloc(count: usize, size: usize) -> *mut c_void;
        fn __libc_realloc(old: *mut c_void, size: usize) -> *mut c_void;
        fn __libc_memalign(align: usize, size: usize) -> *mut c_void;
    }

    fn count() {
        // When counting is off, this load is the only cost.
        if COUNTING.load(Ordering::Relaxed) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
    }

    // SAFETY: nothing else in the program defines these names; they are the C library's functions.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
        count();
        // SAFETY: the call is passed on unchanged.
        unsafe { __libc_malloc(size) }
    }

    // SAFETY: as above.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn calloc(number: usize, size: usize) -> *mut c_void {
        count();
        // SAFETY: the call is passed on unchanged.
        unsafe { __libc_calloc(number, size) }
    }

    // SAFETY: as above.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn realloc(old: *mut c_void, size: usize) -> *mut c_void {
        count();
        // SAFETY: the call is passed on unchanged; `old` is from the same heap.
        unsafe { __libc_realloc(old, size) }
    }

    // SAFETY: as above.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
        count();
        // SAFETY: the call is passed on unchanged.
        unsafe { __libc_memalign(align, size) }
    }

    // SAFETY: as above.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
        count();
        // SAFETY: the C library's `aligned_alloc` is this function.
        unsafe { __libc_memalign(align, size) }
    }

    // SAFETY: as above.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn posix_memalign(
        into: *mut *mut c_void,
        align: usize,
        size: usize,
    ) -> c_int {
        if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
            return libc::EINVAL;
        }
        count();
        // SAFETY: the alignment was checked above.
        let memory = unsafe { __libc_memalign(align, size) };
        if memory.is_null() {
            return libc::ENOMEM;
        }
        // SAFETY: the caller passes a valid pointer for the result.
        unsafe { *into = memory };
        0
    }
}

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Starts counting.
pub fn begin() {
    ALLOCATIONS.store(0, Ordering::Relaxed);
    COUNTING.store(true, Ordering::Relaxed);
}

/// Stops counting. Returns how often memory was allocated or reallocated since [`begin`].
pub fn end() -> u64 {
    COUNTING.store(false, Ordering::Relaxed);
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// Whether allocations can be counted. This needs glibc.
pub const SUPPORTED: bool = cfg!(all(target_os = "linux", target_env = "gnu"));

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    #[test]
    fn allocations_of_rust_and_of_c_libraries_are_counted() {
        if !super::SUPPORTED {
            return;
        }
        // Other tests of this process may allocate at the same time, so these are lower bounds.
        super::begin();
        for size in 1..=100_usize {
            drop(black_box(Vec::<u8>::with_capacity(size)));
        }
        assert!(super::end() >= 100);
        super::begin();
        for _ in 0..50 {
            black_box(zlib_context());
        }
        assert!(super::end() >= 50);
    }

    fn zlib_context() -> Option<usize> {
        let compressors = vmferry_codec::Compressors::per_call();
        let mut output = vec![0; 8192];
        compressors
            .make(vmferry_codec::Method::zlib(1))
            .ok()?
            .compress(&[1; 4096], &mut output)
            .ok()?
    }
}
