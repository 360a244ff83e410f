//! Guests whose pages differ in how well they can be encoded.

use vmferry::source::Report;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE};

use super::{Guest, PAGES, SourceGuest, address};

/// Pages with content at the beginning of each slot.
const FILLED: u64 = 640;

/// The content of a page, in blocks of 16: 8 pages of text, 2 that were never written, 3 of random
/// bytes, 1 of written zeros, 2 of few words.
pub fn content(page: u64) -> Option<Vec<u8>> {
    let mut content = match page % 16 {
        0..8 => text(page),
        8..10 => return None,
        10..13 => random(page),
        13 => vec![0; PAGE_SIZE],
        _ => {
            let mut words = vec![0; PAGE_SIZE];
            words[64..72].copy_from_slice(&page.to_le_bytes());
            words
        }
    };
    // The guest's counters.
    content[..8].fill(0);
    content[PAGE_SIZE - 8..].fill(0);
    Some(content)
}

/// Text that is different for every page.
pub fn text(page: u64) -> Vec<u8> {
    format!("page {page} of a guest, ").bytes().cycle().take(PAGE_SIZE).collect()
}

/// Random bytes of a page.
pub fn random(page: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_SIZE];
    fastrand::Rng::with_seed(page).fill(&mut bytes);
    bytes
}

/// A guest with pages of all kinds. A few bytes of the first `hot` pages are changed continuously.
pub fn mixed_guest(hot: u64) -> SourceGuest {
    let of_slots = (0..FILLED).chain(PAGES / 2..PAGES / 2 + FILLED);
    guest_of(hot, of_slots.filter_map(|page| Some((page, content(page)?))))
}

/// A guest with `pages` pages of text, of which the first `hot` are changed.
pub fn text_guest(pages: u64, hot: u64) -> SourceGuest {
    let page = |page| {
        let mut content = text(page);
        content[..8].fill(0);
        (page, content)
    };
    guest_of(hot, (0..pages).map(page))
}

/// A guest with `pages` pages of random bytes. A few bytes of each are changed.
pub fn random_guest(pages: u64) -> SourceGuest {
    let page = |page| {
        let mut content = random(page);
        content[..8].fill(0);
        (page, content)
    };
    guest_of(pages, (0..pages).map(page))
}

pub fn guest_of(hot: u64, pages: impl Iterator<Item = (u64, Vec<u8>)>) -> SourceGuest {
    let memory = GuestMemory::allocate(&Guest::layout(), MemoryKind::Private).unwrap();
    for (page, content) in pages {
        memory.write_at(address(page), &content).unwrap();
    }
    SourceGuest::start(memory, hot)
}

/// Delays the migration after each round until the guest has written all of its hot pages again.
pub fn let_work_between_rounds(guest: &Guest, report: &Report) {
    if matches!(report, Report::RoundDone(round) if !round.paused) {
        guest.wait_for_work();
    }
}
