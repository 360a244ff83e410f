//! The same on hugetlbfs, where the guest sees a huge page once all its pages are there. What was
//! outdated there is never seen, although it can't be freed.

use vmferry_kit::HugePages;

use super::*;

/// Exactly those of the guest: the second mapping takes none.
fn pool() -> HugePages {
    HugePages::reserve(PAGES / 512)
}

#[test]
fn guest_runs_on_huge_pages_that_it_fetches() {
    let _pool = pool();
    let counts = fetched(MemoryKind::Hugetlb, false);
    assert_eq!((counts.fault_pages, counts.background_pages), (PAGES / 3, 0));
}

#[test]
fn faults_and_background_pages_of_huge_pages_may_race() {
    let _pool = pool();
    let all = [(); 10].map(|()| fetched(MemoryKind::Hugetlb, true));
    assert!(all.iter().any(|counts| counts.fault_pages > 0), "{all:?}");
    assert!(all.iter().any(|counts| counts.background_pages > 0), "{all:?}");
}

#[test]
fn background_alone_completes_huge_pages() {
    let _pool = pool();
    background_fetches_all(MemoryKind::Hugetlb);
}

/// The control for the tests above.
#[test]
fn wrong_page_of_a_huge_page_is_seen_by_the_guest() {
    let _pool = pool();
    wrong_page_is_seen(MemoryKind::Hugetlb);
}

/// A control, too: a huge page that is shown before its last page has come has an outdated one.
#[test]
fn huge_page_that_is_shown_too_early_is_seen_by_the_guest() {
    let _pool = pool();
    let scene = Scene::new(MemoryKind::Hugetlb);
    let first = PageRun { slot: SLOT, first: 0, pages: 512 };
    scene.missing().ranges().show(first).unwrap();
    let _servers = [scene.serve(FAULTS, 0), scene.serve(BACKGROUND, 0)];
    assert!(!scene.run_vcpus(|| {}));
}

#[test]
fn lost_channels_delay_a_guest_on_huge_pages_only() {
    let _pool = pool();
    lost_channels_delay(MemoryKind::Hugetlb);
}

#[test]
fn lost_channel_ends_a_load_that_waits_for_a_huge_page() {
    let _pool = pool();
    let scene = Scene::loading(MemoryKind::Hugetlb);
    drop(scene.serve(FAULTS, 0));
    scene.memory.read_at(0, &mut [0]).unwrap();
    assert!(!scene.missing().end_load(), "the load does not count");
}
