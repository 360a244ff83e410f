//! The guest's statistics (section 5.5.6.2).

use serde::{Deserialize, Serialize};

/// Length of an entry: a tag of 16 bits and a value of 64 bits.
const ENTRY_BYTES: usize = 10;

/// The names of the statistics by tag: those of the specification, and from 10 on those that Linux
/// has had since 6.12. Values are bytes, or numbers of events for faults, allocations, kills and
/// stalls.
pub const STATISTICS: [&str; 16] = [
    "swap-in",
    "swap-out",
    "major-faults",
    "minor-faults",
    "free-memory",
    "total-memory",
    "available-memory",
    "disk-caches",
    "hugetlb-allocations",
    "hugetlb-failures",
    "oom-kills",
    "allocation-stalls",
    "async-scans",
    "direct-scans",
    "async-reclaims",
    "direct-reclaims",
];

/// A guest's memory statistics. Every statistic is optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Statistics([Option<u64>; STATISTICS.len()]);

impl Statistics {
    /// Parses entries. Unknown tags are ignored, the last of several entries with the same tag is
    /// used, and bytes after the last whole entry are ignored.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let mut all = Self::default();
        for entry in bytes.chunks_exact(ENTRY_BYTES) {
            let (tag, value) = entry.split_at(2);
            let tag = usize::from(u16::from_le_bytes([tag[0], tag[1]]));
            if let (Some(place), Ok(value)) = (all.0.get_mut(tag), value.try_into()) {
                *place = Some(u64::from_le_bytes(value));
            }
        }
        all
    }

    /// Whether `bytes` is a whole number of entries.
    pub(crate) fn fits(bytes: usize) -> bool {
        bytes.is_multiple_of(ENTRY_BYTES)
    }

    /// The statistic with a tag.
    #[must_use]
    pub fn get(&self, tag: u16) -> Option<u64> {
        self.0.get(usize::from(tag)).copied().flatten()
    }

    /// The statistics that the guest sent, by name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
        STATISTICS.into_iter().zip(self.0).filter_map(|(name, value)| Some((name, value?)))
    }
}
