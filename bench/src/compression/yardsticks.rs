//! The limits of a migration that compresses: each codec alone in one thread.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, ensure};
use fastrand::Rng;
use serde::Serialize;
use vmferry_codec::{Compressors, Decompressors, Method};
use vmferry_memory::PAGE_SIZE;

use super::content::{CHUNK_BYTES, Content, Pool, has_content};

/// Bytes of a frame.
const BLOCK_BYTES: usize = 256 << 10;

/// A row: one codec alone on one content class.
#[derive(Clone, Debug, Serialize)]
pub struct CodecRow {
    /// The content class.
    pub content: &'static str,
    /// The codec.
    pub codec: String,
    /// Uncompressed bytes over compressed bytes.
    pub ratio: f64,
    /// Throughput in bytes of pages.
    pub compress_mb_per_s: f64,
    /// Throughput in bytes of pages.
    pub decompress_mb_per_s: f64,
}

/// The codecs of the methods that are compared, and those that auto uses in addition.
fn methods() -> [Method; 5] {
    [Method::lz4(), Method::zlib(1), Method::zstd(1), Method::zstd(3), Method::zstd(6)]
}

/// Measures each codec on `bytes` bytes of nonzero pages. The pages are random chunks of the pool,
/// as in the guest's memory.
///
/// # Errors
/// A codec failed.
pub fn codecs(content: Content, pool: &Pool, bytes: usize) -> anyhow::Result<Vec<CodecRow>> {
    let mut random = Rng::with_seed(5);
    let mut pages = Vec::with_capacity(bytes + CHUNK_BYTES);
    while pages.len() < bytes {
        pages.extend(pool.chunk(&mut random).chunks_exact(PAGE_SIZE).filter(has_content).flatten());
    }
    pages.truncate(bytes);
    methods().into_iter().map(|method| codec(content, &pages, method)).collect()
}

fn codec(content: Content, pages: &[u8], method: Method) -> anyhow::Result<CodecRow> {
    let mut compressor = Compressors::default().make(method)?;
    let mut decompressors = Decompressors::default();
    // The buffer also holds data that does not shrink.
    let mut packed = vec![0; BLOCK_BYTES + BLOCK_BYTES / 8 + 1024];
    let mut again = vec![0; BLOCK_BYTES];
    let (mut compress_s, mut decompress_s, mut packed_bytes) = (0.0, 0.0, 0);
    for (index, block) in pages.chunks(BLOCK_BYTES).enumerate() {
        let begun = Instant::now();
        let length = compressor.compress(black_box(block), &mut packed)?;
        let compressing = begun.elapsed().as_secs_f64();
        let length = length.context("the compressed block does not fit into its buffer")?;
        let unpacked = &mut again[..block.len()];
        let begun = Instant::now();
        decompressors.decompress(method.algorithm(), black_box(&packed[..length]), unpacked)?;
        let decompressing = begun.elapsed().as_secs_f64();
        ensure!(unpacked == block, "{method}: the decompressed data differs");
        packed_bytes += length;
        // The first block allocates the contexts and is not counted.
        if index > 0 || pages.len() <= BLOCK_BYTES {
            compress_s += compressing;
            decompress_s += decompressing;
        }
    }
    let measured = if pages.len() <= BLOCK_BYTES { pages.len() } else { pages.len() - BLOCK_BYTES };
    Ok(CodecRow {
        content: content.name(),
        codec: method.to_string(),
        ratio: pages.len() as f64 / packed_bytes as f64,
        compress_mb_per_s: measured as f64 / compress_s / 1e6,
        decompress_mb_per_s: measured as f64 / decompress_s / 1e6,
    })
}

/// The best ratio of any codec on a class; 1 if no codec shrinks it.
pub fn best_ratio(rows: &[CodecRow], content: Content) -> f64 {
    rows.iter().filter(|row| row.content == content.name()).map(|row| row.ratio).fold(1.0, f64::max)
}
