//! A frame to send: its head, the copy of its pages, and the ranges of the copy that are sent.

use std::io::{self, IoSlice, Write};

use vmferry_memory::{GuestBytes, PAGE_SIZE};
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader};

use crate::stream::Division;

/// A frame and its buffers, reused from frame to frame: the copy of guest pages or of a piece of a
/// stream, the header with the table, the ranges of the copy that are sent raw, and the packed
/// bytes.
#[derive(Debug, Default)]
pub struct EncodedFrame {
    /// Header and table.
    pub(crate) head: Vec<u8>,
    /// The copy, in the order of the pages given to [`Encoder::encode`](crate::Encoder::encode).
    copy: GuestBytes,
    /// Byte ranges of the copy that form the raw part of the payload.
    pub(crate) raw: Vec<(usize, usize)>,
    /// For a piece of a stream: its division into parts, and the deltas of its pages.
    pub(crate) division: Division,
    /// Buffer for the packed part of the payload, which is its first `packed_bytes` bytes.
    pub(crate) packed: GuestBytes,
    pub(crate) packed_bytes: usize,
    header: Option<FrameHeader>,
}

impl EncodedFrame {
    /// A frame without buffers; they grow at first use.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The buffer for the copy of `pages` pages, to fill before encoding.
    pub fn pages_mut(&mut self, pages: usize) -> &mut [u8] {
        self.bytes_mut(pages * PAGE_SIZE)
    }

    /// The same buffer, for `bytes` bytes of a stream.
    pub fn bytes_mut(&mut self, bytes: usize) -> &mut [u8] {
        self.copy.extend_to(bytes);
        &mut self.copy[..bytes]
    }

    /// The first `bytes` bytes of the copy.
    pub(crate) fn bytes(&self, bytes: usize) -> &[u8] {
        &self.copy[..bytes]
    }

    /// Adds a range of the copy to the raw part of the payload.
    pub(crate) fn push_raw(&mut self, from: usize, to: usize) {
        match self.raw.last_mut() {
            Some((_, before)) if *before == from => *before = to,
            _ => self.raw.push((from, to)),
        }
    }

    /// The copy of the first `pages` pages.
    pub(crate) fn pages(&self, pages: usize) -> &[u8] {
        &self.copy[..pages * PAGE_SIZE]
    }

    /// The copy, and the buffer for up to `longest` packed bytes.
    pub(crate) fn copy_and_packed(&mut self, longest: usize) -> (&[u8], &mut [u8]) {
        self.packed.extend_to(longest);
        (&self.copy, &mut self.packed[..longest])
    }

    /// Takes the deltas as the packed part, uncompressed.
    pub(crate) fn set_deltas(&mut self, deltas: &[u8]) {
        let (_, packed) = self.copy_and_packed(deltas.len());
        packed.copy_from_slice(deltas);
        self.packed_bytes = deltas.len();
    }

    /// Resets the head to an empty header.
    pub(crate) fn begin(&mut self) {
        self.raw.clear();
        self.packed_bytes = 0;
        self.head.clear();
        self.head.resize(FRAME_HEADER_BYTES, 0);
    }

    /// Writes the header.
    pub(crate) fn finish(&mut self, header: FrameHeader) {
        self.head[..FRAME_HEADER_BYTES].copy_from_slice(&header.encode());
        self.header = Some(header);
    }

    /// Turns this frame into the one that ends a round on its lane.
    pub fn end_of_round(&mut self, round: u32) {
        self.begin();
        self.finish(FrameHeader::end_of_round(round, 0));
    }

    /// Sets the frame's number on its lane. The number is known only when the frame is sent,
    /// because the frames of a round may be encoded in any order.
    pub fn set_sequence(&mut self, sequence: u64) {
        if let Some(header) = self.header {
            self.finish(FrameHeader { sequence, ..header });
        }
    }

    /// Length on the wire in bytes.
    #[must_use]
    pub fn wire_bytes(&self) -> usize {
        let payload = self.header.map_or(0, |header| header.payload_bytes);
        self.head.len() + payload as usize
    }

    /// Writes the frame, with as few calls as the writer permits.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        // Runs of other encodings split the raw pages of a frame of 64 into at most 32 ranges.
        const PIECES: usize = 34;
        let mut slices = [IoSlice::new(&[]); PIECES];
        slices[0] = IoSlice::new(&self.head);
        let mut used = 1;
        let raw = self.raw.iter().map(|(from, to)| &self.copy[*from..*to]);
        let packed = &self.packed[..self.packed_bytes];
        for piece in raw.chain((!packed.is_empty()).then_some(packed)) {
            if used == PIECES {
                write_all_vectored(writer, &mut slices)?;
                used = 0;
            }
            slices[used] = IoSlice::new(piece);
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
