//! The source's copies of pages as last sent, from which deltas are made.
//!
//! There is room for a bounded number of pages. A page has one set of few entries in which it
//! may be held, its number modulo the number of sets, so that as many consecutive pages as there
//! are entries fit, without a conflict. If the guest writes more than fits, then what is held
//! stays: an entry is only given to another page when its own was not sent in the last round.
//! Replacing the least recently sent instead would drop every page just before it comes again.
//!
//! Sets are spread over shards with a lock each. A lock is held while one page is compared and
//! copied, well under a microsecond, and neighbours are in different shards.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmferry_memory::{GuestBytes, PAGE_SIZE, SlotId};
use zerocopy::FromZeros;

use crate::delta::{apply_delta, encode_delta};

/// Entries of a set. With one, two areas of memory that are hot at once would conflict wherever
/// they meet; each more makes that rarer, and is one more tag to look at.
const WAYS: usize = 4;

/// Many more than there are workers, so that two of them rarely want the same.
const SHARDS: usize = 64;

/// What became of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delta {
    /// The record was appended.
    Made,
    /// The record would have been longer than the limit.
    TooLong,
    /// The page is not held as it was last sent.
    NotHeld,
}

/// What became of a page that the destination keeps too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// The record was appended, and changes what is kept in this entry.
    Delta(u32),
    /// The page is to be kept in this entry, whole.
    Kept(u32),
    /// It is not kept.
    NotHeld,
}

/// The hash of entries of [`HotPages::exchange`], whose content both sides know.
const KEPT: u64 = 1;

/// Copies of pages as last sent, bounded, shared by all workers.
pub struct HotPages {
    shards: Vec<Mutex<Shard>>,
    sets: usize,
    ways: usize,
}

/// The entries of some sets, `ways` for each, by field: the memory is zeroed by the system and
/// populated where pages come.
#[derive(Default)]
struct Shard {
    /// Which page an entry holds; 0 for none.
    tags: Vec<u64>,
    /// The held content's hash; 0 while it is of no use.
    hashes: Vec<u64>,
    /// Round of last use.
    rounds: Vec<u32>,
    contents: GuestBytes,
    held: u64,
}

