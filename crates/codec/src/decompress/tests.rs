//! Tests of `decompress`.

use proptest::prelude::*;
use vmferry_memory::PAGE_SIZE;

use super::*;
use crate::compress::Compressors;
use crate::method::Method;
use crate::samples::{block, methods, text};

fn packed(method: Method, block: &[u8]) -> Vec<u8> {
    let mut output = vec![0; block.len() * 2 + 64];
    let mut compressor = Compressors::default().make(method).unwrap();
    let length = compressor.compress(block, &mut output).unwrap().unwrap();
    output.truncate(length);
    output
}

fn both() -> [Decompressors; 2] {
    [Decompressors::default(), Decompressors::per_call()]
}

#[test]
fn cut_input_is_an_error_at_every_length() {
    let block = text(2 * PAGE_SIZE);
    for method in [Method::lz4(), Method::zstd(1), Method::zstd(19), Method::zlib(6)] {
        let packed = packed(method, &block);
        let algorithm = method.algorithm();
        let mut output = vec![0; block.len()];
        for mut decompressors in both() {
            for length in 0..packed.len() {
                let cut = decompressors.decompress(algorithm, &packed[..length], &mut output);
                assert!(cut.is_err(), "{method} cut to {length} of {}", packed.len());
                assert!(!matches!(cut, Err(DecompressError::TooLong { .. })), "{method} {cut:?}");
            }
            decompressors.decompress(algorithm, &packed, &mut output).unwrap();
            assert_eq!(output, block);
        }
    }
}

#[test]
fn output_of_another_length_is_an_error() {
    use DecompressError::{Damaged, TooLong, TooShort};
    let block = text(3 * PAGE_SIZE);
    for method in methods() {
        let (algorithm, packed) = (method.algorithm(), packed(method, &block));
        for mut decompressors in both() {
            for expected in [0, 1, PAGE_SIZE, block.len() - 1] {
                let mut output = vec![0; expected];
                let error = decompressors.decompress(algorithm, &packed, &mut output).unwrap_err();
                let right = match error {
                    Damaged { .. } => algorithm == Algorithm::Lz4,
                    _ => error == TooLong { algorithm, expected },
                };
                assert!(right, "{method} into {expected}: {error}");
            }
            for expected in [block.len() + 1, block.len() * 2] {
                let mut output = vec![0; expected];
                let error = decompressors.decompress(algorithm, &packed, &mut output).unwrap_err();
                assert_eq!(error, TooShort { algorithm, expected, found: block.len() }, "{method}");
            }
        }
    }
}

#[test]
fn trailing_bytes_are_an_error() {
    let block = text(PAGE_SIZE);
    for method in methods() {
        let one = packed(method, &block);
        let twice = [&one[..], &one[..]].concat();
        let padded = [&one[..], &[0]].concat();
        // A skippable frame of length 0 (RFC 8878).
        let skipped = [&one[..], &[0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0]].concat();
        for mut decompressors in both() {
            for (bytes, pages) in [(&twice, 1), (&twice, 2), (&padded, 1), (&skipped, 1)] {
                let mut output = vec![0; pages * PAGE_SIZE];
                let found = decompressors.decompress(method.algorithm(), bytes, &mut output);
                assert!(found.is_err(), "{method}, {pages} pages of {} bytes", bytes.len());
            }
        }
    }
}

#[test]
fn zlib_dictionary_is_refused() {
    // CMF, FLG with FDICT, DICTID (RFC 1950).
    let bytes = [0x78, 0x20, 1, 2, 3, 4, 3, 0];
    let mut output = [0; PAGE_SIZE];
    let error = Decompressors::default().decompress(Algorithm::Zlib, &bytes, &mut output);
    assert!(error.unwrap_err().to_string().contains("dictionary"));
}

#[test]
fn zstd_window_of_terabytes_allocates_nothing() {
    // No single-segment flag, a window of 2^41 bytes, one raw block of 1 byte (RFC 8878).
    let bytes = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 31 << 3, 0b1001, 0, 0, 7];
    let found = Decompressors::default().decompress(Algorithm::Zstd, &bytes, &mut [0]);
    assert!(matches!(found, Err(DecompressError::Damaged { .. })), "{found:?}");
    // The library accepts a window of 1 GiB, but it decodes into the output.
    let bytes = [&bytes[..5], &[20 << 3], &bytes[6..]].concat();
    let mut output = [0];
    let mut decompressors = Decompressors::default();
    decompressors.decompress(Algorithm::Zstd, &bytes, &mut output).unwrap();
    assert_eq!(output, [7]);
    // About 95 KiB of state and 64 KiB of literals.
    let context = decompressors.zstd.map(|context| context.sizeof());
    assert!(context.is_some_and(|bytes| bytes < 256 << 10), "{context:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn damaged_byte_never_panics_or_affects_later_calls(
        (block, flips) in (
            block(),
            prop::collection::vec((any::<prop::sample::Index>(), 0..8), 1..4),
        )
    ) {
        for method in [Method::lz4(), Method::zstd(1), Method::zlib(1)] {
            let packed = packed(method, &block);
            let algorithm = method.algorithm();
            for mut decompressors in both() {
                let mut bad = packed.clone();
                for (at, bit) in &flips {
                    let at = at.index(bad.len());
                    bad[at] ^= 1_u8 << *bit;
                }
                let mut output = vec![0; block.len()];
                let damaged = decompressors.decompress(algorithm, &bad, &mut output);
                // Only zlib has a checksum of the content.
                if algorithm == Algorithm::Zlib && bad != packed && damaged.is_ok() {
                    prop_assert_eq!(&output, &block);
                }
                decompressors.decompress(algorithm, &packed, &mut output).unwrap();
                prop_assert_eq!(&output, &block, "{}", method);
            }
        }
    }

    #[test]
    fn any_bytes_decode_or_fail_without_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..3000),
        pages in 0_usize..3,
    ) {
        let mut decompressors = Decompressors::default();
        let mut output = vec![0; pages * PAGE_SIZE];
        for algorithm in Algorithm::ALL {
            let _ = decompressors.decompress(algorithm, &bytes, &mut output);
        }
    }
}
