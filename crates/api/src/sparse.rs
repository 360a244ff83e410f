//! Reading values from a record that an older release may have written.

use crate::release::Release;
use crate::stats::{FetchStats, RecordedFetch};

/// A value in a record. Any member of recorded statistics may be missing, because older releases
/// recorded fewer of them.
pub trait Recorded {
    /// The type of the recorded value, which may be missing.
    type Sparse;

    /// Converts a present value.
    fn sparse(self) -> Self::Sparse;
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Recorded for $number {
            type Sparse = Option<f64>;

            fn sparse(self) -> Option<f64> {
                Some(self as f64)
            }
        }
    )*};
}

numbers!(f64, u8, u16, u32, u64);

/// A missing flag reads as `false`.
impl Recorded for bool {
    type Sparse = Self;

    fn sparse(self) -> Self {
        self
    }
}

impl Recorded for String {
    type Sparse = Option<Self>;

    fn sparse(self) -> Option<Self> {
        Some(self)
    }
}

impl Recorded for Release {
    type Sparse = Self;

    fn sparse(self) -> Self {
        self
    }
}

impl<T: Recorded> Recorded for Vec<T> {
    type Sparse = Vec<T::Sparse>;

    fn sparse(self) -> Vec<T::Sparse> {
        self.into_iter().map(T::sparse).collect()
    }
}

impl Recorded for Option<bool> {
    type Sparse = Self;

    fn sparse(self) -> Self {
        self
    }
}

impl Recorded for Option<FetchStats> {
    type Sparse = Option<RecordedFetch>;

    fn sparse(self) -> Self::Sparse {
        self.map(FetchStats::sparse)
    }
}

impl Recorded for Option<Release> {
    type Sparse = Self;

    fn sparse(self) -> Self {
        self
    }
}
