//! How a value is read from a record whose writer may not have known it.

use crate::release::Release;

/// A value in a record. Every member of recorded statistics may be missing: an older release has
/// fewer of them.
pub trait Recorded {
    /// The value, or that it is missing.
    type Sparse;

    /// A value that is there.
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

/// A flag that is missing is not set.
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

impl Recorded for Option<Release> {
    type Sparse = Self;

    fn sparse(self) -> Self {
        self
    }
}
