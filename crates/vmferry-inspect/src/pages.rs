//! The pages that were seen in a session's frames.

use std::collections::{HashMap, VecDeque};

use vmferry_codec::{Base, PageFound, Pages};
use vmferry_memory::{PAGE_SIZE, SlotId};

/// More pages than a guest of 256 GiB has are not remembered at all.
const MOST_PAGES: usize = 64 << 20;

static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

#[derive(Debug)]
enum Held {
    Zero,
    Content(Box<[u8; PAGE_SIZE]>),
    /// The content is not known any more, or never was.
    No,
}

#[derive(Debug)]
struct Page {
    hash: Option<u64>,
    held: Held,
    /// The round in which it came last.
    round: u32,
}

/// Pages by slot and number. The content is held of those that came last, up to a limit.
#[derive(Debug)]
pub struct SeenPages {
    pages: HashMap<(u16, u64), Page>,
    /// Those whose content is held, in the order in which they first were.
    order: VecDeque<(u16, u64)>,
    most: usize,
    /// The round of the frame that is being read.
    pub round: u32,
    /// A page that came twice in that round.
    pub twice: Option<(SlotId, u64)>,
}

impl SeenPages {
    pub fn new(bytes: u64) -> Self {
        let most = usize::try_from(bytes / PAGE_SIZE as u64).unwrap_or(usize::MAX);
        Self { pages: HashMap::new(), order: VecDeque::new(), most, round: 0, twice: None }
    }
}

impl Pages for SeenPages {
    fn base(&self, slot: SlotId, page: u64) -> Base<'_> {
        let Some(page) = self.pages.get(&(slot.0, page)) else { return Base::Unknown };
        match (page.hash, &page.held) {
            (Some(hash), Held::Zero) => Base::Content(&ZEROS, hash),
            (Some(hash), Held::Content(content)) => Base::Content(content, hash),
            (Some(hash), Held::No) => Base::Hash(hash),
            (None, _) => Base::Unknown,
        }
    }

    fn found(&mut self, slot: SlotId, page: u64, content: PageFound<'_>, hash: Option<u64>) {
        let key = (slot.0, page);
        if self.pages.len() >= MOST_PAGES && !self.pages.contains_key(&key) {
            return;
        }
        let round = self.round;
        let known = self.pages.entry(key).or_insert(Page { hash, held: Held::No, round: 0 });
        if known.round == round && self.twice.is_none() {
            self.twice = Some((slot, page));
        }
        (known.hash, known.round) = (hash, round);
        let was_held = matches!(known.held, Held::Content(_));
        match (content, &mut known.held) {
            (PageFound::Content(content), Held::Content(held)) => **held = *content,
            (PageFound::Content(content), held) if self.most > 0 => {
                *held = Held::Content(Box::new(*content));
                if !was_held {
                    self.order.push_back(key);
                }
            }
            (PageFound::Zero, held) => *held = Held::Zero,
            (_, held) => *held = Held::No,
        }
        while self.order.len() > self.most {
            if let Some(oldest) = self.order.pop_front()
                && let Some(page) = self.pages.get_mut(&oldest)
                && matches!(page.held, Held::Content(_))
            {
                page.held = Held::No;
            }
        }
    }
}

/// For frames that came before: no page is known, and none is kept.
pub struct NoPages;

impl Pages for NoPages {
    fn base(&self, _: SlotId, _: u64) -> Base<'_> {
        Base::Unknown
    }

    fn found(&mut self, _: SlotId, _: u64, _: PageFound<'_>, _: Option<u64>) {}
}
