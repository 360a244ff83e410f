//! Frames to pages.
//!
//! A frame is read whole into a [`Frame`], checked there, and only then placed: a damaged frame
//! changes nothing in the guest.

use std::io::{self, Read};

use vmferry_memory::{GuestMemory, MemoryError, PAGE_SIZE, page_hash, zero_page_hash};
use vmferry_wire::{
    Encoding, FRAME_HEADER_BYTES, FrameHeader, FrameKind, Run, RunTable, WireError,
};

use crate::encode::FrameCounts;
use crate::hashes::PageHashes;

/// Why a frame can't be placed.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The frame breaks the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The pages are not those that were sent.
    #[error(
        "the pages of frame {sequence} hash to {found:#018x}, the source sent {expected:#018x}"
    )]
    ContentSum {
        /// The frame's number on its lane.
        sequence: u64,
        /// What the source said.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// Pages that the sender of this frame must not send.
    #[error("frame {sequence} holds page {page}, which does not belong on this lane")]
    Stray {
        /// The frame's number on its lane.
        sequence: u64,
        /// First page of the stray run.
        page: u64,
    },
    /// The guest's memory does not take them.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A received frame and its buffers, reused from frame to frame.
#[derive(Debug, Default)]
pub struct Frame {
    header: Option<FrameHeader>,
    /// Run table, then payload.
    bytes: Vec<u8>,
}

/// Why no frame was read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The channel failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// What came is no frame.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl Frame {
    /// A frame without buffers; they grow at first use.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a whole frame and returns its header. `Ok(None)` is the channel's end between two
    /// frames. What is allocated is bounded by the wire format's limits.
    ///
    /// # Errors
    /// The channel's, its end within a frame, or a header that is not one.
    pub fn read_from(&mut self, reader: &mut impl Read) -> Result<Option<FrameHeader>, ReadError> {
        self.header = None;
        let mut header = [0; FRAME_HEADER_BYTES];
        let first = loop {
            match reader.read(&mut header) {
                Ok(0) => return Ok(None),
                Ok(read) => break read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        };
        reader.read_exact(&mut header[first..])?;
        let header = FrameHeader::parse(&header)?;
        let bytes = header.table_bytes() + header.payload_bytes as usize;
        if self.bytes.len() < bytes {
            self.bytes.resize(bytes, 0);
        }
        reader.read_exact(&mut self.bytes[..bytes])?;
        self.header = Some(header);
        Ok(Some(header))
    }

    /// The header of the frame that was read last.
    #[must_use]
    pub fn header(&self) -> Option<&FrameHeader> {
        self.header.as_ref()
    }

    fn parts(&self, header: &FrameHeader) -> (&[u8], &[u8]) {
        let end = header.table_bytes() + header.payload_bytes as usize;
        self.bytes[..end].split_at(header.table_bytes())
    }
}

/// Checks and places the frames of one lane. It belongs to the lane's worker for the whole
/// migration.
#[derive(Debug, Default)]
pub struct Decoder {
    /// Hashes of the frame's pages, kept from the check to the recording.
    page_hashes: Vec<u64>,
}

impl Decoder {
    /// A decoder.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Checks every page of a frame, then places them all and records their hashes. A frame that
    /// ends a round has nothing to place. `belongs` says whether a run may come in this frame.
    /// Returns what was placed.
    ///
    /// # Errors
    /// A frame that breaks a rule or is damaged: no page of it was placed then. A page outside
    /// memory can't occur after the checks.
    pub fn place(
        &mut self,
        frame: &Frame,
        memory: &GuestMemory,
        hashes: &PageHashes,
        belongs: impl Fn(&Run) -> bool,
    ) -> Result<FrameCounts, CodecError> {
        let mut counts = FrameCounts::default();
        let Some(header) = frame.header().filter(|header| header.kind == FrameKind::Pages) else {
            return Ok(counts);
        };
        let (table, payload) = frame.parts(header);
        let slot_pages = memory.slot(header.slot)?.pages();
        let table = RunTable::parse(header, table, slot_pages)?;
        if let Some(stray) = table.runs().find(|run| !belongs(run)) {
            return Err(CodecError::Stray { sequence: header.sequence, page: stray.first });
        }
        self.check(header, &table, payload)?;
        let (mut change, mut placed, mut at) = (0_u64, 0, 0);
        for run in table.runs() {
            let end = at + run.payload_bytes();
            place_run(header, run, &payload[at..end], memory, hashes)?;
            at = end;
            match run.encoding {
                Encoding::Zero => counts.zero_pages += u64::from(run.pages),
                Encoding::Raw => counts.content_pages += u64::from(run.pages),
            }
            for page in run.first..run.first + u64::from(run.pages) {
                let hash = self.page_hashes[placed];
                change = change.wrapping_add(hashes.replace(header.slot, page, hash));
                placed += 1;
            }
        }
        hashes.add(change);
        Ok(counts)
    }

    fn check(
        &mut self,
        header: &FrameHeader,
        table: &RunTable<'_>,
        payload: &[u8],
    ) -> Result<(), CodecError> {
        let slot = header.slot;
        self.page_hashes.clear();
        let mut contents = payload.chunks_exact(PAGE_SIZE);
        for run in table.runs() {
            let pages = run.first..run.first + u64::from(run.pages);
            match run.encoding {
                Encoding::Zero => {
                    self.page_hashes.extend(pages.map(|page| zero_page_hash(slot, page)));
                }
                Encoding::Raw => {
                    let raw = pages.zip(contents.by_ref());
                    self.page_hashes.extend(raw.map(|(page, raw)| page_hash(raw, slot, page)));
                }
            }
        }
        let found = self.page_hashes.iter().fold(0_u64, |sum, hash| sum.wrapping_add(*hash));
        if found == header.content_sum {
            Ok(())
        } else {
            let (sequence, expected) = (header.sequence, header.content_sum);
            Err(CodecError::ContentSum { sequence, expected, found })
        }
    }
}

fn place_run(
    header: &FrameHeader,
    run: Run,
    payload: &[u8],
    memory: &GuestMemory,
    hashes: &PageHashes,
) -> Result<(), CodecError> {
    if run.encoding == Encoding::Raw {
        let pages = run.in_slot(header.slot);
        // All pages of a run have mostly one history, and both ways are right for any page.
        if hashes.knows(header.slot, run.first) {
            memory.copy_in(pages, payload)?;
        } else {
            memory.copy_in_new(pages, payload)?;
        }
        return Ok(());
    }
    // Memory begins as zeros: a page that was never placed is one already, and writing it would
    // populate it.
    for page in run.first..run.first + u64::from(run.pages) {
        if hashes.knows(header.slot, page) {
            let one = Run { first: page, pages: 1, ..run };
            memory.zero(one.in_slot(header.slot))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmferry_memory::{MemoryKind, PageRun, SlotId, SlotLayout, whole_hash};

    use super::*;
    use crate::{EncodedFrame, Encoder};

    const PAGES: u64 = 64;
    const STRAY: u64 = 63;

    fn memory() -> GuestMemory {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
        GuestMemory::allocate(&layout, MemoryKind::Private).unwrap()
    }

    struct Side {
        memory: GuestMemory,
        hashes: PageHashes,
    }

    impl Side {
        fn new() -> Self {
            let memory = memory();
            Self { hashes: PageHashes::for_memory(&memory), memory }
        }

        fn encode(&self, sequence: u64, pages: &[u64]) -> Vec<u8> {
            let mut frame = EncodedFrame::new();
            let copy = frame.pages_mut(pages.len());
            for (page, into) in pages.iter().zip(copy.chunks_exact_mut(PAGE_SIZE)) {
                self.memory.copy_out(run(*page), into).unwrap();
            }
            let counts =
                Encoder::new().encode(&mut frame, 1, sequence, SlotId(0), pages, &self.hashes);
            assert_eq!(counts.content_pages + counts.zero_pages, pages.len() as u64);
            let mut bytes = Vec::new();
            frame.write_to(&mut bytes).unwrap();
            assert_eq!(bytes.len(), frame.wire_bytes());
            bytes
        }

        fn place(&self, bytes: &[u8]) -> Result<u64, CodecError> {
            let mut frame = Frame::new();
            match frame.read_from(&mut &bytes[..]) {
                Ok(Some(_)) => Decoder::new()
                    .place(&frame, &self.memory, &self.hashes, |run| run.first != STRAY)
                    .map(|counts| counts.content_pages + counts.zero_pages),
                Ok(None) => Ok(0),
                Err(ReadError::Wire(error)) => Err(error.into()),
                Err(ReadError::Io(error)) => panic!("{error}"),
            }
        }
    }

    fn run(page: u64) -> PageRun {
        PageRun { slot: SlotId(0), first: page, pages: 1 }
    }

    /// Two out of three pages have content; 0 makes a page of zeros.
    fn fill(memory: &GuestMemory, page: u64, byte: u8) {
        memory.copy_in(run(page), &[byte; PAGE_SIZE]).unwrap();
    }

    proptest! {
        #[test]
        fn what_is_placed_is_what_was_sent(
            writes in prop::collection::vec((0..STRAY - 1, 0_u8..3), 1..200)
        ) {
            let (source, destination) = (Side::new(), Side::new());
            for (sequence, batch) in writes.chunks(20).enumerate() {
                let mut pages: Vec<u64> = batch.iter().map(|(page, _)| *page).collect();
                pages.sort_unstable();
                pages.dedup();
                for (page, byte) in batch {
                    fill(&source.memory, *page, *byte);
                }
                let bytes = source.encode(sequence as u64 + 1, &pages);
                prop_assert_eq!(destination.place(&bytes).unwrap(), pages.len() as u64);
            }
            prop_assert_eq!(source.hashes.sum(), destination.hashes.sum());
            prop_assert_eq!(
                whole_hash(&source.memory).unwrap(),
                whole_hash(&destination.memory).unwrap()
            );
        }
    }

    #[test]
    fn a_page_of_zeros_populates_nothing_unless_it_must() {
        let (source, destination) = (Side::new(), Side::new());
        destination.place(&source.encode(1, &[3, 4, 5])).unwrap();
        assert!(destination.memory.populated().unwrap().is_empty());
        fill(&source.memory, 4, 1);
        destination.place(&source.encode(2, &[3, 4, 5])).unwrap();
        fill(&source.memory, 4, 0);
        destination.place(&source.encode(3, &[4])).unwrap();
        assert_eq!(whole_hash(&destination.memory).unwrap().pages, 0);
        assert_eq!(source.hashes.sum(), destination.hashes.sum());
    }

    #[test]
    fn a_damaged_frame_places_nothing() {
        let source = Side::new();
        for page in 0..3 {
            fill(&source.memory, page, 7);
        }
        let good = source.encode(1, &[0, 1, 2, 9]);
        for at in (0..good.len()).step_by(13).chain(good.len() - 8..good.len()) {
            let destination = Side::new();
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(destination.place(&bad).is_err(), "byte {at}");
            assert!(destination.memory.populated().unwrap().is_empty(), "byte {at}");
            assert_eq!(destination.hashes.sum(), 0);
        }
    }

    #[test]
    fn a_cut_frame_is_an_error_and_the_end_between_frames_is_not() {
        let source = Side::new();
        fill(&source.memory, 1, 7);
        let good = source.encode(1, &[1]);
        for length in [1, 47, 48, 60, 64, good.len() - 1] {
            let error = Frame::new().read_from(&mut &good[..length]).unwrap_err();
            assert!(matches!(error, ReadError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof));
        }
        assert!(Frame::new().read_from(&mut &[][..]).unwrap().is_none());
    }

    #[test]
    fn a_slot_that_is_not_there_is_an_error() {
        let side = Side::new();
        let mut frame = EncodedFrame::new();
        frame.pages_mut(1).fill(1);
        Encoder::new().encode(&mut frame, 1, 1, SlotId(7), &[0], &side.hashes);
        let mut bytes = Vec::new();
        frame.write_to(&mut bytes).unwrap();
        assert!(matches!(
            side.place(&bytes),
            Err(CodecError::Memory(MemoryError::NoSuchSlot { .. }))
        ));
    }

    #[test]
    fn a_page_of_another_lane_is_an_error_and_places_nothing() {
        let (source, destination) = (Side::new(), Side::new());
        fill(&source.memory, 1, 7);
        let error = destination.place(&source.encode(1, &[1, STRAY])).unwrap_err();
        assert!(matches!(error, CodecError::Stray { page: STRAY, .. }), "{error}");
        assert!(destination.memory.populated().unwrap().is_empty());
    }

    #[test]
    fn the_end_of_a_round_places_nothing() {
        let side = Side::new();
        let mut frame = EncodedFrame::new();
        Encoder::new().end_of_round(&mut frame, 4, 8);
        let mut bytes = Vec::new();
        frame.write_to(&mut bytes).unwrap();
        let mut received = Frame::new();
        let header = received.read_from(&mut &bytes[..]).unwrap().unwrap();
        assert_eq!((header.kind, header.round, header.sequence), (FrameKind::EndOfRound, 4, 8));
        assert_eq!(side.place(&bytes).unwrap(), 0);
    }
}
