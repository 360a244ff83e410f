//! Remembers the pages of all sessions' guests and streams within one memory limit.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use vmferry_codec::{Base, Kept, PageFound, Pages};
use vmferry_memory::{PAGE_SIZE, SlotId};

/// Memory per page: an entry of the map while the map grows and exists twice.
const ENTRY_BYTES: u64 = 256;
/// Memory for the content of a page.
const CONTENT_BYTES: u64 = PAGE_SIZE as u64 + 128;
/// Distinguishes the kept pages of a lane's stream from the pages of slots.
const STREAM: u32 = 1 << 16;

static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// The session of a page, its slot or the lane of its stream, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct PageKey {
    session: u32,
    space: u32,
    page: u64,
}

#[derive(Debug)]
enum Held {
    Zero,
    /// The content and its position in the eviction order.
    Content(Box<[u8; PAGE_SIZE]>, u64),
    /// The content is not known.
    Unknown,
}

#[derive(Debug)]
struct Page {
    hash: Option<u64>,
    held: Held,
    /// The last round in which the page was sent; 0 for the kept pages of a stream.
    round: u32,
}

/// The pages of all sessions. Entries use at most half of the memory; the rest holds the contents
/// of the pages that were sent last.
#[derive(Debug)]
pub struct SeenPages {
    pages: HashMap<PageKey, Page>,
    /// Pages whose content is held, the least recently changed first.
    order: BTreeMap<u64, PageKey>,
    next: u64,
    most_bytes: u64,
    /// Whether a page could not be remembered.
    full: bool,
}

impl SeenPages {
    pub fn new(most_bytes: u64) -> Self {
        let (pages, order) = (HashMap::new(), BTreeMap::new());
        Self { pages, order, next: 0, most_bytes, full: false }
    }

    /// Bytes of memory in use.
    fn bytes(&self) -> u64 {
        self.pages.len() as u64 * ENTRY_BYTES + self.order.len() as u64 * CONTENT_BYTES
    }

    /// Remembers a page. Returns the round in which it was sent before, or 0 if that is not known.
    fn put(&mut self, key: PageKey, content: PageFound<'_>, hash: Option<u64>, round: u32) -> u32 {
        let has_room = (self.pages.len() as u64 + 1) * ENTRY_BYTES <= self.most_bytes / 2;
        let page = match self.pages.entry(key) {
            Entry::Occupied(page) => page.into_mut(),
            Entry::Vacant(place) if has_room => {
                place.insert(Page { hash: None, held: Held::Unknown, round: 0 })
            }
            Entry::Vacant(_) => {
                self.full = true;
                return 0;
            }
        };
        let before = std::mem::replace(&mut page.round, round);
        page.hash = hash;
        let held = std::mem::replace(&mut page.held, Held::Unknown);
        if let Held::Content(_, place) = &held {
            self.order.remove(place);
        }
        match content {
            PageFound::Zero => page.held = Held::Zero,
            PageFound::Unknown => {}
            PageFound::Content(content) => {
                let content = match held {
                    Held::Content(mut held, _) => {
                        *held = *content;
                        held
                    }
                    _ => Box::new(*content),
                };
                page.held = Held::Content(content, self.next);
                self.order.insert(self.next, key);
                self.next += 1;
            }
        }
        while self.bytes() > self.most_bytes
            && let Some((_, oldest)) = self.order.pop_first()
        {
            if let Some(page) = self.pages.get_mut(&oldest) {
                page.held = Held::Unknown;
            }
        }
        before
    }
}

/// The pages of a session's guest while a frame is decoded.
pub struct GuestPages<'a> {
    seen: &'a mut SeenPages,
    session: u32,
    /// The round of the frame.
    round: u32,
    /// A page that was already sent in this round.
    pub twice: Option<(SlotId, u64)>,
}

impl<'a> GuestPages<'a> {
    pub fn new(seen: &'a mut SeenPages, session: u32, round: u32) -> Self {
        Self { seen, session, round, twice: None }
    }

    fn key(&self, slot: SlotId, page: u64) -> PageKey {
        PageKey { session: self.session, space: slot.0.into(), page }
    }
}

impl Pages for GuestPages<'_> {
    fn base(&self, slot: SlotId, page: u64) -> Base<'_> {
        let Some(page) = self.seen.pages.get(&self.key(slot, page)) else { return Base::Unknown };
        match (page.hash, &page.held) {
            (Some(hash), Held::Zero) => Base::Content(&ZEROS, hash),
            (Some(hash), Held::Content(content, _)) => Base::Content(content, hash),
            (Some(hash), Held::Unknown) => Base::Hash(hash),
            (None, _) => Base::Unknown,
        }
    }

    fn found(&mut self, slot: SlotId, page: u64, content: PageFound<'_>, hash: Option<u64>) {
        let before = self.seen.put(self.key(slot, page), content, hash, self.round);
        if before == self.round && self.twice.is_none() {
            self.twice = Some((slot, page));
        }
    }
}

/// For repeated frames: no page is known and none is remembered.
pub struct NoPages;

impl Pages for NoPages {
    fn base(&self, _: SlotId, _: u64) -> Base<'_> {
        Base::Unknown
    }

    fn found(&mut self, _: SlotId, _: u64, _: PageFound<'_>, _: Option<u64>) {}
}

