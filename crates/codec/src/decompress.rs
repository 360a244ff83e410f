//! Decompression of pages.
//!
//! The input comes from the peer and is not trusted. The expected length is known in advance and
//! given by the output's length, all of the input must be used, and no length in the input causes
//! an allocation. The libraries' contexts have bounded sizes: a zlib window is at most 32 KiB, LZ4
//! has none, and zstd decodes a whole frame at once into the output, which then serves as its
//! window, regardless of the window size in the frame's header.

use std::fmt;

use flate2::{FlushDecompress, Status};
use vmferry_wire::Algorithm;
use zstd_safe::DCtx;

use crate::compress::ZSTD_TOO_SMALL;

/// Contexts for all algorithms, created at first use and kept.
#[derive(Default)]
pub struct Decompressors {
    zlib: Option<flate2::Decompress>,
    zstd: Option<DCtx<'static>>,
    per_call: bool,
}

/// Input that does not decompress to the expected bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecompressError {
    /// The input is not in the algorithm's format, is truncated, or is followed by other data.
    #[error("damaged {algorithm} data: {reason}")]
    Damaged {
        /// The algorithm.
        algorithm: Algorithm,
        /// The library's error.
        reason: String,
    },
    /// The input decompresses to less than expected.
    #[error("{algorithm} data gives {found} bytes instead of {expected}")]
    TooShort {
        /// The algorithm.
        algorithm: Algorithm,
        /// The output's length in bytes.
        expected: usize,
        /// Length of the decompressed data in bytes.
        found: usize,
    },
    /// The input decompresses to more than expected. LZ4 cannot tell and returns [`Damaged`].
    ///
    /// [`Damaged`]: Self::Damaged
    #[error("{algorithm} data gives more than {expected} bytes")]
    TooLong {
        /// The algorithm.
        algorithm: Algorithm,
        /// The output's length in bytes.
        expected: usize,
    },
    /// No context could be created. The peer is not at fault.
    #[error("no decompressor for {algorithm}: out of memory")]
    Unavailable {
        /// The algorithm.
        algorithm: Algorithm,
    },
}

impl Decompressors {
    /// The published older way, for comparison: every call allocates and frees a context, or for
    /// LZ4, which has none, a buffer.
    #[must_use]
    pub fn per_call() -> Self {
        Self { per_call: true, ..Self::default() }
    }

    /// Fills `output` exactly, from all of `input`. After an error the content of `output` is
    /// unspecified.
    ///
    /// # Errors
    /// `input` is damaged, or decompresses to more or less than `output` holds.
    pub fn decompress(
        &mut self,
        algorithm: Algorithm,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), DecompressError> {
        if self.per_call {
            (self.zlib, self.zstd) = (None, None);
        }
        let expected = output.len();
        let found = match algorithm {
            Algorithm::Zlib => self.zlib(input, output)?,
            Algorithm::Zstd => self.zstd(input, output)?,
            Algorithm::Lz4 => self.lz4(input, output)?,
        };
        if found == expected {
            Ok(())
        } else {
            Err(DecompressError::TooShort { algorithm, expected, found })
        }
    }

    fn zlib(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecompressError> {
        let algorithm = Algorithm::Zlib;
        let damaged = |reason: &str| damaged(algorithm, reason);
        let library = |error: flate2::DecompressError| match error.needs_dictionary() {
            Some(_) => damaged("it wants a dictionary"),
            None => damaged(error.message().unwrap_or("no reason given")),
        };
        let context = self.zlib.get_or_insert_with(|| flate2::Decompress::new(true));
        context.reset(true);
        let status = context.decompress(input, output, FlushDecompress::Finish).map_err(library)?;
        let (used, found) = (context.total_in() as usize, context.total_out() as usize);
        if status == Status::StreamEnd {
            return if used == input.len() {
                Ok(found)
            } else {
                Err(damaged("something follows it"))
            };
        }
        if found < output.len() {
            return Err(damaged("it is cut"));
        }
        // A truncated checksum and excess content look the same until there is room for another
        // byte.
        let rest = input.get(used..).unwrap_or_default();
        let more = context.decompress(rest, &mut [0], FlushDecompress::Finish);
        if context.total_out() as usize > found {
            return Err(DecompressError::TooLong { algorithm, expected: output.len() });
        }
        more.map_err(library)?;
        Err(damaged("it is cut"))
    }

    fn zstd(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecompressError> {
        let algorithm = Algorithm::Zstd;
        let library = |code| damaged(algorithm, zstd_safe::get_error_name(code));
        // The library would also accept several frames, and skippable frames.
        if zstd_safe::find_frame_compressed_size(input).map_err(library)? != input.len() {
            return Err(damaged(algorithm, "something follows it"));
        }
        if self.zstd.is_none() {
            self.zstd = DCtx::try_create();
        }
        let context = self.zstd.as_mut().ok_or(DecompressError::Unavailable { algorithm })?;
        context.decompress(output, input).map_err(|code| match code {
            ZSTD_TOO_SMALL => DecompressError::TooLong { algorithm, expected: output.len() },
            code => library(code),
        })
    }

    fn lz4(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, DecompressError> {
        let algorithm = Algorithm::Lz4;
        let library = |error: std::io::Error| damaged(algorithm, &error.to_string());
        // The binding casts the input's length without a check.
        let (Ok(_), Ok(length)) = (i32::try_from(input.len()), i32::try_from(output.len())) else {
            return Err(damaged(algorithm, "it is longer than a block can be"));
        };
        if self.per_call {
            let made = lz4::block::decompress(input, Some(length)).map_err(library)?;
            // The result is never longer than the requested length.
            output[..made.len()].copy_from_slice(&made);
            return Ok(made.len());
        }
        lz4::block::decompress_to_buffer(input, Some(length), output).map_err(library)
    }
}

impl fmt::Debug for Decompressors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decompressors").field("per_call", &self.per_call).finish_non_exhaustive()
    }
}

fn damaged(algorithm: Algorithm, reason: &str) -> DecompressError {
    DecompressError::Damaged { algorithm, reason: reason.to_owned() }
}

#[cfg(test)]
mod tests;
