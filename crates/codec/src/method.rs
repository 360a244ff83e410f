//! A compression algorithm and its level.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use vmferry_wire::Algorithm;

/// A compression algorithm and its level, written `lz4`, `zstd:3` or `zlib:1`. `zstd` and `zlib`
/// without a level mean level 1, because a migration that compresses is usually limited by
/// processor time.
///
/// The level is always one that the algorithm has. The destination needs only the algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Method {
    algorithm: Algorithm,
    level: i32,
}

impl Method {
    /// LZ4 with acceleration 1, which is level 1, its only one here.
    #[must_use]
    pub const fn lz4() -> Self {
        Self { algorithm: Algorithm::Lz4, level: 1 }
    }

    /// Zstandard. A level outside 1..=19 is clamped: levels above 19 need windows that blocks of
    /// pages do not fill.
    #[must_use]
    pub const fn zstd(level: i32) -> Self {
        Self::clamped(Algorithm::Zstd, level)
    }

    /// Zlib. A level outside 1..=9 is clamped: level 0 only copies.
    #[must_use]
    pub const fn zlib(level: i32) -> Self {
        Self::clamped(Algorithm::Zlib, level)
    }

    /// The algorithm.
    #[must_use]
    pub const fn algorithm(self) -> Algorithm {
        self.algorithm
    }

    /// The level, which the algorithm supports; 1 for LZ4.
    #[must_use]
    pub const fn level(self) -> i32 {
        self.level
    }

    const fn clamped(algorithm: Algorithm, level: i32) -> Self {
        let levels = levels(algorithm);
        let level = if level < *levels.start() {
            *levels.start()
        } else if level > *levels.end() {
            *levels.end()
        } else {
            level
        };
        Self { algorithm, level }
    }
}

const fn levels(algorithm: Algorithm) -> RangeInclusive<i32> {
    match algorithm {
        Algorithm::Zlib => 1..=9,
        Algorithm::Zstd => 1..=19,
        Algorithm::Lz4 => 1..=1,
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.algorithm {
            Algorithm::Lz4 => write!(f, "{}", self.algorithm),
            Algorithm::Zlib | Algorithm::Zstd => write!(f, "{}:{}", self.algorithm, self.level),
        }
    }
}

/// A text that is not a [`Method`], with the valid choices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MethodError {
    /// There is no such algorithm.
    #[error(
        "there is no compression {name:?}; use lz4, zstd or zlib, the latter two with a level \
         after a colon if wanted (zstd:1 to zstd:19, zlib:1 to zlib:9)"
    )]
    UnknownAlgorithm {
        /// The given name.
        name: String,
    },
    /// A level that the algorithm does not support.
    #[error("{algorithm} has no level {level:?}; use {first} to {last}")]
    BadLevel {
        /// The algorithm.
        algorithm: Algorithm,
        /// The given level.
        level: String,
        /// The lowest level.
        first: i32,
        /// The highest level.
        last: i32,
    },
    /// A level for an algorithm without levels.
    #[error("{algorithm} takes no level, but {level:?} was given; use {algorithm} alone")]
    NoLevels {
        /// The algorithm.
        algorithm: Algorithm,
        /// The given level.
        level: String,
    },
}

impl FromStr for Method {
    type Err = MethodError;

    fn from_str(text: &str) -> Result<Self, MethodError> {
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (text, None),
        };
        let algorithm = Algorithm::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| MethodError::UnknownAlgorithm { name: name.to_owned() })?;
        let levels = levels(algorithm);
        let Some(level) = level else {
            return Ok(Self { algorithm, level: *levels.start() });
        };
        if algorithm == Algorithm::Lz4 {
            return Err(MethodError::NoLevels { algorithm, level: level.to_owned() });
        }
        match level.parse() {
            Ok(number) if levels.contains(&number) => Ok(Self { algorithm, level: number }),
            _ => Err(MethodError::BadLevel {
                algorithm,
                level: level.to_owned(),
                first: *levels.start(),
                last: *levels.end(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn method_names_round_trip() {
        let zstd = (1..=19).map(Method::zstd);
        let zlib = (1..=9).map(Method::zlib);
        for method in zstd.chain(zlib).chain([Method::lz4()]) {
            assert_eq!(method.to_string().parse(), Ok(method));
        }
        assert_eq!("zstd".parse(), Ok(Method::zstd(1)));
        assert_eq!("zlib".parse(), Ok(Method::zlib(1)));
        assert_eq!(Method::lz4().to_string(), "lz4");
        assert_eq!(Method::zstd(3).to_string(), "zstd:3");
    }

    #[test]
    fn level_out_of_range_becomes_the_nearest() {
        assert_eq!((Method::zstd(i32::MIN).level(), Method::zstd(i32::MAX).level()), (1, 19));
        assert_eq!((Method::zlib(0).level(), Method::zlib(10).level()), (1, 9));
    }

    #[test]
    fn method_error_lists_the_choices() {
        for (text, allowed) in [
            ("zstd:0", "1 to 19"),
            ("zstd:20", "1 to 19"),
            ("zstd:", "1 to 19"),
            ("zlib:10", "1 to 9"),
            ("zlib:fast", "1 to 9"),
            ("lz4:1", "no level"),
            ("gzip", "zstd:1 to zstd:19"),
            ("", "lz4"),
            ("ZSTD", "zstd"),
        ] {
            let error = text.parse::<Method>().unwrap_err().to_string();
            assert!(error.contains(allowed), "{text:?}: {error}");
        }
    }
}
