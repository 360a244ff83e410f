//! Compression algorithms for frames.

use std::fmt;

/// How the packed pages of a frame are compressed.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, strum::FromRepr, strum::IntoStaticStr,
)]
#[repr(u8)]
#[strum(serialize_all = "lowercase")]
pub enum Algorithm {
    /// 1: zlib (RFC 1950).
    Zlib = 1,
    /// 2: one Zstandard frame (RFC 8878).
    Zstd = 2,
    /// 3: one LZ4 block, without the LZ4 frame format.
    Lz4 = 3,
}

impl Algorithm {
    /// All algorithms that this release knows.
    pub const ALL: [Self; 3] = [Self::Zlib, Self::Zstd, Self::Lz4];

    /// The algorithm's number on the wire; 0 there means uncompressed.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The algorithm with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::from_repr(number)
    }

    /// The algorithm's usual name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The algorithms that a side can decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlgorithmSet(u32);

impl AlgorithmSet {
    /// The algorithms of protocol version 1. A destination that does not announce a set has this
    /// one.
    pub const VERSION_1: Self = Self(1 << 1 | 1 << 2 | 1 << 3);
    /// The algorithms that this release can decode.
    pub const ALL: Self = Self::VERSION_1;

    /// Whether the set contains `algorithm`.
    #[must_use]
    pub fn contains(self, algorithm: Algorithm) -> bool {
        self.0 & (1 << algorithm.number()) != 0
    }

    /// The members of this set that are also in `algorithms`.
    #[must_use]
    pub fn only(self, algorithms: &[Algorithm]) -> Self {
        Self(self.0 & algorithms.iter().fold(0, |bits, algorithm| bits | 1 << algorithm.number()))
    }

    /// Each algorithm's bit is at its number. Unknown bits are kept.
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
        let known = Algorithm::ALL.into_iter().filter(|algorithm| self.contains(*algorithm));
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
    fn algorithm_set_prints_its_members() {
        assert!(Algorithm::ALL.into_iter().all(|algorithm| AlgorithmSet::ALL.contains(algorithm)));
        let set = AlgorithmSet::ALL.only(&[Algorithm::Lz4, Algorithm::Zlib]);
        assert_eq!(set.to_string(), "zlib, lz4");
        assert!(!set.contains(Algorithm::Zstd));
        assert_eq!(set.only(&[Algorithm::Zstd]).to_string(), "none");
        let newer = AlgorithmSet::from_bits(1 << 3 | 1 << 31);
        assert_eq!((newer.to_string().as_str(), newer.bits()), ("lz4", 1 << 3 | 1 << 31));
    }
}
