//! Compression of pages.
//!
//! Each worker keeps one [`Compress`] for the whole migration. Its context (the tables in which the
//! library finds repetitions, up to several MiB) is allocated once. Allocating it for each block
//! would cost page faults and zeroing that take about as long as the compression itself.
//! [`Compressors::per_call`] does exactly that, for comparison.

use std::fmt;
use std::sync::Arc;

use flate2::{Compression, FlushCompress, Status};
use lz4::block::CompressionMode;
use vmferry_memory::GuestBytes;
use vmferry_wire::Algorithm;
use zstd_safe::zstd_sys::ZSTD_ErrorCode;
use zstd_safe::{CCtx, CParameter};

use crate::method::Method;

/// One worker's compressor for one method, kept for the whole migration.
pub trait Compress: Send {
    /// Compresses `input` into `output` and returns the length of the result in bytes, or `None` if
    /// it does not fit. `None` is not an error: such pages are sent raw. The bytes of `output`
    /// after the result, or all of them after `None`, are unspecified.
    ///
    /// # Errors
    /// The library or the hardware failed. The next call starts from a clean state.
    fn compress(&mut self, input: &[u8], output: &mut [u8])
    -> Result<Option<usize>, CompressError>;
}

/// A compressor could not be created, or it failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompressError {
    /// There is no compressor for this method.
    #[error("no compressor for {method}: {reason}")]
    Unavailable {
        /// The method.
        method: Method,
        /// The library's error.
        reason: String,
    },
    /// Compression failed.
    #[error("compression with {method} failed: {reason}")]
    Failed {
        /// The method.
        method: Method,
        /// The library's error.
        reason: String,
    },
}

type Make = dyn Fn(Method) -> Result<Box<dyn Compress>, CompressError> + Send + Sync;

/// Creates the workers' compressors. Clones share the factory.
///
/// The default compressors use the libraries. A VMM may provide its own, for compression hardware,
/// if their output is in the format of the method's algorithm.
#[derive(Clone)]
pub struct Compressors {
    make: Arc<Make>,
    /// For `Debug` only.
    kind: &'static str,
}

impl Compressors {
    /// Uses `make` to create one compressor for each worker.
    pub fn new(
        make: impl Fn(Method) -> Result<Box<dyn Compress>, CompressError> + Send + Sync + 'static,
    ) -> Self {
        Self { make: Arc::new(make), kind: "own" }
    }

    /// Creates a compressor for one worker.
    ///
    /// # Errors
    /// There is no compressor for this method, or not enough memory for it.
    pub fn make(&self, method: Method) -> Result<Box<dyn Compress>, CompressError> {
        (self.make)(method)
    }

    /// The published older way, for comparison: every call allocates and frees a context. For LZ4,
    /// whose context is on the stack, it allocates and frees a buffer.
    #[must_use]
    pub fn per_call() -> Self {
        Self { make: Arc::new(|method| Ok(Box::new(PerCall(method)))), kind: "per call" }
    }
}

impl Default for Compressors {
    fn default() -> Self {
        Self { make: Arc::new(kept), kind: "kept" }
    }
}

impl fmt::Debug for Compressors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Compressors").field(&self.kind).finish()
    }
}

fn kept(method: Method) -> Result<Box<dyn Compress>, CompressError> {
    Ok(match method.algorithm() {
        Algorithm::Zlib => Box::new(Zlib::new(method)),
        Algorithm::Zstd => Box::new(Zstd::new(method)?),
        Algorithm::Lz4 => Box::new(Lz4 { method, scratch: GuestBytes::new() }),
    })
}

struct PerCall(Method);

impl Compress for PerCall {
    fn compress(
        &mut self,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<Option<usize>, CompressError> {
        kept(self.0)?.compress(input, output)
    }
}

struct Zlib {
    method: Method,
    context: flate2::Compress,
}

impl Zlib {
    fn new(method: Method) -> Self {
        let level = Compression::new(method.level().unsigned_abs());
        Self { method, context: flate2::Compress::new(level, true) }
    }

