//! Any pages, with any encoding, arrive unchanged.

use std::sync::Arc;

use vmferry_codec::{
    Batch, Choice, Compressors, DeltaUse, EncodedFrame, Encoder, HotPages, Method, PageHashes,
};
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun, SlotId};

use super::input::Input;
use super::world::{SLOT_PAGES, World, empty_memory, noise, read_all};

const METHODS: [Option<Method>; 6] = [
    None,
    Some(Method::lz4()),
    Some(Method::zstd(1)),
    Some(Method::zstd(3)),
    Some(Method::zlib(1)),
    Some(Method::zlib(6)),
];

/// Rounds of writes, each sent in a frame.
pub fn run(data: &[u8]) {
    // The source starts empty, and so must its destination.
    World::with_empty(|destination| send(Input(data), destination));
}

fn send(mut input: Input<'_>, destination: &mut World) {
    let source = empty_memory();
    let hashes = PageHashes::for_memory(&source);
    let hot_pages = [0, 3, 8, 64][input.below(4) as usize];
    let hot = Arc::new(HotPages::new(hot_pages * PAGE_SIZE as u64));
    let mut encoder = Encoder::new(Compressors::default(), hot);
    let mut frame = EncodedFrame::new();
    let mut sequence = 0;
    while !input.is_empty() && sequence < 12 {
        sequence += 1;
        let slot = SlotId(input.below(2) as u16);
        let choice = Choice {
            pack: METHODS[input.below(METHODS.len() as u64) as usize],
            delta: [DeltaUse::Off, DeltaUse::Make][input.below(2) as usize],
        };
        let pages = write(&mut input, &source, slot);
        let copy = frame.pages_mut(pages.len());
        for (page, into) in pages.iter().zip(copy.chunks_exact_mut(PAGE_SIZE)) {
            source.copy_out(PageRun { slot, first: *page, pages: 1 }, into).unwrap();
        }
        let batch = Batch { round: sequence as u32, slot, pages: &pages };
        let counts = encoder.encode(&mut frame, batch, &hashes, choice).unwrap();
        assert_eq!(counts.content_pages() + counts.zero_pages, pages.len() as u64);
        frame.set_sequence(sequence);
        let mut bytes = Vec::new();
        frame.write_to(&mut bytes).unwrap();
        assert_eq!(bytes.len(), frame.wire_bytes());
        let placed = destination.place(&mut &bytes[..]).unwrap().unwrap();
        assert_eq!((placed.content, placed.zero), (counts.content_pages(), counts.zero_pages));
        assert_eq!(destination.hashes.sum(), hashes.sum(), "the digests");
    }
    assert!(read_all(&source) == read_all(&destination.memory), "the memories");
}

/// Writes some pages of a slot, and returns which, ascending.
fn write(input: &mut Input<'_>, memory: &GuestMemory, slot: SlotId) -> Vec<u64> {
    let mut pages = Vec::new();
    for _ in 0..=input.below(10) {
        let first = input.below(SLOT_PAGES[usize::from(slot.0)]);
        let run = PageRun { slot, first, pages: 1 };
        pages.push(first);
        match input.byte() % 6 {
            0 => memory.zero(run).unwrap(),
            1 => memory.copy_in(run, &noise(input.byte().into(), PAGE_SIZE)).unwrap(),
            2 => {
                let most = 1 + usize::from(input.byte() % 32);
                let word = [input.bytes(most), b";"].concat();
                let page: Vec<u8> = word.iter().copied().cycle().take(PAGE_SIZE).collect();
                memory.copy_in(run, &page).unwrap();
            }
            3 => {}
            // A few bytes anywhere, or many at regular distances.
            kind => {
                let mut page = vec![0; PAGE_SIZE];
                memory.copy_out(run, &mut page).unwrap();
                let (mut at, change) = (input.below(PAGE_SIZE as u64) as usize, input.byte());
                let step = if kind == 4 { PAGE_SIZE } else { 1 + usize::from(input.byte()) };
                while let Some(byte) = page.get_mut(at) {
                    *byte ^= change;
                    at += step;
                }
                memory.copy_in(run, &page).unwrap();
            }
        }
    }
    pages.sort_unstable();
    pages.dedup();
    pages
}
