//! Frames to pieces of a stream.

use vmferry_memory::stream_hash;
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

/// Decodes the frames of one stream, in their order: contexts, buffers and kept pages for the whole migration.
#[derive(Debug)]
pub struct StreamDecoder {
    decompressors: Decompressors,
    /// The packed part, decompressed.
    unpacked: Vec<u8>,
    /// The piece, if it does not stand in the frame.
    piece: Vec<u8>,
    kept: KeptPages,
    /// Where the next piece begins.
    offset: u64,
}

impl StreamDecoder {
    /// A decoder at the beginning of a stream, which may have so many pages kept.
    #[must_use]
    pub fn new(decompressors: Decompressors, entries: u32) -> Self {
        let kept = KeptPages::new(entries);
        Self { decompressors, unpacked: Vec::new(), piece: Vec::new(), kept, offset: 0 }
    }

    /// Decodes and checks the next frame. A piece that is not right gives an error and no bytes, and the stream ends with it.
    ///
    /// # Errors
    /// A frame that is no piece of a stream, breaks a rule or is damaged.
    pub fn decode<'a>(&'a mut self, frame: &'a Frame) -> Result<PieceBytes<'a>, CodecError> {
        let Some(header) = frame.header().filter(|header| header.kind == FrameKind::Stream) else {
            let text = "pages where a piece of a stream is due".to_owned();
            return Err(WireError::BadFrame(text).into());
        };
        let table = SegmentTable::parse(header, frame.table(header), self.kept.entries())?;
        let payload = frame.payload(header);
        let bytes = if table.is_plain() {
            payload
        } else {
            self.assemble(header, &table, payload)?;
            &self.piece[..]
        };
        let summary = table.summary();
        let (expected, offset) = (summary.content_hash, self.offset);
        let found = stream_hash(bytes, offset);
        if found != expected {
            let (sequence, bytes) = (header.sequence, bytes.len());
            return Err(CodecError::PieceHash { sequence, offset, bytes, expected, found });
        }
        self.offset += bytes.len() as u64;
        Ok(PieceBytes { bytes, summary })
    }

    fn assemble(
        &mut self,
        header: &FrameHeader,
        table: &SegmentTable<'_>,
        payload: &[u8],
    ) -> Result<(), CodecError> {
        let sequence = header.sequence;
        let (mut raw, packed) = payload.split_at(payload.len() - header.packed_bytes as usize);
        let unpacked = match header.algorithm {
            None => packed,
            Some(algorithm) => {
                let bytes = table.packed_content_bytes() + header.delta_bytes as usize;
                if self.unpacked.len() < bytes {
                    self.unpacked.resize(bytes, 0);
                }
                let (into, offset) = (&mut self.unpacked[..bytes], self.offset);
                self.decompressors
                    .decompress(algorithm, packed, into)
                    .map_err(|source| CodecError::PieceUnpack { sequence, offset, source })?;
                into
            }
        };
        let (mut packed, mut deltas) = unpacked.split_at(table.packed_content_bytes());
        self.piece.clear();
        self.piece.reserve(table.piece_bytes());
        for segment in table.segments() {
            let from =
                match segment.encoding {
                    SegmentEncoding::Delta(entry) => {
                        let Some(page) = self.kept.page_mut(entry) else {
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
                self.kept.keep(entry, content);
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
