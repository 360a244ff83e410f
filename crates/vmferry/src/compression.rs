//! How pages are to be compressed: the user's choice.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use vmferry_codec::{Compressors, Method, MethodError};

/// What the source does with pages that are not zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum CompressionWay {
    /// By measurement, frame by frame: whatever moves the most pages per second.
    #[default]
    Auto,
    /// As they are.
    Off,
    /// Pages that were sent before as what has changed in them, all others as they are.
    Delta,
    /// Always this method, and deltas of pages that were sent before.
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

/// A text that names no [`CompressionWay`].
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

/// What becomes of pages for which no compressor is free while the link waits for something to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenBusy {
    /// They go as they are, unless the link is so slow that waiting is quicker.
    #[default]
    Raw,
    /// The link waits.
    Wait,
}

/// How the source compresses.
#[derive(Clone, Debug)]
pub struct CompressionConfig {
    /// What it does with pages that are not zero. Default auto.
    pub way: CompressionWay,
    /// For a fixed method. Default raw.
    pub when_busy: WhenBusy,
    /// Threads that read and encode; by default one for each processor, at most 16.
    pub workers: Option<u8>,
    /// Most memory for the source's copies of pages that are written again and again, in bytes; 0: no
    /// deltas. Default 256 MiB. It is taken as such pages come.
    pub delta_memory: u64,
    /// Pages in one frame, which are compressed together: 1 to [`FRAME_PAGES`](crate::config::FRAME_PAGES),
    /// the default. Fewer is for comparisons.
    pub frame_pages: usize,
    /// What makes the workers' compressors. Default the libraries'.
    pub compressors: Compressors,
}

/// Memory for copies of pages that are written again and again, unless told otherwise.
pub const DEFAULT_DELTA_MEMORY: u64 = 256 << 20;

impl Default for CompressionConfig {
    fn default() -> Self {
        Self {
            way: CompressionWay::Auto,
            when_busy: WhenBusy::Raw,
            workers: None,
            delta_memory: DEFAULT_DELTA_MEMORY,
            frame_pages: crate::config::FRAME_PAGES,
            compressors: Compressors::default(),
        }
    }
}

/// Threads for `workers`, as far as it was said.
pub(crate) fn worker_threads(workers: Option<u8>) -> usize {
    let processors = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    workers.map_or_else(|| processors().min(MOST_WORKERS.into()), usize::from)
}

/// Most worker threads on a side.
pub const MOST_WORKERS: u8 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_is_read_as_it_is_written() {
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
