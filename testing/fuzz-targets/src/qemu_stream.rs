//! Any bytes, read as a stream of QEMU's own migration, in any pieces.
//!
//! Pages are long and a fuzzer's input is short, so the input describes the stream: literal bytes,
//! runs of one byte, and snippets of real streams.

use std::sync::Arc;

use vmferry::vmm::streamed::{LONGEST_RECORD, Marks, PageMark, Recogniser};
use vmferry_memory::PAGE_SIZE;
use vmferry_qemu::{Blocks, MainStream, MultifdChannel};

use super::input::Input;

/// The guest's blocks.
pub const LAYOUT: [(&str, u64); 2] = [("pc.ram", 1 << 20), ("/rom@etc/acpi/tables", 32)];

/// The maximum length of a stream.
const MAX_STREAM: usize = 1 << 20;

/// The length of a seed's header: the kind of stream, and the lengths of the pieces in which it
/// arrives.
pub const HEADER: usize = 1 + 2 * 3;

/// Recognizes a stream in pieces and at once.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let multifd = input.byte() & 1 != 0;
    let pieces = [(); 3].map(|()| 1 + usize::from(input.word()));
    let stream = stream(&mut input);
    let (marks, taken) = look(multifd, &stream, &pieces);
    let mut end = 0;
    for mark in &marks.pages {
        assert!(mark.at >= end, "pages overlap at {}", mark.at);
        end = mark.at + PAGE_SIZE;
        assert!(end <= taken, "a page is not completely in the consumed bytes");
        assert!(mark.page < LAYOUT[usize::from(mark.slot.0)].1, "{mark:?}");
        assert!(multifd || stands_behind_its_record(&stream[..mark.at], mark), "{mark:?}");
    }
    assert_eq!(look(multifd, &stream, &[stream.len()]), (marks, taken), "in one piece");
}

/// Whether the bytes end with a page record that has the mark's offset, and the mark's block if the
/// record names one.
fn stands_behind_its_record(before: &[u8], mark: &PageMark) -> bool {
    let offset = mark.page * PAGE_SIZE as u64;
    let name = LAYOUT[usize::from(mark.slot.0)].0;
    let word = (offset | 0x08).to_be_bytes();
    let named = [&word[..], &[name.len() as u8], name.as_bytes()].concat();
    before.ends_with(&(offset | 0x28).to_be_bytes()) || before.ends_with(&named)
}

/// All marks with positions from the beginning of the stream, and the number of consumed bytes.
fn look(multifd: bool, stream: &[u8], pieces: &[usize]) -> (Marks, usize) {
    let blocks = Arc::new(Blocks::new(LAYOUT));
    let mut recogniser: Box<dyn Recogniser> = if multifd {
        Box::new(MultifdChannel::new(blocks))
    } else {
        Box::new(MainStream::new(blocks))
    };
    let (mut all, mut marks) = (Marks::default(), Marks::default());
    let (mut taken, mut come) = (0, 0);
    for piece in pieces.iter().cycle() {
        if come >= stream.len() {
            break;
        }
        come = stream.len().min(come + piece);
        marks.clear();
        let bytes = &stream[taken..come];
        let more = recogniser.look(bytes, &mut marks);
        assert!(more <= bytes.len(), "{more} of {} bytes taken", bytes.len());
        assert!(bytes.len() - more < LONGEST_RECORD, "{} bytes left", bytes.len() - more);
        all.zero_pages += marks.zero_pages;
        all.pages.extend(marks.pages.iter().map(|mark| PageMark { at: taken + mark.at, ..*mark }));
        taken += more;
    }
    (all, taken)
}

fn stream(input: &mut Input) -> Vec<u8> {
    let mut stream = Vec::new();
    while !input.is_empty() && stream.len() < MAX_STREAM {
        match input.byte() % 4 {
            0 | 1 => {
                let length = input.byte();
                stream.extend_from_slice(input.bytes(length.into()));
            }
            2 => {
                let byte = input.byte();
                stream.resize(stream.len() + usize::from(input.word() % 8192), byte);
            }
            _ => snippet(input.byte(), &mut stream),
        }
    }
    stream
}

/// A snippet of a real stream.
fn snippet(which: u8, stream: &mut Vec<u8>) {
    let (ram, rom) = (LAYOUT[0].0, LAYOUT[1].0);
    let mut put = |bytes: &[u8]| stream.extend_from_slice(bytes);
    match which % 8 {
        0 => put(b"QEVM\0\0\0\x03"),
        1 => {
            let table: u64 = LAYOUT.iter().map(|(_, pages)| pages * PAGE_SIZE as u64).sum();
            put(b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04");
            put(&(table | 0x04).to_be_bytes());
            for (name, pages) in LAYOUT {
                put(&[name.len() as u8]);
                put(name.as_bytes());
                put(&(pages * PAGE_SIZE as u64).to_be_bytes());
            }
        }
        2 => put(b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02"),
        3 => put(b"\x02\0\0\0\x02"),
        4 => put(&[&[ram.len() as u8][..], ram.as_bytes()].concat()),
        5 => put(&[&[rom.len() as u8][..], rom.as_bytes()].concat()),
        6 => put(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]),
        _ => {
            put(ram.as_bytes());
            put(&[0; 256][ram.len()..]);
        }
    }
}

/// A seed that produces this stream in these pieces.
pub fn seed(multifd: bool, pieces: [u16; 3], stream: &[u8]) -> Vec<u8> {
    let mut seed = vec![u8::from(multifd)];
    pieces.iter().for_each(|piece| seed.extend_from_slice(&piece.to_le_bytes()));
    let run = |rest: &[u8]| rest.iter().take(8191).take_while(|&&byte| byte == rest[0]).count();
    let mut rest = stream;
    while !rest.is_empty() {
        let length = run(rest);
        if length >= 8 {
            let [low, high] = (length as u16).to_le_bytes();
            seed.extend_from_slice(&[2, rest[0], low, high]);
            rest = &rest[length..];
        } else {
            let mut length = 1;
            while length < rest.len().min(255) && run(&rest[length..]) < 8 {
                length += 1;
            }
            seed.extend_from_slice(&[0, length as u8]);
            seed.extend_from_slice(&rest[..length]);
            rest = &rest[length..];
        }
    }
    debug_assert_eq!(self::stream(&mut Input(&seed[HEADER..])), stream);
    seed
}
