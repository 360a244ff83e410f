//! Frames with correct checksums, so that the code after the checksum tests is reached: valid
//! frames, valid frames with a few changes, and run tables over any payload.

use std::cell::RefCell;

use vmferry_codec::{Compress, Compressors, Method};
use vmferry_memory::{PAGE_SIZE, PageRun, SlotId, page_hash, zero_page_hash};
use vmferry_wire::{
    Algorithm, Encoding, FRAME_HEADER_BYTES, FrameHeader, FrameKind, Run, table_checksum,
};

use super::input::Input;
use super::world::{SLOT_PAGES, World};

/// A frame under construction.
struct Draft {
    header: FrameHeader,
    runs: Vec<Run>,
    raw: Vec<u8>,
    packed: Vec<u8>,
    /// The expected pages of the runs, if it is placed.
    content: Vec<(PageRun, Vec<u8>)>,
    /// Whether it is valid.
    valid: bool,
}

/// Builds a frame from the bytes and places it.
pub fn run(data: &[u8]) {
    World::with_fresh(|world| {
        let mut input = Input(data);
        for _ in 0..4 {
            let draft = Draft::new(&mut input, world);
            let (valid, content) = (draft.valid, draft.content.clone());
            let bytes = draft.finish(&mut input);
            let placed = world.place(&mut &bytes.0[..]);
            if valid && !bytes.1 {
                let placed = placed.unwrap().unwrap();
                assert_eq!((placed.content + placed.zero) as usize, content.len());
                for (run, expected) in content {
                    assert!(world.page(run) == expected, "{run}");
                }
            }
            if input.is_empty() {
                return;
            }
        }
    });
}

impl Draft {
    fn new(input: &mut Input<'_>, world: &World) -> Self {
        let flags = input.byte();
        let algorithm = Algorithm::from_number(flags & 3);
        let slot = SlotId(u16::from(flags >> 2 & 1));
        let header = FrameHeader {
            algorithm,
            slot,
            kind: FrameKind::Pages,
            ..FrameHeader::end_of_round(1, 1)
        };
        let (runs, raw, packed) = (Vec::new(), Vec::new(), Vec::new());
        let mut draft = Self { header, runs, raw, packed, content: Vec::new(), valid: true };
        let deltas = draft.add_runs(input, world);
        draft.header.delta_bytes = deltas.len() as u32;
        draft.packed.extend_from_slice(&deltas);
        if flags & 8 != 0 {
            // Any bytes for the decoders; their declared length is any number too.
            draft.valid = false;
            let most = usize::from(input.word());
            draft.packed = input.bytes(most).to_vec();
            draft.header.delta_bytes = u32::from(input.word());
        } else if let Some(algorithm) = algorithm {
            draft.packed = compressed(algorithm, &draft.packed);
        }
        draft
    }

    /// Adds runs with their pages. Returns the records of delta runs.
    fn add_runs(&mut self, input: &mut Input<'_>, world: &World) -> Vec<u8> {
        let slot = self.header.slot;
        let slot_pages = SLOT_PAGES[usize::from(slot.0)];
        let (mut first, mut deltas) = (0, Vec::new());
        for _ in 0..=input.below(8) {
            first += input.below(4);
            let pages = 1 + input.below(5);
            let encoding = match (input.byte() % 4, self.header.algorithm) {
                (0, _) => Encoding::Zero,
                (1, _) | (2, None) => Encoding::Raw,
                (2, Some(_)) => Encoding::Packed,
                _ => Encoding::Delta,
            };
            if first + pages > slot_pages {
                self.valid &= !self.runs.is_empty();
                if !input.byte().is_multiple_of(8) {
                    break;
                }
                self.valid = false;
            }
            let base_sum_at = deltas.len();
            if encoding == Encoding::Delta {
                deltas.extend_from_slice(&[0; 8]);
            }
            let (mut base_sum, mut content_sum) = (0_u64, 0_u64);
            for page in first..first + pages {
                let run = PageRun { slot, first: page, pages: 1 };
                let content = match encoding {
                    Encoding::Zero => vec![0; PAGE_SIZE],
                    Encoding::Delta => {
                        let known = world.hashes.get(slot, page);
                        self.valid &= known.is_some();
                        base_sum = base_sum.wrapping_add(known.unwrap_or(0));
                        let base =
                            if page < slot_pages { world.page(run) } else { &[0; PAGE_SIZE] };
                        changed(input, base, &mut deltas)
                    }
                    Encoding::Raw | Encoding::Packed => {
                        let most = 1 + usize::from(input.byte() % 16);
                        let word = [input.bytes(most), b"."].concat();
                        word.iter().copied().cycle().take(PAGE_SIZE).collect()
                    }
                };
                content_sum = content_sum.wrapping_add(match encoding {
                    Encoding::Zero => zero_page_hash(slot, page),
                    _ => page_hash(&content, slot, page),
                });
                match encoding {
                    Encoding::Raw => self.raw.extend_from_slice(&content),
                    Encoding::Packed => self.packed.extend_from_slice(&content),
                    Encoding::Zero | Encoding::Delta => {}
                }
                self.content.push((run, content));
            }
            if encoding == Encoding::Delta {
                deltas[base_sum_at..][..8].copy_from_slice(&base_sum.to_le_bytes());
            }
            self.runs.push(Run { first, pages: pages as u32, encoding, content_sum });
            first += pages;
        }
        deltas
    }

