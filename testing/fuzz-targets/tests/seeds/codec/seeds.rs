//! Generates the seeds of the fuzz targets.

use std::sync::Arc;

use vmferry_codec::{
    Batch, Choice, Compressors, DeltaUse, EncodedFrame, Encoder, HotPages, Method, PageHashes,
    encode_delta,
};
use vmferry_memory::{GuestBytes, PAGE_SIZE, PageRun, SlotId};

use vmferry_fuzz_targets::world::{World, base_page, noise, read_all};

/// For targets that take choices: any bytes are valid.
pub fn choices() -> Vec<(String, Vec<u8>)> {
    let choices = |seed| (format!("choices-{seed:02}"), noise(seed, 60 + 12 * seed as usize));
    (0..24).map(choices).collect()
}

/// The page to change, and the records that change it.
pub fn deltas() -> Vec<(String, Vec<u8>)> {
    let changes: [(&str, &[(usize, usize)]); 8] = [
        ("nothing", &[]),
        ("a-byte", &[(5, 1)]),
        ("a-counter", &[(0, 8), (4088, 8)]),
        ("the-last-byte", &[(4095, 1)]),
        ("a-long-patch", &[(100, 300)]),
        ("patches-side-by-side", &[(10, 2), (13, 2), (16, 2), (30, 1)]),
        ("a-half", &[(0, 2048)]),
        ("all", &[(0, 4096)]),
    ];
    let mut seeds = Vec::new();
    for (number, (name, patches)) in changes.into_iter().enumerate() {
        let base = base_page(SlotId(0), number as u64);
        let mut page = base.clone();
        for (first, length) in patches {
            page[*first..first + length].iter_mut().for_each(|byte| *byte ^= 0x55);
        }
        let mut seed = GuestBytes::from([number as u8]);
        assert!(encode_delta(&base, &page, &mut seed, 2 * PAGE_SIZE));
        // A second one follows.
        assert!(encode_delta(&page, &base, &mut seed, 2 * PAGE_SIZE));
        seeds.push((name.to_owned(), seed.to_vec()));
    }
    let mut page = base_page(SlotId(0), 0);
    page.iter_mut().step_by(7).for_each(|byte| *byte ^= 1);
    let mut many = GuestBytes::from([0]);
    assert!(encode_delta(&base_page(SlotId(0), 0), &page, &mut many, 2 * PAGE_SIZE));
    seeds.push(("more-than-127-patches".to_owned(), many.to_vec()));
    seeds
}

/// A source that has sent the world's initial pages.
struct Source {
    world: World,
    hashes: PageHashes,
    encoder: Encoder,
    sequence: u64,
}

impl Source {
    fn new() -> Self {
        let world = World::populated();
        let hashes = PageHashes::for_memory(&world.memory);
        let encoder = Encoder::new(Compressors::default(), Arc::new(HotPages::new(1 << 20)));
        let mut source = Self { world, hashes, encoder, sequence: 0 };
        // Twice: in the first pass nothing is kept, because nothing was sent before.
        let keep = Choice { pack: None, delta: DeltaUse::Make };
        for slot in [SlotId(0), SlotId(1)] {
            let known = (0..24).filter(|page| source.world.hashes.knows(slot, *page));
            let pages: Vec<u64> = known.collect();
            for _ in 0..2 {
                source.frame(slot, &pages, keep);
            }
        }
        assert_eq!(source.hashes.sum(), source.world.hashes.sum());
        source
    }

    fn write(&self, slot: SlotId, first: u64, content: &[u8]) {
        self.world.memory.copy_in(PageRun { slot, first, pages: 1 }, content).unwrap();
    }

    fn frame(&mut self, slot: SlotId, pages: &[u64], choice: Choice) -> Vec<u8> {
        self.sequence += 1;
        let mut frame = EncodedFrame::new();
        let copy = frame.pages_mut(pages.len());
        for (first, into) in pages.iter().zip(copy.chunks_exact_mut(PAGE_SIZE)) {
            let run = PageRun { slot, first: *first, pages: 1 };
            self.world.memory.copy_out(run, into).unwrap();
        }
        let round = self.sequence as u32;
        let batch = Batch { round, slot, pages };
        self.encoder.encode(&mut frame, batch, &self.hashes, choice).unwrap();
        frame.set_sequence(self.sequence);
        let mut bytes = Vec::new();
        frame.write_to(&mut bytes).unwrap();
        bytes
    }
}

fn text(page: u64) -> Vec<u8> {
    format!("new page {page}, ").bytes().cycle().take(PAGE_SIZE).collect()
}

pub fn frames() -> Vec<(String, Vec<u8>)> {
    let methods = [
        ("raw", None),
        ("lz4", Some(Method::lz4())),
        ("zstd", Some(Method::zstd(1))),
        ("zlib", Some(Method::zlib(1))),
    ];
    let mut seeds = Vec::new();
    for (name, pack) in methods {
        let mut source = Source::new();
        for page in 8..12 {
            source.write(SlotId(0), page, &text(page));
        }
        let off = Choice { pack, delta: DeltaUse::Off };
        let make = Choice { pack, delta: DeltaUse::Make };
        // One page: raw pages have their full length.
        seeds.push((format!("{name}-page"), source.frame(SlotId(0), &[8], off)));
        if pack.is_some() {
            let pages = [9, 10, 11, 13, 14, 20];
            seeds.push((format!("{name}-pages-and-zeros"), source.frame(SlotId(0), &pages, off)));
        }
        for page in 0..4 {
            let mut content = base_page(SlotId(0), page);
            content[7] ^= 1;
            content[4000..4008].fill(page as u8);
            source.write(SlotId(0), page, &content);
        }
        let deltas = source.frame(SlotId(0), &[0, 1, 3], make);
        let zeros = source.frame(SlotId(1), &[2, 3, 5], make);
        seeds.push((format!("{name}-deltas"), [deltas, zeros].concat()));
    }
    let mut end = EncodedFrame::new();
    end.end_of_round(1);
    end.set_sequence(1);
    let mut bytes = Vec::new();
    end.write_to(&mut bytes).unwrap();
    seeds.push(("end-of-round".to_owned(), bytes));
    seeds
}

/// The seeds of frames are whole frames that can be placed.
pub fn are_placed(seed: &[u8]) -> bool {
    let (mut world, mut rest) = (World::populated(), seed);
    let before = read_all(&world.memory);
    let mut frames = 0;
    while let Some(placed) = world.place(&mut rest).expect("a frame of a correct source") {
        frames += 1;
        let nothing = placed.content + placed.zero == 0;
        assert!(nothing || read_all(&world.memory) != before || placed.zero > 0);
    }
    frames > 0 && rest.is_empty()
}
