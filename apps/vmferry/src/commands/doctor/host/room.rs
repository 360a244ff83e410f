//! Checks whether a host has room for a guest's memory.

use bytesize::ByteSize;
use vmferry::probe::HostFacts;
use vmferry_memory::MemoryKind;

use crate::commands::doctor::{Findings, Level};

/// Checks whether a host has room for a guest with this much memory of this kind.
pub fn look_for_room(
    host: &HostFacts,
    place: &str,
    bytes: u64,
    kind: MemoryKind,
    findings: &mut Findings,
) {
    const HUGE: u64 = 2 << 20;
    let needed = ByteSize(bytes);
    if kind == MemoryKind::Hugetlb {
        let pages = host.huge_pages.iter().find(|pages| pages.bytes == HUGE);
        let free = pages.map_or(0, |pages| pages.free);
        let wanted = bytes.div_ceil(HUGE);
        if free < wanted {
            findings.bad(
                "huge-pages",
                Level::Error,
                place,
                format!(
                    "{wanted} huge pages of 2 MiB are needed for {needed}, and {free} are free"
                ),
                format!(
                    "reserve {} more there with `sysctl vm.nr_hugepages=N`, soon after boot",
                    wanted - free
                ),
            );
        } else {
            findings.ok("huge-pages", place, format!("{free} are free, and {wanted} are needed"));
        }
        return;
    }
    match host.memory_available {
        Some(available) if available < bytes => findings.bad(
            "room",
            Level::Error,
            place,
            format!("the guest has {needed}, and {} are available there", ByteSize(available)),
            "quit or move guests there, or choose another host",
        ),
        Some(available) => findings.ok(
            "room",
            place,
            format!("{} are available there, and the guest has {needed}", ByteSize(available)),
        ),
        None => {}
    }
}

/// The same for a guest whose memory kind the destination's QEMU decides. Reserved huge pages are
/// not available to other kinds.
pub fn look_for_any_room(host: &HostFacts, place: &str, bytes: u64, findings: &mut Findings) {
    let huge = host.huge_pages.iter().map(|pages| pages.bytes.saturating_mul(pages.free));
    let huge = huge.max().unwrap_or(0);
    match host.memory_available {
        Some(available) if available < bytes && huge >= bytes => findings.bad(
            "room",
            Level::Warning,
            place,
            format!(
                "the guest has {}, and {} are available there besides {} of free huge pages, which \
                 are enough",
                ByteSize(bytes),
                ByteSize(available),
                ByteSize(huge)
            ),
            "give its QEMU there memory on huge pages (`hugetlb=on`, or a `mem-path` on a \
             hugetlbfs), or choose another host",
        ),
        _ => look_for_room(host, place, bytes, MemoryKind::Private, findings),
    }
}

#[cfg(test)]
mod tests {
    use vmferry::probe::HugePages;

    use super::*;

    #[test]
    fn room_depends_on_the_memory_kind() {
        let huge_pages = vec![HugePages { bytes: 2 << 20, total: 9, free: 4 }];
        let host =
            HostFacts { memory_available: Some(1 << 30), huge_pages, ..HostFacts::default() };
        let level = |bytes, kind| {
            let mut findings = Findings::default();
            look_for_room(&host, "b", bytes, kind, &mut findings);
            findings.worst()
        };
        assert_eq!(level(1 << 30, MemoryKind::Private), Level::Ok);
        assert_eq!(level((1 << 30) + 1, MemoryKind::Private), Level::Error);
        assert_eq!(level(8 << 20, MemoryKind::Hugetlb), Level::Ok);
        assert_eq!(level((8 << 20) + 1, MemoryKind::Hugetlb), Level::Error);
    }

    #[test]
    fn any_room_may_be_in_huge_pages() {
        let huge_pages = vec![HugePages { bytes: 2 << 20, total: 900, free: 800 }];
        let host =
            HostFacts { memory_available: Some(1 << 30), huge_pages, ..HostFacts::default() };
        let level = |bytes| {
            let mut findings = Findings::default();
            look_for_any_room(&host, "b", bytes, &mut findings);
            findings.worst()
        };
        assert_eq!(level(1 << 30), Level::Ok);
        assert_eq!(level(1600 << 20), Level::Warning);
        assert_eq!(level((1600 << 20) + 1), Level::Error);
    }
}
