//! Pages to frames.

use std::io::{self, IoSlice, Write};

use vmferry_memory::{PAGE_SIZE, SlotId, is_zero, page_hash, zero_page_hash};
use vmferry_wire::{Encoding, FRAME_HEADER_BYTES, FrameHeader, FrameKind, Run, table_checksum};

use crate::hashes::PageHashes;

/// A frame and its buffers, reused from frame to frame: the pages as copied out of the guest,
/// the header with the run table, and which pages of the copy are sent.
#[derive(Debug, Default)]
pub struct EncodedFrame {
    /// Header and run table.
    head: Vec<u8>,
    /// The copy, in the order of the pages given to [`Encoder::encode`].
    copy: Vec<u8>,
    /// Pieces of the copy that are the payload, as page indices of the copy.
    sent: Vec<(usize, usize)>,
    payload_bytes: usize,
}

impl EncodedFrame {
    /// A frame without buffers; they grow at first use.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The buffer for the copy of `pages` pages, to be filled before encoding.
    pub fn pages_mut(&mut self, pages: usize) -> &mut [u8] {
        let bytes = pages * PAGE_SIZE;
        if self.copy.len() < bytes {
            self.copy.resize(bytes, 0);
        }
        &mut self.copy[..bytes]
    }

    /// Length on the wire.
    #[must_use]
    pub fn wire_bytes(&self) -> usize {
        self.head.len() + self.payload_bytes
    }

    /// Writes the frame, with as few calls as the writer allows.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        // Runs of zeros cut the payload into at most 32 pieces of 64 pages.
        const PIECES: usize = 33;
        let mut slices = [IoSlice::new(&[]); PIECES];
        slices[0] = IoSlice::new(&self.head);
        let mut used = 1;
        for (first, end) in &self.sent {
            if used == PIECES {
                write_all_vectored(writer, &mut slices)?;
                used = 0;
            }
            slices[used] = IoSlice::new(&self.copy[first * PAGE_SIZE..end * PAGE_SIZE]);
            used += 1;
        }
        write_all_vectored(writer, &mut slices[..used])
    }
}

fn write_all_vectored(writer: &mut impl Write, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        match writer.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut slices, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What a frame holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameCounts {
    /// Pages with content.
    pub content_pages: u64,
    /// Pages of zeros, which cost no payload.
    pub zero_pages: u64,
}

/// Encodes the frames of one lane. It belongs to the lane's worker for the whole migration.
#[derive(Debug, Default)]
pub struct Encoder {
    runs: Vec<Run>,
}

impl Encoder {
    /// An encoder.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Encodes the copies of `pages` (ascending page indices of `slot`) that stand at the
    /// beginning of [`EncodedFrame::pages_mut`], in that order, and records their hashes.
    ///
    /// # Panics
    /// If the frame's buffer does not hold so many pages.
    pub fn encode(
        &mut self,
        frame: &mut EncodedFrame,
        round: u32,
        sequence: u64,
        slot: SlotId,
        pages: &[u64],
        hashes: &PageHashes,
    ) -> FrameCounts {
        let EncodedFrame { head, copy, sent, payload_bytes } = frame;
        let (mut counts, mut content_sum, mut change) = (FrameCounts::default(), 0_u64, 0_u64);
        self.runs.clear();
        sent.clear();
        let contents = copy[..pages.len() * PAGE_SIZE].chunks_exact(PAGE_SIZE);
        for (index, (&page, content)) in pages.iter().zip(contents).enumerate() {
            let (encoding, hash) = if is_zero(content) {
                counts.zero_pages += 1;
                (Encoding::Zero, zero_page_hash(slot, page))
            } else {
                counts.content_pages += 1;
                match sent.last_mut() {
                    Some((_, end)) if *end == index => *end += 1,
                    _ => sent.push((index, index + 1)),
                }
                (Encoding::Raw, page_hash(content, slot, page))
            };
            content_sum = content_sum.wrapping_add(hash);
            change = change.wrapping_add(hashes.replace(slot, page, hash));
            match self.runs.last_mut() {
                Some(run)
                    if run.encoding == encoding && run.first + u64::from(run.pages) == page =>
                {
                    run.pages += 1;
                }
                _ => self.runs.push(Run { first: page, pages: 1, encoding }),
            }
        }
        hashes.add(change);
        *payload_bytes = counts.content_pages as usize * PAGE_SIZE;
        head.clear();
        head.resize(FRAME_HEADER_BYTES, 0);
        for run in &self.runs {
            run.encode(head);
        }
        let header = FrameHeader {
            kind: FrameKind::Pages,
            slot,
            round,
            runs: self.runs.len() as u32,
            sequence,
            payload_bytes: *payload_bytes as u32,
            content_sum,
            table_checksum: table_checksum(&head[FRAME_HEADER_BYTES..]),
        };
        head[..FRAME_HEADER_BYTES].copy_from_slice(&header.encode());
        counts
    }

    /// Makes the frame that says that the lane has sent all of a round.
    pub fn end_of_round(&mut self, frame: &mut EncodedFrame, round: u32, sequence: u64) {
        let header = FrameHeader {
            kind: FrameKind::EndOfRound,
            slot: SlotId(0),
            round,
            runs: 0,
            sequence,
            payload_bytes: 0,
            content_sum: 0,
            table_checksum: table_checksum(&[]),
        };
        frame.sent.clear();
        frame.payload_bytes = 0;
        frame.head.clear();
        frame.head.extend_from_slice(&header.encode());
    }
}
