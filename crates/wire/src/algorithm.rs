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

/// Which algorithms a side can decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlgorithmSet(u32);

impl AlgorithmSet {
    /// What every release of version 1 can decode, and what a destination can that says nothing of it.
    pub const VERSION_1: Self = Self(1 << 1 | 1 << 2 | 1 << 3);
    /// What this release can decode.
    pub const ALL: Self = Self::VERSION_1;

    /// Whether it has `algorithm`.
    #[must_use]
    pub fn contains(self, algorithm: Algorithm) -> bool {
        self.0 & (1 << algorithm.number()) != 0
    }

    /// These of them alone.
    #[must_use]
    pub fn only(self, algorithms: &[Algorithm]) -> Self {
        Self(self.0 & algorithms.iter().fold(0, |bits, one| bits | 1 << one.number()))
    }

    /// The bit of an algorithm is that of its number. Bits of algorithms that this release does not know are kept.
    #[must_use]
    pub(crate) fn bits(self) -> u32 {
        self.0
    }

    pub(crate) fn from_bits(bits: u32) -> Self {
        Self(bits)
    }
}

impl fmt::Display for AlgorithmSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Algorithm::ALL.into_iter().filter(|one| self.contains(*one));
        let names: Vec<_> = known.map(Algorithm::name).collect();
        f.write_str(&if names.is_empty() { "none".to_owned() } else { names.join(", ") })
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_names_what_it_has() {
        assert!(Algorithm::ALL.into_iter().all(|one| AlgorithmSet::ALL.contains(one)));
        let set = AlgorithmSet::ALL.only(&[Algorithm::Lz4, Algorithm::Zlib]);
        assert_eq!(set.to_string(), "zlib, lz4");
        assert!(!set.contains(Algorithm::Zstd));
        assert_eq!(set.only(&[Algorithm::Zstd]).to_string(), "none");
        let newer = AlgorithmSet::from_bits(1 << 3 | 1 << 31);
        assert_eq!((newer.to_string().as_str(), newer.bits()), ("lz4", 1 << 3 | 1 << 31));
    }
}