/// The pages that a lane's stream keeps, while a piece is decoded.
pub struct StreamPages<'a> {
    seen: &'a mut SeenPages,
    session: u32,
    lane: u8,
    /// Whether frames are missing that may have kept pages.
    gap: bool,
    /// Number of changes to pages whose content is not held.
    pub unknown: u64,
    /// The target of those changes.
    scratch: [u8; PAGE_SIZE],
}

impl<'a> StreamPages<'a> {
    pub fn new(seen: &'a mut SeenPages, session: u32, lane: u8, gap: bool) -> Self {
        Self { seen, session, lane, gap, unknown: 0, scratch: [0; PAGE_SIZE] }
    }

    fn key(&self, entry: u32) -> PageKey {
        let space = STREAM | u32::from(self.lane);
        PageKey { session: self.session, space, page: entry.into() }
    }
}

impl Kept for StreamPages<'_> {
    fn keep(&mut self, entry: u32, content: &[u8]) {
        if let Ok(content) = content.try_into() {
            self.seen.put(self.key(entry), PageFound::Content(content), None, 0);
        }
    }

    fn page_mut(&mut self, entry: u32) -> Option<&mut [u8]> {
        let key = self.key(entry);
        let SeenPages { pages, order, next, full, .. } = &mut *self.seen;
        match pages.get_mut(&key).map(|page| &mut page.held) {
            Some(Held::Content(content, place)) => {
                order.remove(place);
                order.insert(*next, key);
                *place = *next;
                *next += 1;
                Some(&mut content[..])
            }
            None if !*full && !self.gap => None,
            _ => {
                self.unknown += 1;
                Some(&mut self.scratch)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: SlotId = SlotId(0);

    fn content(byte: u8) -> [u8; PAGE_SIZE] {
        [byte; PAGE_SIZE]
    }

    /// The cost per entry is that of a map that has just grown.
    #[test]
    fn entry_cost_covers_a_growing_map() {
        let bucket = size_of::<(PageKey, Page)>() as u64 + 1;
        assert!(3 * bucket * 8 / 7 <= ENTRY_BYTES, "{bucket}");
    }

    #[test]
    fn zero_pages_stay_within_the_limit() {
        let mut seen = SeenPages::new(1 << 20);
        let mut guest = GuestPages::new(&mut seen, 0, 1);
        guest.found(SLOT, u64::MAX, PageFound::Content(&content(1)), Some(1));
        for page in 0..100_000 {
            guest.found(SLOT, page, PageFound::Zero, Some(page));
        }
        assert!(
            matches!(guest.base(SLOT, u64::MAX), Base::Content(..)),
            "the other half is for contents"
        );
        assert!(matches!(guest.base(SLOT, 99_999), Base::Unknown));
        assert!(seen.bytes() <= 1 << 20 && seen.full);
    }

    #[test]
    fn sessions_share_the_limit() {
        let mut seen = SeenPages::new(1 << 20);
        for session in 0..3 {
            for page in 0..200 {
                let mut guest = GuestPages::new(&mut seen, session, 1);
                guest.found(SLOT, page, PageFound::Content(&content(1)), Some(1));
                let mut stream = StreamPages::new(&mut seen, session, 7, false);
                stream.keep(page as u32, &content(2));
                assert!(seen.bytes() <= 1 << 20);
            }
        }
        // The last pages are held; of the others only the existence is known.
        let mut stream = StreamPages::new(&mut seen, 2, 7, false);
        assert_eq!(stream.page_mut(199), Some(&mut content(2)[..]));
        assert_eq!(stream.unknown, 0);
        assert_eq!(stream.page_mut(3), Some(&mut [0; PAGE_SIZE][..]));
        assert_eq!(stream.unknown, 1);
        assert_eq!(stream.page_mut(200), None, "it was never kept");
        assert!(matches!(GuestPages::new(&mut seen, 0, 2).base(SLOT, 3), Base::Hash(1)));
    }

    /// A page has at most one position in the eviction order, however often it changes.
    #[test]
    fn changing_page_has_one_entry() {
        let mut seen = SeenPages::new(1 << 20);
        for round in 1..1000 {
            let mut guest = GuestPages::new(&mut seen, 0, round);
            match round % 3 {
                0 => guest.found(SLOT, 1, PageFound::Zero, Some(1)),
                1 => guest.found(SLOT, 1, PageFound::Content(&content(1)), Some(1)),
                _ => guest.found(SLOT, 1, PageFound::Unknown, None),
            }
            assert_eq!(guest.twice, None);
        }
        assert!(seen.pages.len() == 1 && seen.order.len() <= 1);
    }

    #[test]
    fn pages_without_memory_holds_nothing() {
        let mut seen = SeenPages::new(0);
        GuestPages::new(&mut seen, 0, 1).found(SLOT, 1, PageFound::Zero, Some(1));
        StreamPages::new(&mut seen, 0, 0, false).keep(1, &content(1));
        assert_eq!(seen.bytes(), 0);
        assert!(StreamPages::new(&mut seen, 0, 0, false).page_mut(1).is_some());
    }
}
