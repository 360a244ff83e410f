//! Pieces of a stream. Encoded pieces arrive unchanged, whatever their marks say. Pieces damaged
//! with matching checksums give an error or the same bytes.

use vmferry_codec::{
    Choice, Compressors, Decompressors, DeltaUse, EncodedFrame, Frame, HotPages, Method, PageMark,
    Piece, StreamDecoder, StreamEncoder,
};
use vmferry_memory::{PAGE_SIZE, SlotId};
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader, table_checksum};

use super::input::Input;
use super::world::noise;

const METHODS: [Option<Method>; 4] =
    [None, Some(Method::lz4()), Some(Method::zstd(1)), Some(Method::zlib(1))];

/// The number of pages that both sides keep.
const ENTRIES: u32 = 8;

/// Sends pieces until the input ends or a piece is damaged.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let kept = HotPages::new(u64::from(ENTRIES) * PAGE_SIZE as u64);
    let mut encoder = StreamEncoder::new(Compressors::default());
    let mut decoder = StreamDecoder::new(Decompressors::default(), ENTRIES);
    let (mut offset, mut pages) = (0, vec![noise(1, PAGE_SIZE); 12]);
    for sequence in 1..12 {
        let (bytes, marks) = piece(&mut input, &mut pages);
        let choice = Choice {
            pack: METHODS[input.below(4) as usize],
            delta: [DeltaUse::Off, DeltaUse::Make][input.below(2) as usize],
        };
        let mut frame = EncodedFrame::new();
        frame.bytes_mut(bytes.len()).copy_from_slice(&bytes);
        let (pages, round) = (&marks[..], sequence as u32);
        frame.divide(
            Piece { offset, bytes: bytes.len(), pages, zero_pages: 0, round },
            &kept,
            choice,
        );
        encoder.encode(&mut frame, choice.pack).unwrap();
        frame.set_sequence(sequence);
        let mut wire = Vec::new();
        frame.write_to(&mut wire).unwrap();
        let damaged = damage(&mut input, &mut wire);
        let mut frame = Frame::new();
        let decoded = match frame.read_from(&mut &wire[..]) {
            Ok(Some(_)) => decoder.decode(&frame).ok().map(|piece| piece.bytes.to_vec()),
            _ => None,
        };
        match decoded {
            Some(decoded) => assert!(decoded == bytes, "other bytes than the source sent"),
            None => assert!(damaged, "a valid piece is refused"),
        }
        if damaged || input.is_empty() {
            return;
        }
        offset += bytes.len() as u64;
    }
}

/// Records, other bytes, and mostly correct marks.
fn piece(input: &mut Input<'_>, pages: &mut [Vec<u8>]) -> (Vec<u8>, Vec<PageMark>) {
    let (mut bytes, mut marks) = (Vec::new(), Vec::new());
    for _ in 0..=input.below(4) {
        let most = usize::from(input.byte());
        bytes.extend_from_slice(input.bytes(most));
        let page = input.below(pages.len() as u64);
        let content = &mut pages[page as usize];
        match input.byte() % 4 {
            0 => content.fill(input.byte()),
            1 => content[usize::from(input.word()) % PAGE_SIZE] ^= input.byte(),
            2 => *content = noise(input.word().into(), PAGE_SIZE),
            _ => {}
        }
        let wrong = if input.byte().is_multiple_of(8) { usize::from(input.word()) } else { 0 };
        marks.push(PageMark { at: bytes.len() + wrong, slot: SlotId(0), page });
        bytes.extend_from_slice(content);
    }
    (bytes, marks)
}

/// Changes something and corrects the checksums of header and table. Returns whether anything
/// changed.
fn damage(input: &mut Input<'_>, wire: &mut [u8]) -> bool {
    if !input.byte().is_multiple_of(3) {
        return false;
    }
    let at = usize::from(input.word()) % wire.len();
    let by = input.byte();
    wire[at] ^= by;
    let Some(head) = wire.first_chunk::<FRAME_HEADER_BYTES>() else { return by != 0 };
    let mut head = *head;
    // Both checksums are the same CRC-32C.
    let checksum = table_checksum(&head[..FRAME_HEADER_BYTES - 4]);
    head[FRAME_HEADER_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
    let Ok(header) = FrameHeader::parse(&head) else { return by != 0 };
    let table = FRAME_HEADER_BYTES..FRAME_HEADER_BYTES + header.table_bytes();
    let Some(table) = wire.get(table) else { return by != 0 };
    let header = FrameHeader { table_checksum: table_checksum(table), ..header };
    wire[..FRAME_HEADER_BYTES].copy_from_slice(&header.encode());
    by != 0
}
