//! The user's choice of page compression.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use vmferry_codec::{Compressors, Method, MethodError};

use super::WorkerCount;

/// Pages per frame. 256 KiB keeps a frame within a core's second-level cache on both sides, and the
/// 48-byte header is negligible next to it.
pub const FRAME_PAGES: usize = 64;

/// Pages per frame where many pages are zero: the wire limit for pages with content, since all of
/// them may turn out to have content.
pub const MOST_FRAME_PAGES: usize = vmferry_wire::MAX_FRAME_CONTENT_PAGES as usize;

/// How the source encodes pages that are not zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum CompressionWay {
    /// Choose by measurement for each frame: the encoding that moves the most pages per second.
    #[default]
    Auto,
    /// Send pages uncompressed.
    Off,
    /// Send a page that was sent before as a delta, and all other pages uncompressed.
    Delta,
    /// Always use this method, and deltas for pages that were sent before.
    Fixed(Method),
}

impl fmt::Display for CompressionWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("none"),
            Self::Delta => f.write_str("delta"),
            Self::Fixed(method) => method.fmt(f),
        }
    }
}

impl From<CompressionWay> for String {
    fn from(way: CompressionWay) -> Self {
        way.to_string()
    }
}

/// A text that is not a [`CompressionWay`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("use auto, none, delta, or a method: {0}")]
pub struct CompressionWayError(#[from] MethodError);

impl FromStr for CompressionWay {
    type Err = CompressionWayError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Auto,
            "none" => Self::Off,
            "delta" => Self::Delta,
            method => Self::Fixed(method.parse()?),
        })
    }
}

impl TryFrom<String> for CompressionWay {
    type Error = CompressionWayError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// What to do with pages for which no compressor is free while the link is idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum WhenBusy {
    /// Send them uncompressed, unless the link is so slow that waiting is quicker.
    #[default]
    Raw,
    /// Let the link wait.
    Wait,
}

/// How the source compresses.
#[derive(Clone, Debug)]
pub struct CompressionConfig {
    /// The encoding of pages that are not zero. Default auto.
    pub way: CompressionWay,
    /// Used with a fixed method only. Default raw.
    pub when_busy: WhenBusy,
    /// Threads that read and encode. By default one for each processor, at most 64.
    pub workers: Option<WorkerCount>,
    /// Upper limit in bytes for the source's copies of pages that are written repeatedly; 0
    /// disables deltas. Default 256 MiB. The memory is allocated as such pages occur.
    pub delta_memory: u64,
    /// Pages per frame, which are compressed together: 1 to [`FRAME_PAGES`], the default. Smaller
    /// values are for comparisons.
    pub frame_pages: usize,
    /// Constructs the workers' compressors. Default: those of the libraries.
    pub compressors: Compressors,
}

/// Default for `CompressionConfig::delta_memory`.
pub const DEFAULT_DELTA_MEMORY: u64 = 256 << 20;

impl Default for CompressionConfig {
    fn default() -> Self {
        Self {
            way: CompressionWay::Auto,
            when_busy: WhenBusy::Raw,
            workers: None,
            delta_memory: DEFAULT_DELTA_MEMORY,
            frame_pages: FRAME_PAGES,
            compressors: Compressors::default(),
        }
    }
}

/// The thread count for `workers`, or its default if it is not set.
#[must_use]
pub fn worker_threads(workers: Option<WorkerCount>) -> usize {
    let processors = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    workers.map_or_else(|| processors().min(MOST_WORKERS.into()), |count| count.get().into())
}

/// The most worker threads on one side.
pub const MOST_WORKERS: u8 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compression_parses_what_it_displays() {
        let ways = [
            CompressionWay::Auto,
            CompressionWay::Off,
            CompressionWay::Delta,
            CompressionWay::Fixed(Method::lz4()),
            CompressionWay::Fixed(Method::zstd(3)),
        ];
        for way in ways {
            assert_eq!(way.to_string().parse(), Ok(way));
        }
        let error = "gzip".parse::<CompressionWay>().unwrap_err().to_string();
        assert!(error.contains("auto, none, delta") && error.contains("gzip"), "{error}");
    }
}
