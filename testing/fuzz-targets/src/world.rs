//! A small guest at the destination with some pages placed before.

use std::cell::RefCell;
use std::io::Read;

use vmferry_codec::{CodecError, Decoder, Frame, PageHashes, PlacedPages, ReadError, SumChange};
use vmferry_memory::{
    GuestMemory, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout, is_zero, page_hash,
};

/// Pages of the two slots.
pub const SLOT_PAGES: [u64; 2] = [24, 6];

/// The destination.
pub struct World {
    pub memory: GuestMemory,
    pub hashes: PageHashes,
    decoder: Decoder,
    frame: Frame,
    /// The memory's last known content.
    content: Vec<u8>,
    /// A buffer for the memory's present content.
    found: Vec<u8>,
    /// The initial content, and the initial hashes of the known pages.
    base: Vec<u8>,
    base_hashes: Vec<u64>,
    /// Whether something was placed since then.
    changed: bool,
}

/// Memory of the world's layout, all zero.
pub fn empty_memory() -> GuestMemory {
    let layout = [
        SlotLayout { slot: SlotId(0), gpa: 0, pages: SLOT_PAGES[0] },
        SlotLayout { slot: SlotId(1), gpa: 1 << 32, pages: SLOT_PAGES[1] },
    ];
    GuestMemory::allocate(&layout, MemoryKind::Private).unwrap()
}

/// The content of a page that was placed before.
pub fn base_page(slot: SlotId, page: u64) -> Vec<u8> {
    match page % 3 {
        0 => format!("page {page} of {slot}; ").bytes().cycle().take(PAGE_SIZE).collect(),
        1 => noise(page + 1, PAGE_SIZE),
        _ => vec![0; PAGE_SIZE],
    }
}

/// Reproducible random bytes.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

/// All pages of the world.
pub fn all_pages() -> impl Iterator<Item = PageRun> {
    [SlotId(0), SlotId(1)].into_iter().flat_map(|slot| {
        let pages = SLOT_PAGES[usize::from(slot.0)];
        (0..pages).map(move |first| PageRun { slot, first, pages: 1 })
    })
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
    static EMPTY: RefCell<Option<World>> = const { RefCell::new(None) };
}

impl World {
    /// A world in which no page was ever placed.
    pub fn empty() -> Self {
        Self::of(|_| None)
    }

    /// A world in which a third of the pages are known: text, noise and zeros.
    pub fn populated() -> Self {
        let known = |run: PageRun| run.first < SLOT_PAGES[usize::from(run.slot.0)] / 3;
        Self::of(|run| known(run).then(|| base_page(run.slot, run.first)))
    }

    fn of(page: impl Fn(PageRun) -> Option<Vec<u8>>) -> Self {
        let memory = empty_memory();
        let mut base = read_all(&memory);
        let mut base_hashes = Vec::new();
        for (run, into) in all_pages().zip(base.chunks_exact_mut(PAGE_SIZE)) {
            let content = page(run);
            if let Some(content) = &content {
                into.copy_from_slice(content);
            }
            base_hashes.push(content.map_or(0, |_| page_hash(into, run.slot, run.first)));
        }
        let (decoder, frame) = (Decoder::default(), Frame::new());
        let hashes = PageHashes::for_memory(&memory);
        let (content, found) = (vec![0; base.len()], Vec::new());
        let changed = true;
        let mut world =
            Self { memory, hashes, decoder, frame, content, found, base, base_hashes, changed };
        world.reset();
        world
    }

    /// Restores the initial state. Creating a world for each input would take most of the fuzzer's
    /// time.
    fn reset(&mut self) {
        if !self.changed {
            return;
        }
        self.changed = false;
        let mut change = SumChange::default();
        let contents = self.base.chunks_exact(PAGE_SIZE).zip(self.content.chunks_exact(PAGE_SIZE));
        for ((run, (base, content)), hash) in all_pages().zip(contents).zip(&self.base_hashes) {
            if base != content {
                self.memory.copy_in(run, base).unwrap();
            }
            self.hashes.replace(run.slot, run.first, *hash, &mut change);
        }
        self.hashes.add(change);
        self.content.copy_from_slice(&self.base);
    }

