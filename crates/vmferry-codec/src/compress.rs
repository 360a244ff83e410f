//! Pages to fewer bytes.
//!
//! A worker has one [`Compress`] for the whole migration. Its context (the tables in which the
//! library finds repetitions, up to several MiB) is made once: allocated for each block instead,
//! it costs page faults and zeroing that rival the compression itself.
//! [`Compressors::per_call`] does just that, to be compared with.

use std::fmt;
use std::sync::Arc;

use flate2::{Compression, FlushCompress, Status};
use lz4::block::CompressionMode;
use vmferry_memory::GuestBytes;
use vmferry_wire::Algorithm;
use zstd_safe::zstd_sys::ZSTD_ErrorCode;
use zstd_safe::{CCtx, CParameter};

use crate::method::Method;

/// One worker's compressor of one method, kept for the whole migration.
pub trait Compress: Send {
    /// Compresses `input` into `output`, both in bytes, and returns how many bytes of `output`
    /// that took; `None` when it does not fit there, which is no error: such pages go raw. What
    /// `output` holds beyond the result, or after `None`, means nothing.
    ///
    /// # Errors
    /// The library, or the hardware, failed. The next call begins anew.
    fn compress(&mut self, input: &[u8], output: &mut [u8])
    -> Result<Option<usize>, CompressError>;
}

/// A compressor that could not be made, or that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompressError {
    /// No compressor of this method.
    #[error("no compressor for {method}: {reason}")]
    Unavailable {
        /// The method.
        method: Method,
        /// What the library says.
        reason: String,
    },
    /// It failed.
    #[error("compression with {method} failed: {reason}")]
    Failed {
        /// The method.
        method: Method,
        /// What the library says.
        reason: String,
    },
}

type Make = dyn Fn(Method) -> Result<Box<dyn Compress>, CompressError> + Send + Sync;

/// Makes the workers' compressors. Clones share what makes them.
///
/// The default ones are those of the libraries. A VMM may bring its own, for compression
/// hardware, as long as what they make is in the format of the method's algorithm.
#[derive(Clone)]
pub struct Compressors {
    make: Arc<Make>,
    /// For `Debug` only.
    kind: &'static str,
}

impl Compressors {
    /// Compressors that `make` makes, one for each worker.
    pub fn new(
        make: impl Fn(Method) -> Result<Box<dyn Compress>, CompressError> + Send + Sync + 'static,
    ) -> Self {
        Self { make: Arc::new(make), kind: "own" }
    }

    /// A compressor for one worker.
    ///
    /// # Errors
    /// There is none for this method, or no memory for it.
    pub fn make(&self, method: Method) -> Result<Box<dyn Compress>, CompressError> {
        (self.make)(method)
    }

    /// The published old way, for comparison: a context, or for LZ4, whose context is on the
    /// stack, a buffer, is allocated and freed in every call.
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

    /// Ends a stream that did not fit. Of zlib-rs 0.6.8 a reset at level 1 does not forget that a
    /// block was begun: the next stream would lack that block's header, and be damaged.
    fn end_stream(&mut self) {
        // What is left comes from a window of 64 KiB: 16 to 21 pieces, as measured.
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
    /// It grows to what the longest input needs; zstd shrinks it again after more than a hundred
    /// inputs that need a third of that.
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
            // Our frames have lengths and checks of their own.
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
        ] {
            let set = context.set_parameter(parameter);
            set.map_err(|code| unavailable(zstd_safe::get_error_name(code)))?;
        }
        Ok(Self { method, context })
    }
}

/// What zstd returns where the output is too small.
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
    /// The binding tells an output that is too small by an error that it allocates, and does not
    /// tell it from others; here everything fits, so that whatever fails is an error.
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
            // The binding casts lengths to `i32`; `bound` is one.
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
#[path = "compress_tests.rs"]
mod tests;
