//! Decodes data channels: frames of pages, and pieces of a VMM's migration stream.

use std::io::Read;

use serde_json::{Value, json};
use vmferry::config::LANE_STRIPE_PAGES;
use vmferry_codec::{CodecError, Decoder, Frame, ReadError, StreamDecoder};
use vmferry_memory::PAGE_SIZE;
use vmferry_transport::RecordingHeader;
use vmferry_wire::{
    Encoding, FRAME_HEADER_BYTES, FrameHeader, FrameKind, Hello, MAX_LANES, RunTable,
};

use crate::bytes::{Bytes, Stop};
use crate::control::broken;
use crate::pages::{GuestPages, NoPages, SeenPages};
use crate::record::Record;
use crate::session::{Lane, Session};
use crate::{Inspector, Tell, message};

const WHAT: &str = "a frame";

/// Data lanes, and fetch lanes for faults and in the background: as many as each may have.
const MOST_LANES: u8 = 3 * MAX_LANES;

/// The state of reading one lane's file.
pub(crate) struct LaneFile<'a> {
    pub session: &'a mut Session,
    pub seen: &'a mut SeenPages,
    pub number: u8,
    decoder: Decoder,
    /// Created for the first piece of a stream. The pages that it keeps are in `seen`.
    pub stream: Option<StreamDecoder>,
    /// The sequence number of the previous frame in this file.
    before: Option<u64>,
    /// The number of earlier connections of this channel.
    attempt: u64,
    /// A fetch lane: each frame answers a request.
    fetches: bool,
    runs: bool,
}

impl Inspector {
    pub(crate) fn data<R: Read>(
        &mut self,
        header: &RecordingHeader,
        hello: &Hello,
        bytes: &mut Bytes<R>,
        tell: &mut Tell<'_>,
    ) -> Result<(), Stop> {
        if hello.lane >= MOST_LANES {
            let problem = format!(
                "lane {} is out of range; there are at most {MOST_LANES} lanes",
                hello.lane
            );
            let (offset, what) = (bytes.offset() - 27, "the source's greeting".into());
            return Err(Stop::Broken { offset, what, problem });
        }
        let session = self.sessions.of_token(header, hello.token);
        let fetches = session.is_fetch_lane(hello.lane);
        let lane = session.lanes.entry(hello.lane).or_default();
        if fetches {
            // Its frames are numbered on each channel.
            *lane = Lane::default();
            self.sessions.join_fetch_channel(header, hello.token, hello.lane);
        }
        let session = self.sessions.of_token(header, hello.token);
        let lane = session.lanes.entry(hello.lane).or_default();
        (lane.read, lane.whole) = (true, false);
        let mut file = LaneFile {
            session,
            seen: &mut self.seen,
            number: hello.lane,
            decoder: Decoder::default(),
            stream: None,
            before: None,
            attempt: if fetches { 0 } else { hello.attempt },
            fetches,
            runs: self.runs,
        };
        let mut frame = Frame::new();
        while !bytes.is_at_end()? {
            file.next(&mut frame, bytes, tell)?;
        }
        let lane = file.session.lanes.entry(hello.lane).or_default();
        lane.whole = true;
        let answers = lane.highest;
        if let Some(channel) = self.sessions.fetch_channel(header) {
            channel.answers = answers;
        }
        Ok(())
    }
}

