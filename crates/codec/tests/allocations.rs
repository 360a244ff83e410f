//! After their first use, the default compressors, the decompressors, deltas and the hot pages do
//! not allocate; a context per call does.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod counting;

use std::num::NonZeroU64;

use counting::allocations;
use vmferry_codec::{
    Compressors, Decompressors, HotPages, Method, PageVersion, apply_delta, encode_delta,
    looks_random,
};
use vmferry_memory::{GuestBytes, PAGE_SIZE, SlotId};

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

/// Blocks of 64 pages and of one page, compressible and incompressible.
fn blocks() -> Vec<Vec<u8>> {
    let numbers: Vec<u8> =
        (0..32 * PAGE_SIZE as u64).flat_map(|n| (n as u16 >> 4).to_le_bytes()).collect();
    let one = numbers[..PAGE_SIZE].to_vec();
    vec![noise(3, 64 * PAGE_SIZE), numbers, noise(5, PAGE_SIZE), one]
}

#[test]
fn counter_sees_rust_and_c_allocations() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1_u8; 100]))), 1);
    assert!(allocations(|| drop(Compressors::default().make(Method::zstd(1)))) > 1);
}

/// Number of allocations in each round of compressing and decompressing all blocks.
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
    let mut into = GuestBytes::zeroed(PAGE_SIZE).unwrap();
    let mut page = noise(1, PAGE_SIZE);
    let mut base = page.clone();
    let made = allocations(|| {
        for round in 1..100_u32 {
            // More pages than fit, to test both held and not held pages.
            for number in 0..100 {
                page[number as usize * 40] ^= 1;
                into.clear();
                let version = PageVersion {
                    slot: SlotId(0),
                    page: number,
                    round,
                    sent_hash: NonZeroU64::new(round.into()),
                    new_hash: u64::from(round) + 1,
                    content: &page,
                };
                let limit = if number % 2 == 0 { PAGE_SIZE } else { 3 };
                store.delta(version, &mut into, limit);
                into.clear();
                let never_sent = PageVersion { slot: SlotId(1), sent_hash: None, ..version };
                store.delta(never_sent, &mut into, limit);
            }
            into.clear();
            assert!(encode_delta(&base, &page, &mut into, PAGE_SIZE));
            apply_delta(&mut &into[..], &mut base).unwrap();
            assert_eq!((&page, looks_random(&page)), (&base, true));
        }
    });
    assert_eq!((made, store.held_pages()), (0, 64));
}
