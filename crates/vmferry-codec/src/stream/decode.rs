//! Frames to pieces of a stream.

use vmferry_memory::{GuestBytes, stream_hash};
use vmferry_wire::{
    FrameHeader, FrameKind, PieceSummary, SegmentEncoding, SegmentTable, WireError,
};

use super::kept::KeptPages;
use crate::decode::{CodecError, Frame};
use crate::decompress::Decompressors;
use crate::delta::apply_delta;

/// A decoded piece.
#[derive(Clone, Copy, Debug)]
pub struct PieceBytes<'a> {
    /// Its bytes, which are those that were sent.
    pub bytes: &'a [u8],
    /// What the source says of it.
    pub summary: PieceSummary,
}

/// Whoever keeps a stream's pages, by entry, for [`StreamDecoder::decode_apart`].
pub trait Kept {
    /// Keeps a page.
    fn keep(&mut self, entry: u32, content: &[u8]);

    /// The page in an entry, to be changed; none if nothing was ever kept there.
    fn page_mut(&mut self, entry: u32) -> Option<&mut [u8]>;
}

/// Decodes the frames of one stream, in their order: contexts, buffers and kept pages for the whole migration.
#[derive(Debug)]
pub struct StreamDecoder {
    buffers: Buffers,
    kept: KeptPages,
    /// Where the next piece begins.
    offset: u64,
}

impl StreamDecoder {
    /// A decoder at the beginning of a stream, which may have so many pages kept.
    #[must_use]
    pub fn new(decompressors: Decompressors, entries: u32) -> Self {
        let kept = KeptPages::new(entries);
        let (unpacked, piece) = (GuestBytes::new(), GuestBytes::new());
        let buffers = Buffers { decompressors, unpacked, piece };
        Self { buffers, kept, offset: 0 }
    }

    /// Decodes and checks the next frame. A piece that is not right gives an error and no bytes, and the stream ends with it.
    ///
    /// # Errors
    /// A frame that is no piece of a stream, breaks a rule or is damaged.
    pub fn decode<'a>(&'a mut self, frame: &'a Frame) -> Result<PieceBytes<'a>, CodecError> {
        let (header, entries) = (header_of(frame)?, self.kept.entries());
        let piece = self.buffers.piece(frame, header, entries, self.offset, &mut self.kept)?;
        piece.check(header.sequence, self.offset)?;
        self.offset += piece.bytes.len() as u64;
        Ok(piece)
    }

    /// Decodes a frame of any stream with pages that somebody else keeps, below `entries`, for whoever looks at recordings.
    /// Whether the bytes are those that were sent says [`PieceBytes::check`]; `offset` is for errors only.
    ///
    /// # Errors
    /// As [`decode`](Self::decode), but for other bytes than those that were sent.
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
    /// Compares the bytes of the frame with this number with what the source says of them, at their place in the stream.
    ///
    /// # Errors
    /// [`CodecError::PieceHash`] if they are others.
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

/// What every piece needs while it is decoded.
#[derive(Debug)]
struct Buffers {
    decompressors: Decompressors,
    /// The packed part, decompressed.
    unpacked: GuestBytes,
    /// The piece, if it does not stand in the frame.
    piece: GuestBytes,
}

impl Buffers {
    /// Takes a frame apart. Nothing is said of the hash.
    fn piece<'a>(
        &'a mut self,
        frame: &'a Frame,
        header: &'a FrameHeader,
        entries: u32,
        offset: u64,
        kept: &mut impl Kept,
    ) -> Result<PieceBytes<'a>, CodecError> {
        let table = SegmentTable::parse(header, frame.table(header), entries)?;
        let payload = frame.payload(header);
        let bytes = if table.is_plain() {
            payload
        } else {
            self.assemble(header, &table, payload, offset, kept)?;
            &self.piece[..]
        };
        Ok(PieceBytes { bytes, summary: table.summary() })
    }

    fn assemble(
        &mut self,
        header: &FrameHeader,
        table: &SegmentTable<'_>,
        payload: &[u8],
        offset: u64,
        kept: &mut impl Kept,
    ) -> Result<(), CodecError> {
        let sequence = header.sequence;
        let (mut raw, packed) = payload.split_at(payload.len() - header.packed_bytes as usize);
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
        if !deltas.is_empty() {
            let text = format!("{} bytes are left over behind all deltas", deltas.len());
            return Err(WireError::BadFrame(text).into());
        }
        Ok(())
    }
}
