//! Conversion of a driver's ranges to whole pages of guest memory.

use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::{GuestRange, PAGE_BYTES};

/// Why parts of a range were cut off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cut {
    /// A part is not guest memory.
    pub(crate) outside: bool,
    /// The range does not begin or end at a page boundary.
    pub(crate) partial: bool,
}

/// Calls `found` with the whole pages of guest memory within a range, region by region.
pub(crate) fn pages_within<M: GuestMemoryBackend + ?Sized>(
    memory: &M,
    start: u64,
    bytes: u64,
    mut found: impl FnMut(GuestRange),
) -> Cut {
    let end = start.saturating_add(bytes);
    let mut covered = 0;
    for region in memory.iter() {
        let region_start = region.start_addr().raw_value();
        let first = start.max(region_start);
        let past = end.min(region_start.saturating_add(region.len()));
        if first >= past {
            continue;
        }
        covered += past - first;
        let Some(first) = first.checked_next_multiple_of(PAGE_BYTES) else { continue };
        let past = past - past % PAGE_BYTES;
        if first < past {
            found(GuestRange { start: GuestAddress(first), bytes: past - first });
        }
    }
    Cut {
        outside: covered < bytes,
        partial: !start.is_multiple_of(PAGE_BYTES) || !bytes.is_multiple_of(PAGE_BYTES),
    }
}

/// Calls `found` with each run of adjacent page numbers of a list, which it sorts.
pub(crate) fn runs(numbers: &mut [u32], mut found: impl FnMut(u64, u64)) {
    numbers.sort_unstable();
    for run in numbers.chunk_by(|a, b| b - a <= 1) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        let pages = u64::from(last - first) + 1;
        found(u64::from(*first) * PAGE_BYTES, pages * PAGE_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryMmap;

    use super::*;

    #[test]
    fn pages_within_trims_to_whole_pages_and_cuts_at_holes() {
        let ranges = [(GuestAddress(0), 0x4000), (GuestAddress(0x6000), 0x2000)];
        let memory = GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap();
        let pages = |start, bytes| {
            let mut all = Vec::new();
            let cut =
                pages_within(&memory, start, bytes, |range| all.push((range.start.0, range.bytes)));
            (all, cut.outside, cut.partial)
        };
        assert_eq!(pages(0x1000, 0x2000), (vec![(0x1000, 0x2000)], false, false));
        assert_eq!(pages(0x1001, 0x2000), (vec![(0x2000, 0x1000)], false, true));
        assert_eq!(pages(0x1001, 0x1ffe), (vec![], false, true));
        assert_eq!(pages(0x2000, 0), (vec![], false, false));
        assert_eq!(pages(0x9000, 0), (vec![], false, false));
        assert_eq!(pages(0x3000, 0x4000), (vec![(0x3000, 0x1000), (0x6000, 0x1000)], true, false));
        assert_eq!(pages(0x8000, 0x1000), (vec![], true, false));
        assert_eq!(pages(u64::MAX - 10, 100), (vec![], true, true));
        let all = vec![(0, 0x4000), (0x6000, 0x2000)];
        assert_eq!(pages(0, u64::MAX), (all, true, true));
    }

    #[test]
    fn runs_joins_neighbors_in_any_order() {
        let mut all = Vec::new();
        runs(&mut [9, 3, 1, 2, 2, u32::MAX, 8], |start, bytes| all.push((start, bytes)));
        let last = u64::from(u32::MAX) << 12;
        assert_eq!(all, [(0x1000, 0x3000), (0x8000, 0x2000), (last, 0x1000)]);
    }
}
