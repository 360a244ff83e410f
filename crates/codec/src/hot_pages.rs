//! The source's copies of pages as last sent. Deltas are computed against them.
//!
//! The number of pages is bounded. A page may be held in one set of few entries; the number of the
//! set is the page's number modulo the number of sets, so as many consecutive pages as there are
//! entries fit without a conflict. If the guest writes more pages than fit, the pages that are held
//! stay: an entry is given to another page only if its own was not sent in the last round.
//! Replacing the least recently sent page would drop every page just before it is sent again.
//!
//! Sets are distributed over shards with a lock each. A lock is held while one page is compared and
//! copied, well under a microsecond, and neighboring pages are in different shards.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::Range;

use parking_lot::{Mutex, MutexGuard};
use vmferry_memory::{GuestBytes, PAGE_SIZE, SlotId};
use zerocopy::FromZeros;

use crate::delta::{apply_delta, encode_delta};

/// Entries of a set. Of 16 hot areas that fill three quarters of the store, it holds 74 % of the
/// pages with one entry in a set, 95 % with four and 99 % with eight, and eight are twice as many
/// tags to compare for every page.
const WAYS: usize = 4;

/// Locks of the store: many more than there are workers, so that two workers rarely need the same
/// one. A shard without entries takes about 100 bytes.
const SHARDS: usize = 64;

/// A page whose new version is about to be sent.
#[derive(Clone, Copy, Debug)]
pub struct PageVersion<'a> {
    /// The slot.
    pub slot: SlotId,
    /// The page's index in the slot.
    pub page: u64,
    /// The number of the round.
    pub round: u32,
    /// Hash of the page as last sent; `None` if it never was.
    pub sent_hash: Option<NonZeroU64>,
    /// Hash of the new version.
    pub new_hash: u64,
    /// The new version, [`PAGE_SIZE`] bytes.
    pub content: &'a [u8],
}

/// Result of `HotPages::delta`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delta {
    /// The record was appended.
    Made,
    /// The record would have been longer than the limit.
    TooLong,
    /// The page is not held in the version that was last sent.
    NotHeld,
}

/// Result of `HotPages::exchange`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// The record was appended. It changes the page kept in this entry.
    Delta(u32),
    /// The whole page must be kept in this entry.
    Kept(u32),
    /// The page is not kept.
    NotHeld,
}

/// The hash for entries of [`HotPages::exchange`], whose content both sides have. Any number but 0,
/// which marks content that is not valid.
const KEPT: u64 = 1;

/// Copies of pages as last sent. Their number is bounded, and all workers share them.
pub struct HotPages {
    shards: Vec<Mutex<Shard>>,
    sets: usize,
    ways: usize,
}

/// The entries of some sets, `ways` for each set, as one array per field. The memory is zeroed by
/// the system and populated when pages are stored.
#[derive(Default)]
struct Shard {
    /// Tag of the page that an entry holds; 0 if it is vacant.
    tags: Vec<u64>,
    /// The held content's hash; 0 while the content is not valid.
    hashes: Vec<u64>,
    /// Round of last use.
    rounds: Vec<u32>,
    contents: GuestBytes,
    held: u64,
}

impl HotPages {
    /// Space for at most `bytes` bytes of copies, with 20 more bytes of metadata per page. Memory
    /// is populated as pages are stored. Holds nothing if `bytes` is less than a page, and less
    /// than `bytes` if the system refuses the address space.
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