    /// Ends a stream whose output did not fit. In zlib-rs 0.6.8, a reset at level 1 does not forget
    /// an open block: the next stream would lack that block's header and be damaged.
    fn end_stream(&mut self) {
        // The remaining output comes from a window of 64 KiB: 16 to 21 pieces in measurements.
        let mut piece = [0; 4096];
        for _ in 0..64 {
            match self.context.compress(&[], &mut piece, FlushCompress::Finish) {
                Ok(Status::StreamEnd) => return,
                Ok(Status::Ok | Status::BufError) => {}
                Err(_) => break,
            }
        }
        *self = Self::new(self.method);
    }
}

impl Compress for Zlib {
    fn compress(
        &mut self,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<Option<usize>, CompressError> {
        self.context.reset();
        match self.context.compress(input, output, FlushCompress::Finish) {
            Ok(Status::StreamEnd) => Ok(Some(self.context.total_out() as usize)),
            Ok(Status::Ok | Status::BufError) => {
                self.end_stream();
                Ok(None)
            }
            Err(error) => {
                self.end_stream();
                let reason = error.message().unwrap_or("no reason given").to_owned();
                Err(CompressError::Failed { method: self.method, reason })
            }
        }
    }
}

struct Zstd {
    method: Method,
    /// It grows to the size that the longest input needs. zstd shrinks it after more than a hundred
    /// inputs that need less than a third of it.
    context: CCtx<'static>,
}

impl Zstd {
    fn new(method: Method) -> Result<Self, CompressError> {
        let unavailable = |reason: &str| {
            let reason = reason.to_owned();
            CompressError::Unavailable { method, reason }
        };
        let mut context = CCtx::try_create().ok_or_else(|| unavailable("out of memory"))?;
        for parameter in [
            CParameter::CompressionLevel(method.level()),
            // Frames have their own lengths and checksums.
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
        ] {
            let set = context.set_parameter(parameter);
            set.map_err(|code| unavailable(zstd_safe::get_error_name(code)))?;
        }
        Ok(Self { method, context })
    }
}

/// The code that zstd returns if the output is too small.
pub(crate) const ZSTD_TOO_SMALL: usize =
    (ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall as usize).wrapping_neg();

impl Compress for Zstd {
    fn compress(
        &mut self,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<Option<usize>, CompressError> {
        match self.context.compress2(output, input) {
            Ok(length) => Ok(Some(length)),
            Err(ZSTD_TOO_SMALL) => Ok(None),
            Err(code) => {
                let reason = zstd_safe::get_error_name(code).to_owned();
                Err(CompressError::Failed { method: self.method, reason })
            }
        }
    }
}

struct Lz4 {
    method: Method,
    /// The binding reports too small an output with an error that it allocates and that does not
    /// differ from other errors. Everything fits here, so any error is a real failure.
    scratch: GuestBytes,
}

impl Lz4 {
    fn failed(&self, error: &std::io::Error) -> CompressError {
        CompressError::Failed { method: self.method, reason: error.to_string() }
    }
}

impl Compress for Lz4 {
    fn compress(
        &mut self,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<Option<usize>, CompressError> {
        let bound = lz4::block::compress_bound(input.len()).map_err(|error| self.failed(&error))?;
        let mode = Some(CompressionMode::FAST(self.method.level()));
        if output.len() >= bound {
            // The binding casts lengths to `i32`; `bound` fits.
            let made = lz4::block::compress_to_buffer(input, mode, false, &mut output[..bound]);
            return made.map(Some).map_err(|error| self.failed(&error));
        }
        if self.scratch.len() < bound {
            self.scratch.extend_to(bound);
        }
        let made = lz4::block::compress_to_buffer(input, mode, false, &mut self.scratch);
        let length = made.map_err(|error| self.failed(&error))?;
        let Some(output) = output.get_mut(..length) else { return Ok(None) };
        output.copy_from_slice(&self.scratch[..length]);
        Ok(Some(length))
    }
}

#[cfg(test)]
mod tests;
