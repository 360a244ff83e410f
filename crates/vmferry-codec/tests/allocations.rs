//! After their first use, the default compressors, the decompressors, deltas and the copies of
//! hot pages allocate nothing; contexts per call do.
//!
//! zstd and LZ4 are C, so what is counted is the C library's `malloc`, which Rust's allocator
//! calls too: a definition in the program takes the place of the library's own.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::cell::Cell;
use std::ffi::c_void;

use vmferry_codec::{
    Compressors, Decompressors, HotPages, Method, apply_delta, encode_delta, looks_random,
};
use vmferry_memory::{PAGE_SIZE, SlotId};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void;
    fn __libc_memalign(alignment: usize, bytes: usize) -> *mut c_void;
}

fn count() {
    ALLOCATIONS.with(|count| count.set(count.get() + 1));
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

fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

const METHODS: [Method; 7] = [
    Method::lz4(),
    Method::zstd(1),
    Method::zstd(3),
    Method::zstd(19),
    Method::zlib(1),
    Method::zlib(6),
    Method::zlib(9),
];

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..bytes).map(next).collect()
}

/// Blocks of 64 pages and of one, that compress and that do not.
fn blocks() -> Vec<Vec<u8>> {
    let numbers: Vec<u8> =
        (0..32 * PAGE_SIZE as u64).flat_map(|n| (n as u16 >> 4).to_le_bytes()).collect();
    let one = numbers[..PAGE_SIZE].to_vec();
    vec![noise(3, 64 * PAGE_SIZE), numbers, noise(5, PAGE_SIZE), one]
}

#[test]
fn the_count_sees_rust_and_c() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1_u8; 100]))), 1);
    assert!(allocations(|| drop(Compressors::default().make(Method::zstd(1)))) > 1);
}

/// What each round over all blocks allocates, compressing and decompressing.
fn rounds(
    compressors: &Compressors,
    mut decompressors: Decompressors,
    method: Method,
) -> Vec<(u64, u64)> {
    let blocks = blocks();
    let mut compressor = compressors.make(method).unwrap();
    let mut packed = vec![0; 64 * PAGE_SIZE];
    let mut output = vec![0; 64 * PAGE_SIZE];
    let mut round = || {
        let mut made = (0, 0);
        for block in &blocks {
            let mut length = None;
            let packed = &mut packed[..block.len()];
            made.0 += allocations(|| length = compressor.compress(block, packed).unwrap());
            let Some(length) = length else { continue };
            let (packed, output) = (&packed[..length], &mut output[..block.len()]);
            made.1 += allocations(|| {
                decompressors.decompress(method.algorithm(), packed, output).unwrap();
            });
            assert!(output == block);
        }
        made
    };
    (0..20).map(|_| round()).collect()
}

#[test]
fn kept_contexts_allocate_nothing_after_their_first_use() {
    for method in METHODS {
        let made = rounds(&Compressors::default(), Decompressors::default(), method);
        assert_eq!(made[1..], [(0, 0); 19], "{method}");
    }
}

#[test]
fn contexts_per_call_allocate_in_every_call() {
    for method in METHODS {
        let made = rounds(&Compressors::per_call(), Decompressors::per_call(), method);
        assert!(made.iter().all(|made| made.0 >= 4 && made.1 >= 2), "{method}: {made:?}");
    }
}

#[test]
fn deltas_and_hot_pages_allocate_nothing() {
    let store = HotPages::new(64 * PAGE_SIZE as u64);
    let mut into = Vec::with_capacity(PAGE_SIZE);
    let mut page = noise(1, PAGE_SIZE);
    let mut base = page.clone();
    let made = allocations(|| {
        for round in 1..100_u32 {
            // More than fit, as both are taken: pages that are held and pages that are not.
            for number in 0..100 {
                page[number as usize * 40] ^= 1;
                into.clear();
                let (sent, new) = (u64::from(round), u64::from(round) + 1);
                let limit = if number % 2 == 0 { PAGE_SIZE } else { 3 };
                store.delta(SlotId(0), number, round, sent, new, &page, &mut into, limit);
                store.keep(SlotId(1), number, round, new, &page);
            }
            into.clear();
            assert!(encode_delta(&base, &page, &mut into, PAGE_SIZE));
            apply_delta(&mut &into[..], &mut base).unwrap();
            assert_eq!((&page, looks_random(&page)), (&base, true));
        }
    });
    assert_eq!((made, store.held_pages()), (0, 64));
}
