//! Tests of `hot_pages`.

use std::collections::HashMap;

use proptest::prelude::*;
use vmferry_memory::page_hash;

use super::*;
use crate::samples::{Noise, noise_page};

const SLOT: SlotId = SlotId(0);

fn store(pages: u64) -> HotPages {
    HotPages::new(pages * PAGE_SIZE as u64)
}

fn keep(store: &HotPages, page: u64, round: u32) {
    keep_content(store, SLOT, page, round, page + 1, &noise_page(page));
}

/// Keeps a page that was never sent.
fn keep_content(store: &HotPages, slot: SlotId, page: u64, round: u32, hash: u64, content: &[u8]) {
    let version = PageVersion { slot, page, round, sent_hash: None, new_hash: hash, content };
    let found = store.delta(version, &mut GuestBytes::new(), PAGE_SIZE);
    assert_eq!(found, Delta::NotHeld);
}

/// Whether a page is held, without a change to the store.
fn holds(store: &HotPages, slot: SlotId, page: u64) -> bool {
    store
        .find(slot, page, &[0; PAGE_SIZE])
        .is_some_and(|found| found.shard.entry(&found.set, found.tag).is_some())
}

/// A migration's use of the store.
struct Source<'a> {
    store: &'a HotPages,
    /// Content and hash as last sent.
    sent: HashMap<(SlotId, u64), (Vec<u8>, u64)>,
    made: u64,
}

impl Source<'_> {
    fn send(&mut self, slot: SlotId, page: u64, round: u32, content: &[u8], limit: usize) {
        let new_hash = page_hash(content, slot, page);
        let (base, sent_hash) = self.sent.get(&(slot, page)).cloned().unwrap_or_default();
        let mut into = GuestBytes::from(*b"before");
        let sent_hash = NonZeroU64::new(sent_hash);
        let version = PageVersion { slot, page, round, sent_hash, new_hash, content };
        match self.store.delta(version, &mut into, limit) {
            Delta::Made => {
                let (mut record, mut held) = (&into[6..], base);
                assert!(record.len() <= limit);
                apply_delta(&mut record, &mut held).unwrap();
                assert!(record.is_empty() && held == content, "page {page} of {slot}");
                self.made += 1;
            }
            Delta::TooLong => assert!(sent_hash.is_some()),
            Delta::NotHeld => {}
        }
        assert_eq!(&into[..6], b"before");
        self.sent.insert((slot, page), (content.to_vec(), new_hash));
    }

    /// Sends a page without the store.
    fn send_aside(&mut self, slot: SlotId, page: u64, content: &[u8]) {
        let hash = page_hash(content, slot, page);
        self.sent.insert((slot, page), (content.to_vec(), hash));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn delta_is_against_the_last_sent_version_within_the_capacity(
        capacity in 0_u64..40,
        writes in prop::collection::vec(
            (0_u16..3, 0_u64..24, 0_usize..16, 1_usize..300, 0..8),
            1..300,
        )
    ) {
        let store = store(capacity);
        let mut source = Source { store: &store, sent: HashMap::new(), made: 0 };
        for (count, (slot, page, at, bytes, way)) in writes.into_iter().enumerate() {
            let (slot, round) = (SlotId(slot), count as u32 / 20 + 1);
            let old = source.sent.get(&(slot, page)).map(|(content, _)| content.clone());
            let mut new = old.unwrap_or_else(|| noise_page(page));
            Noise::new(count as u64).fill(&mut new[at * 200..at * 200 + bytes]);
            match way {
                0 => source.send_aside(slot, page, &new),
                1 => {
                    keep_content(&store, slot, page, round, page_hash(&new, slot, page), &new);
                    source.send_aside(slot, page, &new);
                }
                2 => source.send(slot, page, round, &new, 20),
                _ => source.send(slot, page, round, &new, PAGE_SIZE),
            }
            prop_assert!(store.held_pages() <= capacity);
        }
    }
}

#[test]
fn held_page_gives_a_delta() {
    let store = store(8);
    let mut source = Source { store: &store, sent: HashMap::new(), made: 0 };
    let mut page = noise_page(1);
    for round in 1..5 {
        page[100] ^= 1;
        source.send(SLOT, 5, round, &page, 64);
    }
    assert_eq!((source.made, store.held_pages()), (3, 1));
}