    /// Lends the thread's world in its initial state.
    pub fn with_fresh<R>(body: impl FnOnce(&mut Self) -> R) -> R {
        WORLD.with(|world| Self::lend(world, Self::populated, body))
    }

    /// Lends the thread's empty world.
    pub fn with_empty<R>(body: impl FnOnce(&mut Self) -> R) -> R {
        EMPTY.with(|world| Self::lend(world, Self::empty, body))
    }

    fn lend<R>(
        place: &RefCell<Option<Self>>,
        make: fn() -> Self,
        body: impl FnOnce(&mut Self) -> R,
    ) -> R {
        // A world is not returned after a panic.
        let mut world = place.take().unwrap_or_else(make);
        world.reset();
        let result = body(&mut world);
        place.replace(Some(world));
        result
    }

    /// Reads a frame and places it. Afterward hashes and memory agree, and if the frame is refused,
    /// nothing has changed. `Ok(None)`: there is no frame.
    pub fn place(&mut self, from: &mut impl Read) -> Result<Option<PlacedPages>, CodecError> {
        let digest = self.hashes.sum();
        match self.frame.read_from(from) {
            Ok(Some(_)) => {}
            Ok(None) | Err(ReadError::Io(_)) => return Ok(None),
            Err(ReadError::Wire(error)) => return Err(error.into()),
        }
        let placed = self.decoder.place(&self.frame, &self.memory, &self.hashes, |_| true);
        self.found.resize(self.content.len(), 0);
        read_into(&self.memory, &mut self.found);
        match &placed {
            Ok(_) => {
                self.changed = true;
                std::mem::swap(&mut self.content, &mut self.found);
                self.check();
            }
            Err(error) => {
                assert_eq!(self.hashes.sum(), digest, "the digest after {error}");
                assert!(self.found == self.content, "the memory after {error}");
                assert!(!matches!(error, CodecError::Memory(_)), "the frame's fault: {error}");
            }
        }
        placed.map(Some)
    }

    /// The last placed content of a page.
    pub fn page(&self, run: PageRun) -> &[u8] {
        let before = if run.slot == SlotId(0) { 0 } else { SLOT_PAGES[0] };
        &self.content[(before + run.first) as usize * PAGE_SIZE..][..PAGE_SIZE]
    }

    /// Checks that every page has its hash, and that the digest is their sum.
    fn check(&self) {
        let mut sum = 0_u64;
        for (run, content) in all_pages().zip(self.content.chunks_exact(PAGE_SIZE)) {
            match self.hashes.get(run.slot, run.first) {
                Some(hash) => {
                    assert_eq!(hash, page_hash(content, run.slot, run.first), "{run}");
                    sum = sum.wrapping_add(hash);
                }
                None => assert!(is_zero(content), "{run} was never placed"),
            }
        }
        assert_eq!(self.hashes.sum(), sum);
    }
}

/// The content of a memory with the world's layout.
pub fn read_all(memory: &GuestMemory) -> Vec<u8> {
    let mut content = vec![0; SLOT_PAGES.iter().sum::<u64>() as usize * PAGE_SIZE];
    read_into(memory, &mut content);
    content
}

fn read_into(memory: &GuestMemory, content: &mut [u8]) {
    for run in [SlotId(0), SlotId(1)] {
        let pages = SLOT_PAGES[usize::from(run.0)];
        let before = if run == SlotId(0) { 0 } else { SLOT_PAGES[0] };
        let (first, last) = (before as usize * PAGE_SIZE, (before + pages) as usize * PAGE_SIZE);
        memory.copy_out(PageRun { slot: run, first: 0, pages }, &mut content[first..last]).unwrap();
    }
}
