//! Decoding frames into pieces of a stream.

use vmferry_memory::{GuestBytes, stream_hash};
use vmferry_wire::{
    FrameHeader, FrameKind, PieceSummary, SegmentEncoding, SegmentTable, WireError,
};

use super::kept::{Kept, KeptPages};
use crate::decompress::Decompressors;
use crate::delta::{apply_delta, check_all_read};
use crate::error::CodecError;
use crate::received_frame::Frame;

/// A decoded piece.
#[derive(Clone, Copy, Debug)]
pub struct PieceBytes<'a> {
    /// Its bytes, identical to those that were sent if `check` succeeds.
    pub bytes: &'a [u8],
    /// The source's summary of the piece.
    pub summary: PieceSummary,
}

/// Decodes the frames of one stream in order. It has the contexts, buffers and kept pages and is
/// used for the whole migration.
#[derive(Debug)]
pub struct StreamDecoder {
    buffers: Buffers,
    kept: KeptPages,
    /// Offset of the next piece in the stream.
    offset: u64,
}

impl StreamDecoder {
    /// A decoder at the beginning of a stream that may keep up to `entries` pages.
    #[must_use]
    pub fn new(decompressors: Decompressors, entries: u32) -> Self {
        let kept = KeptPages::new(entries);
        let (unpacked, piece) = (GuestBytes::new(), GuestBytes::new());
        let buffers = Buffers { decompressors, unpacked, piece };
        Self { buffers, kept, offset: 0 }
    }

    /// Decodes and checks the next frame. A piece that fails the check returns an error and no
    /// bytes, and the stream cannot be continued.
    ///
    /// # Errors
    /// A frame that is not a piece of a stream, breaks a rule or is damaged.
    pub fn decode<'a>(&'a mut self, frame: &'a Frame) -> Result<PieceBytes<'a>, CodecError> {
        let (header, entries) = (header_of(frame)?, self.kept.entries());
        let piece = self.buffers.piece(frame, header, entries, self.offset, &mut self.kept)?;
        piece.check(header.sequence, self.offset)?;
        self.offset += piece.bytes.len() as u64;
        Ok(piece)
    }

    /// Decodes a frame of any stream, with the pages in `kept`, whose entries are below `entries`,
    /// for readers of recordings. The content hash is not checked; [`PieceBytes::check`] does that.
    /// `offset` is used in errors only.
    ///
    /// # Errors
    /// As [`decode`](Self::decode), except for a wrong content hash.
    pub fn decode_apart<'a>(
        &'a mut self,
        frame: &'a Frame,
        entries: u32,
        offset: u64,
        kept: &mut impl Kept,
    ) -> Result<PieceBytes<'a>, CodecError> {
        self.buffers.piece(frame, header_of(frame)?, entries, offset, kept)
    }
}

impl PieceBytes<'_> {
    /// Compares the hash of the bytes, at `offset` in the stream, with the source's. `sequence` is
    /// the frame's number, for the error.
    ///
    /// # Errors
    /// [`CodecError::PieceHash`] if they differ.
    pub fn check(&self, sequence: u64, offset: u64) -> Result<(), CodecError> {
        let (expected, bytes) = (self.summary.content_hash, self.bytes.len());
        let found = stream_hash(self.bytes, offset);
        if found == expected {
            Ok(())
        } else {
            Err(CodecError::PieceHash { sequence, offset, bytes, expected, found })
        }
    }
}

fn header_of(frame: &Frame) -> Result<&FrameHeader, WireError> {
    frame
        .header()
        .filter(|header| header.kind == FrameKind::Stream)
        .ok_or_else(|| WireError::BadFrame("pages where a piece of a stream is due".to_owned()))
}

/// Buffers for decoding, reused for every piece.
#[derive(Debug)]
struct Buffers {
    decompressors: Decompressors,
    /// The packed part, decompressed.
    unpacked: GuestBytes,
    /// The piece, if it is not contiguous in the frame.
    piece: GuestBytes,
}

impl Buffers {
    /// Decodes a frame without checking the hash.
    fn piece<'a>(
        &'a mut self,
        frame: &'a Frame,
        header: &'a FrameHeader,
        entries: u32,
        offset: u64,
        kept: &mut impl Kept,
    ) -> Result<PieceBytes<'a>, CodecError> {
        let table = SegmentTable::parse(header, frame.table(header), entries)?;
        let bytes = if table.is_plain() {
            frame.payload(header)
        } else {
            self.assemble(frame, header, &table, offset, kept)?;
            &self.piece[..]
        };
        Ok(PieceBytes { bytes, summary: table.summary() })
    }

    fn assemble(
        &mut self,
        frame: &Frame,
        header: &FrameHeader,
        table: &SegmentTable<'_>,
        offset: u64,
        kept: &mut impl Kept,
    ) -> Result<(), CodecError> {
        let sequence = header.sequence;
        let (mut raw, packed) = frame.raw_and_packed(header);
        let unpacked = match header.algorithm {
            None => packed,
            Some(algorithm) => {
                let bytes = table.packed_content_bytes() + header.delta_bytes as usize;
                self.unpacked.extend_to(bytes);
                let into = &mut self.unpacked[..bytes];
                self.decompressors
                    .decompress(algorithm, packed, into)
                    .map_err(|source| CodecError::PieceUnpack { sequence, offset, source })?;
                into
            }
        };
        let (mut packed, mut deltas) = unpacked.split_at(table.packed_content_bytes());
        self.piece.clear();
        for segment in table.segments() {
            let from =
                match segment.encoding {
                    SegmentEncoding::Delta(entry) => {
                        let Some(page) = kept.page_mut(entry) else {
                            return Err(CodecError::NotKept { sequence, entry });
                        };
                        apply_delta(&mut deltas, page)
                            .map_err(|source| CodecError::PieceDelta { sequence, entry, source })?;
                        self.piece.extend_from_slice(page);
                        continue;
                    }
                    SegmentEncoding::Raw | SegmentEncoding::KeptRaw(_) => &mut raw,
                    SegmentEncoding::Packed | SegmentEncoding::KeptPacked(_) => &mut packed,
                };
            // The table has been checked against both lengths.
            let (content, rest) = from.split_at(segment.bytes as usize);
            *from = rest;
            if let Some(entry) = segment.entry() {
                kept.keep(entry, content);
            }
            self.piece.extend_from_slice(content);
        }
        Ok(check_all_read(deltas)?)
    }
}