    /// The frame's bytes, and whether they were changed.
    fn finish(mut self, input: &mut Input<'_>) -> (Vec<u8>, bool) {
        let changes = input.byte() % 5;
        let mut algorithm = self.header.algorithm.map_or(0, Algorithm::number);
        let (mut lengths, mut payload) = ((0, 0), Vec::new());
        for change in 0..changes {
            if change == 0 {
                // Most changes are within the payload.
                let bytes =
                    if input.byte().is_multiple_of(4) { &mut self.raw } else { &mut self.packed };
                let at = input.word() as usize;
                let length = bytes.len().max(1);
                if let Some(byte) = bytes.get_mut(at % length) {
                    *byte ^= input.byte();
                }
                continue;
            }
            let index = input.byte() as usize % self.runs.len().max(1);
            let run = self.runs.get_mut(index);
            match (input.byte() % 12, run) {
                (0, _) => self.packed.truncate(self.packed.len() - self.packed.len().min(1)),
                (1, _) => self.packed.truncate(input.word().into()),
                (2, _) => self.packed.extend_from_slice(input.bytes(9)),
                (3, _) => self.header.delta_bytes = input.number() as u32,
                (4, Some(run)) => run.pages = input.number() as u32,
                (5, Some(run)) => run.first = input.number(),
                (6, Some(run)) => run.encoding = encoding(input.byte()),
                (7, Some(run)) => run.content_sum ^= input.number(),
                (8, _) => algorithm = input.byte(),
                (9, _) => self.header.slot.0 = input.number() as u16,
                (10, _) => lengths = (input.byte() as i8, input.byte() as i8),
                _ => self.header.sequence = input.number(),
            }
        }
        payload.extend_from_slice(&self.raw);
        payload.extend_from_slice(&self.packed);
        let mut table = Vec::new();
        self.runs.iter().for_each(|run| run.encode(&mut table));
        self.header.runs = self.runs.len() as u32;
        let grown = |length: usize, by: i8| (length as u32).wrapping_add_signed(by.into());
        self.header.payload_bytes = grown(payload.len(), lengths.0);
        self.header.packed_bytes = grown(self.packed.len(), lengths.1);
        self.header.table_checksum = table_checksum(&table);
        let mut head = self.header.encode();
        head[5] = algorithm;
        // Both checksums are the same CRC-32C.
        let checksum = table_checksum(&head[..FRAME_HEADER_BYTES - 4]);
        head[FRAME_HEADER_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
        // The bytes that are read after a payload that declares too much.
        ([&head[..], &table, &payload, &[0; 128]].concat(), changes > 0)
    }
}

fn encoding(number: u8) -> Encoding {
    match number % 4 {
        0 => Encoding::Zero,
        1 => Encoding::Raw,
        2 => Encoding::Packed,
        _ => Encoding::Delta,
    }
}

/// A few patches of a page, and the page that results. They are not always the shortest.
fn changed(input: &mut Input<'_>, base: &[u8], records: &mut Vec<u8>) -> Vec<u8> {
    let mut page = base.to_vec();
    let patches = input.byte() % 4;
    records.push(patches);
    let mut at = 0;
    for _ in 0..patches {
        let gap = usize::from(input.byte() % 0x80);
        let length = 1 + usize::from(input.byte() % 8);
        records.extend_from_slice(&[gap as u8, length as u8 - 1]);
        at += gap;
        for _ in 0..length {
            page[at] = input.byte();
            records.push(page[at]);
            at += 1;
        }
    }
    page
}

fn compressed(algorithm: Algorithm, content: &[u8]) -> Vec<u8> {
    if content.is_empty() {
        return Vec::new();
    }
    let method = match algorithm {
        Algorithm::Zlib => Method::zlib(1),
        Algorithm::Zstd => Method::zstd(1),
        Algorithm::Lz4 => Method::lz4(),
    };
    thread_local! {
        static MADE: RefCell<[Option<Box<dyn Compress>>; 3]> =
            const { RefCell::new([const { None }; 3]) };
    }
    MADE.with_borrow_mut(|made| {
        let compressor = made[usize::from(algorithm.number()) - 1]
            .get_or_insert_with(|| Compressors::default().make(method).unwrap());
        let mut packed = vec![0; 2 * content.len() + 1024];
        let length = compressor.compress(content, &mut packed).unwrap().unwrap();
        packed.truncate(length);
        packed
    })
}