#[test]
fn page_with_too_many_changes_is_held_for_the_next_delta() {
    let store = store(8);
    let mut into = GuestBytes::new();
    let mut delta = |round, sent, new: u64, limit| {
        let (sent_hash, content) = (NonZeroU64::new(sent), &noise_page(new));
        let version = PageVersion { slot: SLOT, page: 1, round, sent_hash, new_hash: new, content };
        store.delta(version, &mut into, limit)
    };
    assert_eq!(delta(1, 0, 11, 1000), Delta::NotHeld);
    assert_eq!(delta(2, 11, 12, 1000), Delta::TooLong);
    assert_eq!(delta(3, 12, 12, 1), Delta::Made);
    // Another version was sent in between.
    assert_eq!(delta(4, 99, 13, 8192), Delta::NotHeld);
    assert_eq!(delta(5, 13, 14, 8192), Delta::Made);
    // Never sent, as after a reset of the hashes.
    assert_eq!(delta(6, 0, 15, 8192), Delta::NotHeld);
}

#[test]
fn consecutive_pages_fill_the_store_completely() {
    for capacity in [1_u64, 3, 4, 100, 255, 1000, 4096] {
        let store = store(capacity);
        let entries = capacity - if capacity > 4 { capacity % 4 } else { 0 };
        for first in [0, 777] {
            let store = if first == 0 { &store } else { &self::store(capacity) };
            (first..first + entries).for_each(|page| keep(store, page, 1));
            assert_eq!(store.held_pages(), entries, "of {capacity}");
            assert!((first..first + entries).all(|page| holds(store, SLOT, page)));
            keep(store, first + entries, 2);
            assert_eq!(store.held_pages(), entries);
        }
    }
}

#[test]
fn working_set_beyond_the_capacity_does_not_thrash() {
    let store = store(400);
    (1..=6).for_each(|round| (0..1000).for_each(|page| keep(&store, page, round)));
    assert!((0..400).all(|page| holds(&store, SLOT, page)), "the first stay");
    // Once these pages are no longer sent, other pages replace them.
    (7..=8).for_each(|round| (400..800).for_each(|page| keep(&store, page, round)));
    assert!((400..800).all(|page| holds(&store, SLOT, page)));
    assert_eq!(store.held_pages(), 400);
}

#[test]
fn page_is_replaced_only_after_a_round_without_it() {
    let store = store(4);
    (0..4).for_each(|page| keep(&store, page, 5));
    keep(&store, 9, 5);
    keep(&store, 9, 6);
    assert!(!holds(&store, SLOT, 9));
    keep(&store, 9, 7);
    assert!(holds(&store, SLOT, 9));
    assert_eq!(store.held_pages(), 4);
}

#[test]
fn slots_use_different_sets_for_the_same_pages() {
    let store = store(4000);
    for slot in 0..10 {
        (0..200).for_each(|page| keep_content(&store, SlotId(slot), page, 1, 1, &[1; PAGE_SIZE]));
    }
    assert!(store.held_pages() > 1900, "{store:?}");
}

#[test]
fn store_holds_nothing_without_capacity_or_of_another_size() {
    for store in [HotPages::new(0), HotPages::new(PAGE_SIZE as u64 - 1)] {
        keep(&store, 1, 1);
        let mut into = GuestBytes::new();
        let (sent_hash, content) = (NonZeroU64::new(2), &[0; PAGE_SIZE]);
        let version =
            PageVersion { slot: SLOT, page: 1, round: 2, sent_hash, new_hash: 3, content };
        let found = store.delta(version, &mut into, PAGE_SIZE);
        assert_eq!((found, store.held_pages(), into.len()), (Delta::NotHeld, 0, 0));
    }
    let store = store(8);
    keep_content(&store, SLOT, 1, 1, 1, &[0; 64]);
    assert_eq!(store.held_pages(), 0);
}

#[test]
fn capacity_beyond_the_address_space_holds_nothing_and_never_panics() {
    let store = HotPages::new(u64::MAX);
    keep(&store, 1, 1);
    assert!(store.held_pages() <= 1);
}

#[test]
fn store_is_shared_by_workers() {
    let store = store(512);
    let made: u64 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4_u64)
            .map(|worker| {
                let store = &store;
                scope.spawn(move || {
                    let mut source = Source { store, sent: HashMap::new(), made: 0 };
                    let mut noise = Noise::new(worker);
                    for round in 1..20 {
                        // Groups of 16 pages in turn, as frames are assigned to lanes; more pages
                        // than fit.
                        for page in (0..1024_u64).filter(|page| page / 16 % 4 == worker) {
                            let old = source.sent.get(&(SLOT, page)).map(|(old, _)| old.clone());
                            let mut new = old.unwrap_or_else(|| noise_page(page));
                            new[noise.next() as usize % PAGE_SIZE] ^= 1;
                            source.send(SLOT, page, round, &new, 100);
                        }
                    }
                    source.made
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert_eq!(store.held_pages(), 512);
    // All held pages produce a delta in every round but the first.
    assert_eq!(made, 512 * 18);
}