impl HotPages {
    /// At most `bytes` of copies; their housekeeping is 20 bytes for each page of 4096. Memory is
    /// taken as pages come. Holds nothing where `bytes` is less than a page, and less than
    /// `bytes` where the system refuses the address space.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let pages = usize::try_from(bytes / PAGE_SIZE as u64).unwrap_or(usize::MAX / PAGE_SIZE);
        let ways = pages.min(WAYS);
        let sets = pages.checked_div(ways).unwrap_or(0);
        let shards = sets.min(SHARDS);
        let shard = |index: usize| {
            let own = (sets - index).div_ceil(shards);
            Mutex::new(Shard::new(own * ways).unwrap_or_default())
        };
        Self { shards: (0..shards).map(shard).collect(), sets, ways }
    }

    /// Appends to `into` the [delta](encode_delta) that makes `content` from the page as it was
    /// last sent, if that is held and the delta is not longer than `limit` bytes. In any case
    /// `content` is kept as the page's new version, if there is room for it.
    ///
    /// `page` is counted within `slot`, and is another worker's in no call at the same time.
    /// `round` is the number of the round. `sent_hash` is the hash of the page as last sent,
    /// 0 if it never was; `new_hash` that of `content`, which has [`PAGE_SIZE`] bytes.
    #[expect(clippy::too_many_arguments, reason = "all of a page, once per page")]
    pub fn delta(
        &self,
        slot: SlotId,
        page: u64,
        round: u32,
        sent_hash: u64,
        new_hash: u64,
        content: &[u8],
        into: &mut GuestBytes,
        limit: usize,
    ) -> Delta {
        let Some((mut shard, set, tag)) = self.find(slot, page, content) else {
            return Delta::NotHeld;
        };
        let Some(entry) = shard.entry(&set, tag) else {
            shard.admit(set, tag, round, new_hash, content);
            return Delta::NotHeld;
        };
        if sent_hash == 0 || shard.hashes[entry] != sent_hash {
            shard.store(entry, round, new_hash, content);
            return Delta::NotHeld;
        }
        let begin = into.len();
        if !encode_delta(shard.content(entry), content, into, limit) {
            shard.store(entry, round, new_hash, content);
            return Delta::TooLong;
        }
        // Writes what changed only. It can't fail; if it did, the copy would be of no use.
        shard.hashes[entry] = 0;
        shard.rounds[entry] = round;
        if apply_delta(&mut &into[begin..], shard.content(entry)).is_ok() {
            shard.hashes[entry] = new_hash;
        }
        Delta::Made
    }

    /// The same for a destination that has no guest memory to look into and keeps the pages too, each in the entry
    /// that it is told. What is held is what both sides have kept, whichever version was sent last. Calls must be made in
    /// the order in which the pages are sent.
    pub fn exchange(
        &self,
        page: (SlotId, u64),
        round: u32,
        content: &[u8],
        into: &mut GuestBytes,
        limit: usize,
    ) -> Exchange {
        let Some((mut shard, set, tag)) = self.find(page.0, page.1, content) else {
            return Exchange::NotHeld;
        };
        // Entries of a set stand together in a shard, and sets are dealt out to the shards in turn.
        let (ways, first) = (self.ways, set.start);
        let number = |entry: usize, in_all: usize| (in_all * ways + entry - first) as u32;
        let in_all = self.set_of(page.0, page.1);
        let Some(entry) = shard.entry(&set, tag) else {
            shard.admit(set.clone(), tag, round, KEPT, content);
            let admitted = shard.entry(&set, tag);
            return admitted
                .map_or(Exchange::NotHeld, |entry| Exchange::Kept(number(entry, in_all)));
        };
        let begin = into.len();
        if !encode_delta(shard.content(entry), content, into, limit) {
            shard.store(entry, round, KEPT, content);
            return Exchange::Kept(number(entry, in_all));
        }
        shard.rounds[entry] = round;
        if apply_delta(&mut &into[begin..], shard.content(entry)).is_err() {
            // It can't fail; if it did, the entry would differ from the destination's.
            into.truncate(begin);
            shard.store(entry, round, KEPT, content);
            return Exchange::Kept(number(entry, in_all));
        }
        Exchange::Delta(number(entry, in_all))
    }

    /// How many pages are held.
    #[must_use]
    pub fn held_pages(&self) -> u64 {
        self.shards.iter().map(|shard| lock(shard).held).sum()
    }

    /// The page's shard, locked, its entries there, and its tag.
    fn find(&self, slot: SlotId, page: u64, content: &[u8]) -> Option<Found<'_>> {
        if self.sets == 0 || content.len() != PAGE_SIZE {
            return None;
        }
        let set = self.set_of(slot, page);
        let shard = lock(&self.shards[set % self.shards.len()]);
        let first = set / self.shards.len() * self.ways;
        // A slot of 2^48 pages would be 2^60 bytes.
        let tag = (u64::from(slot.0) << 48 | page).wrapping_add(1);
        (first + self.ways <= shard.tags.len()).then_some((shard, first..first + self.ways, tag))
    }

    /// The number of the page's set. There must be one.
    fn set_of(&self, slot: SlotId, page: u64) -> usize {
        // Slots begin far from each other, or the first pages of all would share their sets.
        let begin = u64::from(slot.0).wrapping_mul(0x9e37_79b9_7f4a_7c15) % self.sets as u64;
        ((page % self.sets as u64 + begin) % self.sets as u64) as usize
    }
}

type Set = std::ops::Range<usize>;
type Found<'a> = (MutexGuard<'a, Shard>, Set, u64);

/// After a panic, too: an entry is of no use, by its hash, while it is written.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shard {
    fn new(entries: usize) -> Option<Self> {
        Some(Self {
            tags: u64::new_vec_zeroed(entries).ok()?,
            hashes: u64::new_vec_zeroed(entries).ok()?,
            rounds: u32::new_vec_zeroed(entries).ok()?,
            contents: GuestBytes::zeroed(entries.checked_mul(PAGE_SIZE)?)?,
            held: 0,
        })
    }

    fn entry(&self, set: &Set, tag: u64) -> Option<usize> {
        set.clone().find(|entry| self.tags[*entry] == tag)
    }

    fn content(&mut self, entry: usize) -> &mut [u8] {
        &mut self.contents[entry * PAGE_SIZE..][..PAGE_SIZE]
    }

    /// Gives the page an entry, unless all are of pages that are still being sent.
    fn admit(&mut self, set: Set, tag: u64, round: u32, hash: u64, content: &[u8]) {
        let entry = if let Some(vacant) = self.entry(&set, 0) {
            self.held += 1;
            vacant
        } else {
            let oldest = set.min_by_key(|entry| self.rounds[*entry]);
            match oldest.filter(|entry| self.rounds[*entry].saturating_add(1) < round) {
                Some(oldest) => oldest,
                None => return,
            }
        };
        self.tags[entry] = tag;
        self.store(entry, round, hash, content);
    }

    fn store(&mut self, entry: usize, round: u32, hash: u64, content: &[u8]) {
        self.hashes[entry] = 0;
        self.rounds[entry] = round;
        self.content(entry).copy_from_slice(content);
        self.hashes[entry] = hash;
    }
}

impl fmt::Debug for HotPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = self.sets * self.ways;
        let mut shown = f.debug_struct("HotPages");
        shown.field("held", &self.held_pages()).field("most", &most).finish()
    }
}

#[cfg(test)]
#[path = "hot_pages_tests.rs"]
mod tests;