impl LaneFile<'_> {
    /// Reads, checks and reports a frame.
    fn next<R: Read>(
        &mut self,
        frame: &mut Frame,
        bytes: &mut Bytes<R>,
        tell: &mut Tell<'_>,
    ) -> Result<(), Stop> {
        let offset = bytes.offset();
        let cut = |needed: usize, bytes: &Bytes<R>| Stop::Cut {
            offset,
            what: WHAT.into(),
            needed: needed as u64,
            found: bytes.offset() - offset,
        };
        let mut head = [0; FRAME_HEADER_BYTES];
        bytes.fill(&mut head, WHAT, offset)?;
        let header = FrameHeader::parse(&head)
            .map_err(|error| broken(offset, "a frame's header", &error))?;
        let whole = FRAME_HEADER_BYTES + header.table_bytes() + header.payload_bytes as usize;
        match frame.read_from(&mut head.as_slice().chain(&mut *bytes)) {
            Ok(_) => {}
            Err(ReadError::Io(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                return Err(cut(whole, bytes));
            }
            Err(ReadError::Io(error)) => return Err(error.into()),
            Err(ReadError::Wire(error)) => return Err(broken(offset, WHAT, &error)),
        }
        let again = self.check_order(offset, &header)?;
        let mut fields = json!({ "sequence": header.sequence, "round": header.round });
        let name = match header.kind {
            FrameKind::EndOfRound => "end-round",
            FrameKind::Pages => {
                self.pages(offset, frame, &header, again, &mut fields)?;
                "frame"
            }
            FrameKind::Stream => {
                self.piece(offset, frame, &header, again, &mut fields)?;
                "piece"
            }
        };
        if again {
            fields["again"] = json!(true);
        }
        tell(&Record::new(offset, bytes.offset() - offset, name, fields))?;
        let table_at = offset + FRAME_HEADER_BYTES as u64;
        match header.kind {
            FrameKind::Pages if self.runs => self.tell_of_runs(table_at, frame, &header, tell),
            FrameKind::Stream if self.runs => self.tell_of_segments(table_at, frame, &header, tell),
            _ => Ok(()),
        }
    }

    /// Checks that a lane's frames are numbered without gaps and that its rounds increase. Returns
    /// whether the frame was received before, on a connection that was lost.
    fn check_order(&mut self, offset: u64, header: &FrameHeader) -> Result<bool, Stop> {
        let lane = self.session.lanes.entry(self.number).or_default();
        let sequence = header.sequence;
        let wrong =
            |at, problem| Err(Stop::Broken { offset: offset + at, what: WHAT.into(), problem });
        let expected = match self.before {
            Some(before) => before.checked_add(1),
            // A reconnected channel starts after the frames that were placed.
            None if self.attempt > 0 && (lane.highest == 0 || sequence <= lane.highest) => {
                Some(sequence.max(1))
            }
            None => lane.highest.checked_add(1),
        };
        let Some(expected) = expected else {
            let problem = format!(
                "found number {sequence} of lane {} after {}, the highest number",
                self.number,
                u64::MAX
            );
            return wrong(16, problem);
        };
        if sequence != expected {
            return wrong(
                16,
                format!("expected number {expected} of lane {}, found {sequence}", self.number),
            );
        }
        self.before = Some(sequence);
        let again = sequence <= lane.highest;
        if !again {
            if header.round < lane.round || header.round == 0 {
                return wrong(
                    8,
                    format!(
                        "expected round {} or a later one, found {}",
                        lane.round.max(1),
                        header.round
                    ),
                );
            }
            lane.gap |= sequence - lane.highest > 1;
            (lane.highest, lane.round) = (sequence, header.round);
        }
        Ok(again)
    }

    fn pages(
        &mut self,
        offset: u64,
        frame: &Frame,
        header: &FrameHeader,
        again: bool,
        fields: &mut Value,
    ) -> Result<(), Stop> {
        let table_at = offset + FRAME_HEADER_BYTES as u64;
        let slot_pages = match &self.session.announced {
            None => None,
            Some((layout, _)) => match layout.get(usize::from(header.slot.0)) {
                Some(slot) => Some(slot.pages),
                None => {
                    let problem = format!(
                        "{} does not exist: the guest has {} slots",
                        header.slot,
                        layout.len()
                    );
                    return Err(Stop::Broken { offset: offset + 6, what: WHAT.into(), problem });
                }
            },
        };
        let mut guest = GuestPages::new(self.seen, self.session.number, header.round);
        let found = if again {
            self.decoder.decode_apart(frame, slot_pages, &mut NoPages)
        } else {
            self.decoder.decode_apart(frame, slot_pages, &mut guest)
        };
        // A page may be requested on several fetch lanes.
        let twice = guest.twice.filter(|_| !self.fetches);
        let found = found.map_err(|error| {
            let at = table_at + place_of(&error, frame, header);
            broken(at, "a frame's pages", &error)
        })?;
        if !self.fetches {
            self.check_runs(table_at, frame, header)?;
        }
        if let Some((slot, page)) = twice {
            let problem =
                format!("page {page} of {slot} comes a second time in round {}", header.round);
            return Err(Stop::Broken { offset: table_at, what: WHAT.into(), problem });
        }
        let [zero, raw, packed, delta] = found.pages;
        if self.fetches && delta > 0 {
            let problem = format!("an answer to a request has {delta} pages as deltas");
            return Err(Stop::Broken { offset: table_at, what: WHAT.into(), problem });
        }
        fields["slot"] = json!(header.slot.0);
        fields["runs"] = json!(header.runs);
        for (name, pages) in [("zero", zero), ("raw", raw), ("packed", packed), ("delta", delta)] {
            if pages > 0 {
                fields[name] = json!(pages);
            }
        }
        if found.unpacked_bytes > 0 {
            fields["algorithm"] = algorithm(header);
            fields["packed_bytes"] = json!(header.packed_bytes);
            fields["unpacked_bytes"] = json!(found.unpacked_bytes);
        }
        if found.unchecked > 0 {
            fields["unchecked"] = json!(found.unchecked);
        }
        Ok(())
    }

    /// Checks that every page belongs to this lane.
    fn check_runs(&self, table_at: u64, frame: &Frame, header: &FrameHeader) -> Result<(), Stop> {
        let Some((_, lanes)) = self.session.announced else { return Ok(()) };
        let Ok(table) = RunTable::parse(header, frame.table(header), u64::MAX / PAGE_SIZE as u64)
        else {
            return Ok(());
        };
        for (index, run) in table.runs().enumerate() {
            let lane_of = |page: u64| page / LANE_STRIPE_PAGES % u64::from(lanes.max(1));
            let (first, last) = (lane_of(run.first), lane_of(run.range().end - 1));
            let stripes = (run.range().end - 1) / LANE_STRIPE_PAGES - run.first / LANE_STRIPE_PAGES;
            let ours = u64::from(self.number);
            if first != ours || last != ours || (stripes > 0 && lanes > 1) {
                let offset = table_at + (index * vmferry_wire::RUN_HEADER_BYTES) as u64;
                let other = if first == ours { last } else { first };
                let problem = format!(
                    "expected pages of lane {ours} of {lanes}, found page {} of {} of lane {other}",
                    run.first, header.slot
                );
                return Err(Stop::Broken { offset, what: WHAT.into(), problem });
            }
        }
        Ok(())
    }

    fn tell_of_runs(
        &self,
        table_at: u64,
        frame: &Frame,
        header: &FrameHeader,
        tell: &mut Tell<'_>,
    ) -> Result<(), Stop> {
        let Ok(table) = RunTable::parse(header, frame.table(header), u64::MAX / PAGE_SIZE as u64)
        else {
            return Ok(());
        };
        for (index, run) in table.runs().enumerate() {
            let fields = json!({
                "slot": header.slot.0, "first": run.first, "pages": run.pages,
                "encoding": format!("{:?}", run.encoding).to_lowercase(),
                "sum": message::hex(run.content_sum),
            });
            let length = vmferry_wire::RUN_HEADER_BYTES as u64;
            tell(&Record::new(table_at + index as u64 * length, length, "run", fields))?;
        }
        Ok(())
    }
}

