//! The two hosts of a migration.

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// The host that the guest leaves.
    Source,
    /// The host that the guest goes to.
    Destination,
}

impl Host {
    /// The other host.
    #[must_use]
    pub fn peer(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }
}
