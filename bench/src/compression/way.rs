//! The compression methods that are compared.

use vmferry::config::compression::FRAME_PAGES;
use vmferry::config::compression::{CompressionConfig, CompressionWay, WhenBusy};
use vmferry::config::{ChannelCount, ConfigError, WorkerCount};
use vmferry::{DestinationConfig, SourceConfig};
use vmferry_codec::{Compressors, Decompressors, Method};

/// A compression method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// No compression.
    Raw,
    /// The published old method: one migration thread compresses each page with a context that it
    /// allocates and frees. Decompression works the same way.
    ZlibPerCall,
    /// The published new method: a pool of threads, each with a context that it keeps.
    ZlibPipeline,
    /// The same, but pages for which no thread is free are sent uncompressed.
    ZlibRawWhenBusy,
    /// The pool with LZ4.
    Lz4,
    /// The pool with zstd level 1.
    Zstd1,
    /// The pool with zstd level 3.
    Zstd3,
    /// vmferry's default: the method adapts to measurements.
    Auto,
}

/// Threads of the pool on each side. The first measurements were made with two processors.
const WORKERS: u8 = 2;

impl Way {
    /// The methods of every case, in order. The speed of a machine drifts, so the methods that are
    /// compared most closely are neighbors.
    pub const GRID: [Self; 6] =
        [Self::Raw, Self::Auto, Self::Lz4, Self::Zstd1, Self::Zstd3, Self::ZlibPipeline];

    /// The methods of the published comparison.
    pub const PUBLISHED: [Self; 8] = [
        Self::Raw,
        Self::Auto,
        Self::Lz4,
        Self::Zstd1,
        Self::Zstd3,
        Self::ZlibRawWhenBusy,
        Self::ZlibPipeline,
        Self::ZlibPerCall,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::ZlibPerCall => "zlib per call",
            Self::ZlibPipeline => "zlib pipeline",
            Self::ZlibRawWhenBusy => "zlib pipeline, raw when busy",
            Self::Lz4 => "lz4",
            Self::Zstd1 => "zstd:1",
            Self::Zstd3 => "zstd:3",
            Self::Auto => "auto",
        }
    }

    /// Whether the method is the same for all contents and links, and uses the pool.
    pub fn is_fixed(self) -> bool {
        Self::GRID.contains(&self) && self != Self::Auto
    }

    /// Whether a pool of threads compresses.
    pub fn is_pipeline(self) -> bool {
        !matches!(self, Self::Raw | Self::ZlibPerCall)
    }

    /// Configures the source for this method. Only auto uses deltas; the others show the codecs
    /// alone.
    pub fn configure_source(self, config: &mut SourceConfig) -> Result<(), ConfigError> {
        let default = CompressionConfig::default();
        let workers = Some(WorkerCount::new(if self == Self::ZlibPerCall { 1 } else { WORKERS })?);
        let fixed = |method| CompressionConfig {
            way: CompressionWay::Fixed(method),
            when_busy: WhenBusy::Wait,
            workers,
            delta_memory: 0,
            frame_pages: FRAME_PAGES,
            compressors: Compressors::default(),
        };
        let zlib = fixed(Method::zlib(1));
        config.compression = match self {
            Self::Raw => CompressionConfig { way: CompressionWay::Off, ..default },
            Self::ZlibPerCall => {
                config.channels = ChannelCount::new(1)?;
                let compressors = Compressors::per_call();
                CompressionConfig { frame_pages: 1, compressors, ..zlib }
            }
            Self::ZlibPipeline => zlib,
            Self::ZlibRawWhenBusy => CompressionConfig { when_busy: WhenBusy::Raw, ..zlib },
            Self::Lz4 => fixed(Method::lz4()),
            Self::Zstd1 => fixed(Method::zstd(1)),
            Self::Zstd3 => fixed(Method::zstd(3)),
            Self::Auto => default,
        };
        Ok(())
    }

    /// Configures the destination for this method.
    pub fn configure_destination(self, config: &mut DestinationConfig) -> Result<(), ConfigError> {
        if self == Self::ZlibPerCall {
            config.workers = Some(WorkerCount::new(1)?);
            config.decompressors = Decompressors::per_call;
        }
        Ok(())
    }
}
