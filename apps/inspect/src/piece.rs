//! Decodes pieces of a VMM's migration stream.

use serde_json::{Value, json};
use vmferry_codec::{Decompressors, Frame, StreamDecoder};
use vmferry_wire::{
    FRAME_HEADER_BYTES, FrameHeader, MAX_KEPT_PAGES, SEGMENT_BYTES, SEGMENT_TABLE_HEAD_BYTES,
    SegmentEncoding, SegmentTable,
};

use crate::Tell;
use crate::bytes::Stop;
use crate::control::broken;
use crate::data::{LaneFile, algorithm, place_of};
use crate::pages::StreamPages;
use crate::record::Record;

impl LaneFile<'_> {
    /// Decodes a piece and adds its fields.
    pub fn piece(
        &mut self,
        offset: u64,
        frame: &Frame,
        header: &FrameHeader,
        again: bool,
        fields: &mut Value,
    ) -> Result<(), Stop> {
        let table_at = offset + FRAME_HEADER_BYTES as u64;
        if !again && !self.decode(table_at, frame, header)? {
            fields["unchecked"] = json!(true);
        }
        let table = SegmentTable::parse(header, frame.table(header), self.entries())
            .map_err(|error| broken(table_at, "a piece's table", &error))?;
        let (mut raw, mut packed, mut delta, mut kept) = (0_u64, 0_u64, 0_u64, 0_u64);
        for segment in table.segments() {
            let bytes = u64::from(segment.bytes);
            match segment.encoding {
                SegmentEncoding::Raw => raw += bytes,
                SegmentEncoding::Packed => packed += bytes,
                SegmentEncoding::Delta(_) => delta += bytes,
                SegmentEncoding::KeptRaw(_) => (raw, kept) = (raw + bytes, kept + 1),
                SegmentEncoding::KeptPacked(_) => (packed, kept) = (packed + bytes, kept + 1),
            }
        }
        let summary = table.summary();
        fields["bytes_of_stream"] = json!(table.piece_bytes());
        for (name, number) in [
            ("segments", u64::from(header.runs)),
            ("raw_bytes", raw),
            ("packed_of", packed),
            ("delta_of", delta),
            ("kept_pages", kept),
            ("content_pages", summary.content_pages.into()),
            ("zero_pages", summary.zero_pages.into()),
        ] {
            if number > 0 {
                fields[name] = json!(number);
            }
        }
        if header.packed_bytes > 0 {
            fields["algorithm"] = algorithm(header);
            fields["packed_bytes"] = json!(header.packed_bytes);
        }
        Ok(())
    }

    /// The number of pages that the lane may keep. Without the control channel the number of lanes
    /// is unknown; then the highest limit applies, so that a valid recording is not reported as
    /// broken. The memory limit still holds.
    fn entries(&self) -> u32 {
        let lanes = self.session.announced.as_ref().map_or(1, |(_, lanes)| u32::from(*lanes));
        MAX_KEPT_PAGES / lanes.max(1)
    }

    /// Decodes a piece. Returns whether its hash could be checked.
    fn decode(&mut self, table_at: u64, frame: &Frame, header: &FrameHeader) -> Result<bool, Stop> {
        let entries = self.entries();
        let lane = self.session.lanes.entry(self.number).or_default();
        let (gap, offset) = (lane.gap, lane.stream_offset);
        let mut kept = StreamPages::new(self.seen, self.session.number, self.number, gap);
        let decoder =
            self.stream.get_or_insert_with(|| StreamDecoder::new(Decompressors::default(), 0));
        let piece = decoder.decode_apart(frame, entries, offset, &mut kept);
        let checked = !gap && kept.unknown == 0;
        let found = piece.and_then(|piece| {
            if checked {
                piece.check(header.sequence, offset)?;
            }
            Ok(piece.bytes.len() as u64)
        });
        match found {
            Ok(bytes) => {
                lane.stream_offset = offset.saturating_add(bytes);
                Ok(checked)
            }
            Err(error) => {
                lane.gap = true;
                let at = table_at + place_of(&error, frame, header);
                Err(broken(at, "a piece of a stream", &error))
            }
        }
    }

    /// Reports each segment of a piece.
    pub fn tell_of_segments(
        &self,
        table_at: u64,
        frame: &Frame,
        header: &FrameHeader,
        tell: &mut Tell<'_>,
    ) -> Result<(), Stop> {
        let Ok(table) = SegmentTable::parse(header, frame.table(header), self.entries()) else {
            return Ok(());
        };
        let length = SEGMENT_BYTES as u64;
        let first = table_at + SEGMENT_TABLE_HEAD_BYTES as u64;
        for (index, segment) in table.segments().enumerate() {
            let encoding = match segment.encoding {
                SegmentEncoding::Raw => "raw",
                SegmentEncoding::Packed => "packed",
                SegmentEncoding::Delta(_) => "delta",
                SegmentEncoding::KeptRaw(_) => "kept-raw",
                SegmentEncoding::KeptPacked(_) => "kept-packed",
            };
            let mut fields = json!({ "encoding": encoding, "bytes_of_stream": segment.bytes });
            if let Some(entry) = segment.entry() {
                fields["entry"] = json!(entry);
            }
            tell(&Record::new(first + index as u64 * length, length, "segment", fields))?;
        }
        Ok(())
    }
}
