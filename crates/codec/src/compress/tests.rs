//! Tests of `compress`.

use proptest::prelude::*;
use vmferry_memory::PAGE_SIZE;

use super::*;
use crate::decompress::Decompressors;
use crate::samples::{Noise, block, methods};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn compressed_blocks_round_trip((block, room) in (block(), 0_usize..3)) {
        for make in [Compressors::default(), Compressors::per_call()] {
            for method in methods() {
                let mut compressor = make.make(method).unwrap();
                let mut decompressors = Decompressors::default();
                // Compresses twice, because a kept context must not remember its last input. The
                // output is smaller than the input, the same size, and larger than any result.
                for _ in 0..2 {
                    let mut output = vec![0; block.len() * (room + 1) / 2 + 64];
                    let Some(length) = compressor.compress(&block, &mut output).unwrap() else {
                        prop_assert!(room < 2, "{method} needs more than {}", output.len());
                        continue;
                    };
                    let mut found = vec![0xee; block.len()];
                    let algorithm = method.algorithm();
                    decompressors.decompress(algorithm, &output[..length], &mut found).unwrap();
                    prop_assert!(found == block, "{method}");
                }
            }
        }
    }

    #[test]
    fn block_that_does_not_fit_does_not_affect_later_calls(
        (block, short) in (block(), any::<prop::sample::Index>())
    ) {
        for method in methods() {
            let mut compressor = Compressors::default().make(method).unwrap();
            let mut output = vec![0; block.len() * 2];
            let length = compressor.compress(&block, &mut output).unwrap().unwrap();
            let first = output[..length].to_vec();
            let mut less = vec![0; short.index(length)];
            let fits = compressor.compress(&block, &mut less).unwrap();
            prop_assert_eq!(fits, None, "{} in {} of {}", method, less.len(), length);
            let mut exactly = vec![0; length];
            // zstd and zlib may need a little spare room, and zlib's output depends on the room.
            if let Some(length) = compressor.compress(&block, &mut exactly).unwrap() {
                let mut found = vec![0xee; block.len()];
                let mut decompressors = Decompressors::default();
                let packed = &exactly[..length];
                decompressors.decompress(method.algorithm(), packed, &mut found).unwrap();
                prop_assert!(found == block, "{method}");
            }
            let again = compressor.compress(&block, &mut output).unwrap();
            prop_assert_eq!(again, Some(length));
            prop_assert!(output[..length] == first, "{method}");
        }
    }
}

#[test]
fn zlib_compresses_as_before_after_a_block_that_did_not_fit() {
    let mut block = vec![0; 40 * PAGE_SIZE];
    Noise::new(1).fill(&mut block);
    for level in 1..=9 {
        let mut compressor = Compressors::default().make(Method::zlib(level)).unwrap();
        let mut output = vec![0; 2 * block.len()];
        let whole = compressor.compress(&block, &mut output).unwrap().unwrap();
        let first = output[..whole].to_vec();
        for room in (0..whole).step_by(9973) {
            assert_eq!(compressor.compress(&block, &mut output[..room]), Ok(None));
            assert_eq!(compressor.compress(&block, &mut output), Ok(Some(whole)));
            assert!(output[..whole] == first, "zlib:{level} after {room} of {whole}");
        }
    }
}

#[test]
fn empty_input_is_compressed_and_empty_output_never_fits() {
    for method in methods() {
        let mut compressor = Compressors::default().make(method).unwrap();
        assert_eq!(compressor.compress(&[7; PAGE_SIZE], &mut []), Ok(None), "{method}");
        let mut output = [0; 64];
        let length = compressor.compress(&[], &mut output).unwrap().unwrap();
        let mut decompressors = Decompressors::default();
        decompressors.decompress(method.algorithm(), &output[..length], &mut []).unwrap();
    }
}

#[test]
fn zstd_frames_have_no_length_and_no_checksum() {
    let mut output = [0; PAGE_SIZE];
    let mut compressor = Compressors::default().make(Method::zstd(1)).unwrap();
    compressor.compress(&[7; PAGE_SIZE], &mut output).unwrap().unwrap();
    // RFC 8878: content size flag, single segment flag, and content checksum flag.
    assert_eq!(output[4] & 0b1110_0100, 0);
}

#[test]
fn custom_compressor_is_used() {
    struct Broken(Method);
    impl Compress for Broken {
        fn compress(&mut self, _: &[u8], _: &mut [u8]) -> Result<Option<usize>, CompressError> {
            Err(CompressError::Failed { method: self.0, reason: "it burns".into() })
        }
    }
    let own = Compressors::new(|method| match method.algorithm() {
        Algorithm::Lz4 => Ok(Box::new(Broken(method))),
        _ => Err(CompressError::Unavailable { method, reason: "not in hardware".into() }),
    });
    let none = own.clone().make(Method::zstd(3)).err().unwrap().to_string();
    assert_eq!(none, "no compressor for zstd:3: not in hardware");
    let broken = own.make(Method::lz4()).unwrap().compress(&[], &mut []).unwrap_err().to_string();
    assert_eq!(broken, "compression with lz4 failed: it burns");
    assert_eq!(format!("{own:?}"), "Compressors(\"own\")");
}
