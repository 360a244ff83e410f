//! Feature bits.

use std::fmt;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// A set of feature bits, of the balloon (section 5.5.3) and of the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Features(pub u64);

impl Features {
    /// The driver notifies the device before it uses pages of the balloon again.
    pub const MUST_TELL_HOST: Self = Self(1 << 0);
    /// There is a queue for statistics.
    pub const STATS_VQ: Self = Self(1 << 1);
    /// The driver may take pages back when the guest is out of memory.
    pub const DEFLATE_ON_OOM: Self = Self(1 << 2);
    /// There is a queue for hints of free pages.
    pub const FREE_PAGE_HINT: Self = Self(1 << 3);
    /// The driver reports the value that it fills free pages with.
    pub const PAGE_POISON: Self = Self(1 << 4);
    /// There is a queue on which the driver reports free pages.
    pub const PAGE_REPORTING: Self = Self(1 << 5);
    /// Descriptors may be in indirect tables.
    pub const INDIRECT_DESC: Self = Self(1 << VIRTIO_RING_F_INDIRECT_DESC);
    /// Interrupts and kicks are requested by index.
    pub const EVENT_IDX: Self = Self(1 << VIRTIO_RING_F_EVENT_IDX);
    /// The device conforms to VIRTIO 1.0 or later. Always offered, and must be accepted.
    pub const VERSION_1: Self = Self(1 << VIRTIO_F_VERSION_1);

    /// All features that this device can offer.
    pub const ALL: Self =
        Self((1 << 6) - 1).with(Self::INDIRECT_DESC).with(Self::EVENT_IDX).with(Self::VERSION_1);

    const NAMES: [(Self, &str); 9] = [
        (Self::MUST_TELL_HOST, "must-tell-host"),
        (Self::STATS_VQ, "stats-vq"),
        (Self::DEFLATE_ON_OOM, "deflate-on-oom"),
        (Self::FREE_PAGE_HINT, "free-page-hint"),
        (Self::PAGE_POISON, "page-poison"),
        (Self::PAGE_REPORTING, "page-reporting"),
        (Self::INDIRECT_DESC, "indirect-desc"),
        (Self::EVENT_IDX, "event-idx"),
        (Self::VERSION_1, "version-1"),
    ];

    /// Whether all features of `other` are in the set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The union of both sets.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The features that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The names of the features that have one, in the order of their bits.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMES.into_iter().filter(move |(bit, _)| self.contains(*bit)).map(|(_, name)| name)
    }
}

impl Default for Features {
    /// [`Features::ALL`].
    fn default() -> Self {
        Self::ALL
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.names().collect();
        write!(f, "{:#x} ({})", self.0, names.join(", "))
    }
}