pub(crate) fn algorithm(header: &FrameHeader) -> Value {
    header.algorithm.map_or_else(|| json!("none"), |one| json!(one.to_string()))
}

/// The offset of an error from the start of the frame's table.
pub(crate) fn place_of(error: &CodecError, frame: &Frame, header: &FrameHeader) -> u64 {
    let table = header.table_bytes() as u64;
    // The error may be that the frame is too short for its compressed part.
    let payload = u64::from(header.payload_bytes);
    let packed = table + payload.saturating_sub(header.packed_bytes.into());
    match error {
        CodecError::Unpack { .. }
        | CodecError::Delta { .. }
        | CodecError::DeltaBase { .. }
        | CodecError::PieceUnpack { .. }
        | CodecError::PieceDelta { .. } => packed,
        CodecError::PieceHash { .. } | CodecError::NotKept { .. } => table,
        CodecError::ContentSum { page, .. } => {
            let longest = u64::MAX / PAGE_SIZE as u64;
            let Ok(runs) = RunTable::parse(header, frame.table(header), longest) else { return 0 };
            let mut at = table;
            for (index, run) in runs.runs().enumerate() {
                match run.encoding {
                    Encoding::Raw if run.first == *page => return at,
                    Encoding::Raw => at += run.content_bytes() as u64,
                    // Only the sum in the table represents zero pages.
                    Encoding::Zero if run.first == *page => {
                        return (index * vmferry_wire::RUN_HEADER_BYTES) as u64;
                    }
                    _ => {}
                }
            }
            packed
        }
        _ => 0,
    }
}
