//! The compression algorithms that a frame may be packed with.

use std::fmt;

/// How the packed pages of a frame are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// 1: zlib (RFC 1950).
    Zlib,
    /// 2: one Zstandard frame (RFC 8878).
    Zstd,
    /// 3: one LZ4 block, without a frame around it.
    Lz4,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Zlib, Self::Zstd, Self::Lz4];

    /// Its number on the wire; 0 means that nothing is compressed.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Zlib => 1,
            Self::Zstd => 2,
            Self::Lz4 => 3,
        }
    }

    /// The algorithm of a number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.number() == number)
    }

    /// Its usual name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::Lz4 => "lz4",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