    /// Appends to `into` the [delta](encode_delta) that turns the page as it was last sent into its
    /// new version, if the former is held and the delta is not longer than `limit` bytes. In any
    /// case the new version is kept, if there is space for it.
    ///
    /// Two workers must not call this for the same page at the same time.
    pub fn delta(&self, version: PageVersion<'_>, into: &mut GuestBytes, limit: usize) -> Delta {
        let PageVersion { slot, page, round, sent_hash, new_hash, content } = version;
        let Some(Found { mut shard, set, tag }) = self.find(slot, page, content) else {
            return Delta::NotHeld;
        };
        let Some(entry) = shard.entry(&set, tag) else {
            shard.admit(set, tag, round, new_hash, content);
            return Delta::NotHeld;
        };
        if sent_hash.is_none_or(|sent| shard.hashes[entry] != sent.get()) {
            shard.store(entry, round, new_hash, content);
            return Delta::NotHeld;
        }
        let begin = into.len();
        if !encode_delta(shard.content(entry), content, into, limit) {
            shard.store(entry, round, new_hash, content);
            return Delta::TooLong;
        }
        // Writes only the changed bytes. This cannot fail; if it did, the copy would be invalid.
        shard.hashes[entry] = 0;
        shard.rounds[entry] = round;
        if apply_delta(&mut &into[begin..], shard.content(entry)).is_ok() {
            shard.hashes[entry] = new_hash;
        }
        Delta::Made
    }

    /// As `delta`, for a destination without guest memory, which keeps the pages too, each in the
    /// entry that the result names. The base of a delta is the version that both
    /// sides have kept, whichever version was sent last. Calls must be in the order in which the
    /// pages are sent.
    pub fn exchange(
        &self,
        slot: SlotId,
        page: u64,
        round: u32,
        content: &[u8],
        into: &mut GuestBytes,
        limit: usize,
    ) -> Exchange {
        let Some(Found { mut shard, set, tag }) = self.find(slot, page, content) else {
            return Exchange::NotHeld;
        };
        // Entries of a set are adjacent in a shard, and sets are assigned to the shards in turn.
        let (ways, first) = (self.ways, set.start);
        let number = |entry: usize, in_all: usize| (in_all * ways + entry - first) as u32;
        let in_all = self.set_of(slot, page);
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
            // This cannot fail; if it did, the entry would differ from the destination's.
            into.truncate(begin);
            shard.store(entry, round, KEPT, content);
            return Exchange::Kept(number(entry, in_all));
        }
        Exchange::Delta(number(entry, in_all))
    }

    /// Number of pages that are held.
    #[must_use]
    pub fn held_pages(&self) -> u64 {
        self.shards.iter().map(|shard| shard.lock().held).sum()
    }

    /// Where the page may be held. `None` if it can't be held.
    fn find(&self, slot: SlotId, page: u64, content: &[u8]) -> Option<Found<'_>> {
        if self.sets == 0 || content.len() != PAGE_SIZE {
            return None;
        }
        let set = self.set_of(slot, page);
        let shard = self.shards[set % self.shards.len()].lock();
        let first = set / self.shards.len() * self.ways;
        // The tag cannot overflow: a slot of 2^48 pages would be 2^60 bytes.
        let tag = (u64::from(slot.0) << 48 | page).wrapping_add(1);
        let set = first..first + self.ways;
        (set.end <= shard.tags.len()).then_some(Found { shard, set, tag })
    }

    /// The number of the page's set. There must be at least one set.
    fn set_of(&self, slot: SlotId, page: u64) -> usize {
        // The sets of each slot start at a different point, or the first pages of all slots would
        // share their sets.
        let begin = u64::from(slot.0).wrapping_mul(0x9e37_79b9_7f4a_7c15) % self.sets as u64;
        ((page % self.sets as u64 + begin) % self.sets as u64) as usize
    }
}

/// The entries of a set in its shard.
type Set = Range<usize>;

/// Where a page may be held. After a panic in another worker an entry's content may be incomplete;
/// its hash is 0 then, so it is not used.
struct Found<'a> {
    shard: MutexGuard<'a, Shard>,
    /// The entries that the page may be held in.
    set: Set,
    /// The page's tag.
    tag: u64,
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

    /// Stores the page in a vacant entry or in one whose page was not sent in the last round, if
    /// any.
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
mod tests;
