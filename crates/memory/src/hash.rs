//! Zero detection and page hashes.

use std::num::NonZero;
use std::sync::LazyLock;

use twox_hash::XxHash3_64;

use crate::error::MemoryError;
use crate::set::PageSet;
use crate::slots::GuestMemory;
use crate::units::{PAGE_SIZE, PageRun, SlotId};

/// Whether all bytes are zero.
///
/// Words are OR-ed over blocks of 512 bytes, so that the test is vectorized and still ends early:
/// most pages with content are not zero in their first block.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    let (blocks, rest) = bytes.as_chunks::<512>();
    blocks.iter().all(block_is_zero) && rest.iter().all(|byte| *byte == 0)
}

fn block_is_zero(block: &[u8; 512]) -> bool {
    let (words, _) = block.as_chunks::<8>();
    words.iter().fold(0, |all, word| all | u64::from_ne_bytes(*word)) == 0
}

/// A 64-bit hash of a page's content and position.
///
/// The position is included so that a sum of hashes detects two pages that were swapped.
#[must_use]
pub fn page_hash(content: &[u8], slot: SlotId, page: u64) -> u64 {
    place(XxHash3_64::oneshot(content), slot, page)
}

/// [`page_hash`] of a page of zeros, without reading one.
#[must_use]
pub fn zero_page_hash(slot: SlotId, page: u64) -> u64 {
    static ZERO: LazyLock<u64> = LazyLock::new(|| XxHash3_64::oneshot(&[0; PAGE_SIZE]));
    place(*ZERO, slot, page)
}

/// A 64-bit hash of bytes of a stream and their offset in it.
#[must_use]
pub fn stream_hash(bytes: &[u8], offset: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(offset, bytes)
}

/// Mixes a content hash with the page's position: the finalizer of SplitMix64 over both.
fn place(content: u64, slot: SlotId, page: u64) -> u64 {
    let place = (u64::from(slot.0) << 48 | page).wrapping_add(1);
    let mut mixed = content ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// The hash of the whole memory of a paused guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WholeHash {
    /// Wrapping sum of [`page_hash`] over all pages that are not zero. Zero pages do not count, so
    /// an unpopulated page and a populated zero page are equal.
    pub hash: u64,
    /// Number of those pages.
    pub pages: u64,
}

/// Hashes memory that nothing writes, reading populated pages only, on up to four threads.
///
/// # Errors
/// If the populated pages cannot be found.
pub fn whole_hash(memory: &GuestMemory) -> Result<WholeHash, MemoryError> {
    hash_pages(memory, &memory.populated()?)
}

/// As `whole_hash`, without the pages of `except`, a set of this memory's layout.
///
/// # Errors
/// As [`whole_hash`].
pub fn whole_hash_except(memory: &GuestMemory, except: &PageSet) -> Result<WholeHash, MemoryError> {
    let mut populated = memory.populated()?;
    populated.subtract(except);
    hash_pages(memory, &populated)
}

fn hash_pages(memory: &GuestMemory, populated: &PageSet) -> Result<WholeHash, MemoryError> {
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(4);
    let parts = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|worker| {
                let runs = populated.runs().flat_map(pieces).skip(worker).step_by(threads);
                scope.spawn(move || hash_runs(memory, runs))
            })
            .collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, _>| match worker.join() {
            Ok(part) => part,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        workers.into_iter().map(join).collect::<Result<Vec<WholeHash>, MemoryError>>()
    })?;
    Ok(parts.into_iter().fold(WholeHash { hash: 0, pages: 0 }, |sum, part| WholeHash {
        hash: sum.hash.wrapping_add(part.hash),
        pages: sum.pages + part.pages,
    }))
}

/// Number of pages that are copied at a time: 256 KiB stays in the second-level cache.
const PIECE_PAGES: u64 = 64;

fn pieces(run: PageRun) -> impl Iterator<Item = PageRun> {
    (0..run.pages).step_by(PIECE_PAGES as usize).map(move |offset| PageRun {
        first: run.first + offset,
        pages: (run.pages - offset).min(PIECE_PAGES),
        ..run
    })
}

fn hash_runs(
    memory: &GuestMemory,
    runs: impl Iterator<Item = PageRun>,
) -> Result<WholeHash, MemoryError> {
    let mut scratch = vec![0; PIECE_PAGES as usize * PAGE_SIZE];
    let mut sum = WholeHash { hash: 0, pages: 0 };
    for run in runs {
        let copy = &mut scratch[..run.pages as usize * PAGE_SIZE];
        memory.copy_out(run, copy)?;
        for (page, content) in (run.first..).zip(copy.chunks_exact(PAGE_SIZE)) {
            if !is_zero(content) {
                sum.hash = sum.hash.wrapping_add(page_hash(content, run.slot, page));
                sum.pages += 1;
            }
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{MemoryKind, SlotLayout};

    proptest! {
        #[test]
        fn zero_test_finds_one_byte_anywhere(
            length in 0_usize..5000,
            at in any::<prop::sample::Index>(),
        ) {
            let mut bytes = vec![0; length];
            prop_assert!(is_zero(&bytes));
            if length > 0 {
                bytes[at.index(length)] = 1;
                prop_assert!(!is_zero(&bytes));
            }
        }
    }

    #[test]
    fn page_hash_depends_on_slot_and_page() {
        let content = [7; PAGE_SIZE];
        let here = page_hash(&content, SlotId(0), 1);
        assert_ne!(here, page_hash(&content, SlotId(0), 2));
        assert_ne!(here, page_hash(&content, SlotId(1), 1));
        assert_eq!(page_hash(&[0; PAGE_SIZE], SlotId(3), 9), zero_page_hash(SlotId(3), 9));
    }

    #[test]
    fn whole_hash_ignores_the_memory_kind_and_detects_one_bit() {
        let layout = [
            SlotLayout { slot: SlotId(0), gpa: 0, pages: 1000 },
            SlotLayout { slot: SlotId(1), gpa: 1 << 32, pages: 300 },
        ];
        let private = GuestMemory::allocate(&layout, MemoryKind::Private).unwrap();
        let memfd = GuestMemory::allocate(&layout, MemoryKind::Memfd).unwrap();
        for memory in [&private, &memfd] {
            for page in (0..900).step_by(3) {
                memory.write_at(page * PAGE_SIZE as u64 + page, &[page as u8 | 1]).unwrap();
            }
            memory.write_at((1 << 32) + 5000, b"x").unwrap();
        }
        // This page is populated but zero.
        memfd.write_at(999 * PAGE_SIZE as u64, &[0]).unwrap();
        let hash = whole_hash(&private).unwrap();
        assert_eq!(hash, whole_hash(&memfd).unwrap());
        assert_eq!(hash.pages, 301);
        memfd.write_at(17, &[1]).unwrap();
        assert_ne!(hash.hash, whole_hash(&memfd).unwrap().hash);
        // Excluded pages may differ.
        let mut except = PageSet::for_layout(&layout);
        except.bitmap_mut(SlotId(0)).set(0);
        let hash = whole_hash_except(&private, &except).unwrap();
        assert_eq!(hash, whole_hash_except(&memfd, &except).unwrap());
        assert_eq!(hash.pages, 300);
    }
}
