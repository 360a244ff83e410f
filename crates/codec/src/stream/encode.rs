//! Encoding divided pieces into frames.

use vmferry_memory::{GuestBytes, stream_hash};
use vmferry_wire::{
    Algorithm, FrameHeader, FrameKind, PieceSummary, Segment, SegmentEncoding, table_checksum,
};

use super::divide::{Division, Part};
use crate::compress::{CompressError, Compressors};
use crate::encode::{FrameCounts, LEAST_GAIN, Made, SHORTEST_PACKED_DELTAS, compressor};
use crate::entropy::looks_random;
use crate::frame::EncodedFrame;
use crate::method::Method;

/// Fewer bytes than this, not counting deltas, are not worth a call of the compressor: they are
/// record headers between raw pages, not a page.
const SHORTEST_PACKED: usize = 256;

/// Encodes divided pieces into frames. It has a worker's contexts and buffers and is kept for the
/// whole migration.
pub struct StreamEncoder {
    compressors: Compressors,
    made: Made,
    segments: Vec<Segment>,
    /// Packed segments, then deltas.
    gathered: GuestBytes,
}

impl StreamEncoder {
    /// An encoder without contexts; they are created at first use.
    #[must_use]
    pub fn new(compressors: Compressors) -> Self {
        Self { compressors, made: Vec::new(), segments: Vec::new(), gathered: GuestBytes::new() }
    }

    /// Encodes the piece that was [divided](EncodedFrame::divide) in this frame. Parts that look
    /// compressible are packed with `method`. Returns the frame's contents and the piece's hash.
    ///
    /// # Errors
    /// The compressor's.
    pub fn encode(
        &mut self,
        frame: &mut EncodedFrame,
        method: Option<Method>,
    ) -> Result<(FrameCounts, u64), CompressError> {
        let division = std::mem::take(&mut frame.division);
        let encoded = self.encode_divided(frame, &division, method);
        // The division's buffers are reused.
        frame.division = division;
        encoded
    }

    fn encode_divided(
        &mut self,
        frame: &mut EncodedFrame,
        division: &Division,
        method: Option<Method>,
    ) -> Result<(FrameCounts, u64), CompressError> {
        let mut counts = division.counts;
        let content_hash = stream_hash(frame.bytes(division.bytes), division.offset);
        frame.begin();
        let algorithm = self.pack(frame, division, method, &mut counts)?;
        let pages = counts.content_pages();
        PieceSummary {
            content_hash,
            content_pages: pages as u32,
            zero_pages: counts.zero_pages as u32,
        }
        .encode(&mut frame.head);
        let (mut at, mut raw_bytes) = (0, 0);
        for segment in &self.segments {
            segment.encode(&mut frame.head);
            let end = at + segment.bytes as usize;
            if segment.is_raw() {
                frame.push_raw(at, end);
                raw_bytes += segment.bytes;
            }
            at = end;
        }
        let table = &frame.head[vmferry_wire::FRAME_HEADER_BYTES..];
        let header = FrameHeader {
            kind: FrameKind::Stream,
            algorithm,
            runs: self.segments.len() as u32,
            payload_bytes: raw_bytes + frame.packed_bytes as u32,
            packed_bytes: frame.packed_bytes as u32,
            delta_bytes: division.deltas.len() as u32,
            table_checksum: table_checksum(table),
            ..FrameHeader::end_of_round(division.round, 0)
        };
        frame.finish(header);
        counts.packed_bytes = frame.packed_bytes as u64;
        Ok((counts, content_hash))
    }

    /// Chooses the encoding of each part, and packs the deltas and the parts that are to be packed.
    fn pack(
        &mut self,
        frame: &mut EncodedFrame,
        division: &Division,
        method: Option<Method>,
        counts: &mut FrameCounts,
    ) -> Result<Option<Algorithm>, CompressError> {
        if let Some(method) = method {
            *counts = division.counts;
            self.sort(frame.bytes(division.bytes), division, true, counts);
            let content = self.gathered.len();
            if content >= SHORTEST_PACKED || division.deltas.len() >= SHORTEST_PACKED_DELTAS {
                self.gathered.extend_from_slice(&division.deltas);
                let length = self.gathered.len();
                let (_, packed) = frame.copy_and_packed(length - length / LEAST_GAIN);
                let compressor = compressor(&mut self.made, &self.compressors, method)?;
                if let Some(bytes) = compressor.compress(&self.gathered, packed)? {
                    frame.packed_bytes = bytes;
                    return Ok(Some(method.algorithm()));
                }
            }
        }
        let in_vain = counts.packed_pages;
        *counts = division.counts;
        self.sort(frame.bytes(division.bytes), division, false, counts);
        counts.grown_pages = in_vain;
        frame.set_deltas(&division.deltas);
        Ok(None)
    }

    /// Builds the segments, and gathers those to pack.
    fn sort(&mut self, bytes: &[u8], division: &Division, packs: bool, counts: &mut FrameCounts) {
        self.segments.clear();
        self.gathered.clear();
        let mut at = 0;
        for &(part, length) in &division.parts {
            let content = &bytes[at..at + length];
            at += length;
            let is_page = matches!(part, Part::Page | Part::Kept(_));
            let random = packs && is_page && looks_random(content);
            let packed = packs && !random;
            counts.random_pages += u64::from(random);
            if is_page {
                *(if packed { &mut counts.packed_pages } else { &mut counts.raw_pages }) += 1;
            }
            let encoding = match part {
                Part::Delta(entry) => SegmentEncoding::Delta(entry),
                Part::Kept(entry) if packed => SegmentEncoding::KeptPacked(entry),
                Part::Kept(entry) => SegmentEncoding::KeptRaw(entry),
                Part::Bytes | Part::Page if packed => SegmentEncoding::Packed,
                Part::Bytes | Part::Page => SegmentEncoding::Raw,
            };
            if packed && !matches!(part, Part::Delta(_)) {
                self.gathered.extend_from_slice(content);
            }
            match self.segments.last_mut() {
                Some(last) if last.encoding == encoding && last.entry().is_none() => {
                    last.bytes += length as u32;
                }
                _ => self.segments.push(Segment { bytes: length as u32, encoding }),
            }
        }
    }
}
