//! The ways that are compared.

use vmferry::config::compression::FRAME_PAGES;
use vmferry::config::compression::{CompressionConfig, CompressionWay, WhenBusy};
use vmferry::{DestinationConfig, SourceConfig};
use vmferry_codec::{Compressors, Decompressors, Method};

/// A way to send pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// As they are.
    Raw,
    /// The published old way: the one thread that migrates compresses each page by a call of its own, for
    /// which a context is allocated and freed; so it decompresses too.
    ZlibPerCall,
    /// The published new way: a pool of threads, each with a context that it keeps.
    ZlibPipeline,
    /// The same, but pages for which no thread is free go as they are.
    ZlibRawWhenBusy,
    /// As the published new way, with LZ4.
    Lz4,
    /// With zstd at level 1.
    Zstd1,
    /// With zstd at level 3.
    Zstd3,
    /// By measurement: the default.
    Auto,
}

/// Threads of the pools on either side, as there are two processors where this was first measured.
const WORKERS: u8 = 2;

impl Way {
    /// Those of each case, in the order in which they have their turns: what is compared most closely
    /// stands together, as a machine is not always as fast.
    pub const GRID: [Self; 6] =
        [Self::Raw, Self::Auto, Self::Lz4, Self::Zstd1, Self::Zstd3, Self::ZlibPipeline];

    /// Those of the published comparison.
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

    /// In tables.
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

    /// Whether it is one thing whatever the content and the link, and a pool does it.
    pub fn is_fixed(self) -> bool {
        Self::GRID.contains(&self) && self != Self::Auto
    }

    /// Whether threads of a pool compress.
    pub fn is_pipeline(self) -> bool {
        !matches!(self, Self::Raw | Self::ZlibPerCall)
    }

    /// Sets the source up for it. Only auto has deltas: the others are what the codecs do alone.
    pub fn choose(self, config: &mut SourceConfig) {
        let default = CompressionConfig::default();
        let fixed = |method| CompressionConfig {
            way: CompressionWay::Fixed(method),
            when_busy: WhenBusy::Wait,
            workers: Some(WORKERS),
            delta_memory: 0,
            frame_pages: FRAME_PAGES,
            compressors: Compressors::default(),
        };
        let zlib = fixed(Method::zlib(1));
        config.compression = match self {
            Self::Raw => CompressionConfig { way: CompressionWay::Off, ..default },
            Self::ZlibPerCall => {
                config.channels = 1;
                let compressors = Compressors::per_call();
                CompressionConfig { workers: Some(1), frame_pages: 1, compressors, ..zlib }
            }
            Self::ZlibPipeline => zlib,
            Self::ZlibRawWhenBusy => CompressionConfig { when_busy: WhenBusy::Raw, ..zlib },
            Self::Lz4 => fixed(Method::lz4()),
            Self::Zstd1 => fixed(Method::zstd(1)),
            Self::Zstd3 => fixed(Method::zstd(3)),
            Self::Auto => default,
        };
    }

    /// Sets the destination up for it.
    pub fn choose_there(self, config: &mut DestinationConfig) {
        if self == Self::ZlibPerCall {
            config.workers = Some(1);
            config.decompressors = Decompressors::per_call;
        }
    }
}
