//! How the destination processes a frame. A frame of only raw and zero pages is received directly
//! into guest memory and checked afterwards. Any other frame is read whole, decoded and checked in
//! a buffer, and then placed.
//!
//! The numbers of a lane's frames have no gaps. Frames of one round are placed in any order, since
//! they have no page in common. Frames of the next round are not started before all of these are
//! placed. A page always travels on the lane that its number determines, so no version of it can
//! overtake another.

mod direct;

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmferry_codec::{
    CodecError, Decoder, Decompressors, Frame, PageHashes, PlacedPages, ReadError,
};
use vmferry_memory::GuestMemory;
use vmferry_wire::{FrameHeader, FrameKind, Run};

use crate::causes::chain;
use crate::config::{LANE_STRIPE_PAGES, lane_of};
use crate::error::MigrateError;
use crate::link::{channel_name, lost};
pub use direct::{Arriving, PageSource, is_placed_at_once};

/// Frames per acknowledgement, fewer than the smallest window has. Acknowledging each frame would
/// wake the source's threads four times as often, which costs 6 % of the CPU time of both sides.
pub const ACKNOWLEDGE_FRAMES: u64 = 4;

/// What all lanes have placed so far.
#[derive(Debug, Default)]
pub struct PlacedCounters {
    /// Frames.
    pub frames: AtomicU64,
    /// Pages with content.
    pub content_pages: AtomicU64,
    /// Zero pages.
    pub zero_pages: AtomicU64,
    /// Bytes read.
    pub bytes: AtomicU64,
    /// Bytes read, including those of incomplete frames.
    pub arrived: AtomicU64,
}

/// Reads the complete frames of a lane in the order of their numbers.
pub struct FrameReader<R> {
    lane: u8,
    reader: R,
    offset: u64,
    sequence: u64,
}

impl<R: Read> FrameReader<R> {
    /// For a lane on which no frame has arrived yet.
    pub fn new(lane: u8, reader: R) -> Self {
        Self::after(lane, reader, 0)
    }

    /// For a lane on whose new channel the frame after `sequence` comes first.
    pub fn after(lane: u8, reader: R, sequence: u64) -> Self {
        Self { lane, reader, offset: 0, sequence }
    }

    /// Bytes read so far.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The underlying reader.
    pub fn get_mut(&mut self) -> &mut R {
        &mut self.reader
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// [`MigrateError::LinkLost`] at the channel's end, whether between frames or within one, and
    /// [`MigrateError::Protocol`], which names the lane and the offset, for everything else.
    pub fn receive(&mut self, frame: &mut Frame) -> Result<FrameHeader, MigrateError> {
        let header = self.receive_head(frame)?;
        self.receive_payload(frame)?;
        Ok(header)
    }

    /// Reads the next frame's header and run table.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_head(&mut self, frame: &mut Frame) -> Result<FrameHeader, MigrateError> {
        let offset = self.offset;
        let protocol =
            |reason: String| MigrateError::protocol(channel_name(Some(self.lane)), offset, reason);
        let mut counted = Counted { reader: &mut self.reader, bytes: 0 };
        let read = frame.read_head(&mut counted);
        self.offset += counted.bytes;
        let header = match read {
            Ok(Some(header)) => header,
            Ok(None) => return Err(self.lost(&std::io::ErrorKind::UnexpectedEof.into())),
            Err(ReadError::Io(error)) => return Err(self.lost(&error)),
            Err(ReadError::Wire(error)) => return Err(protocol(error.to_string())),
        };
        let due = self.sequence + 1;
        if header.sequence != due {
            return Err(protocol(format!("frame {} came where {due} was due", header.sequence)));
        }
        self.sequence = due;
        Ok(header)
    }

    /// Reads the payload of the frame whose head was read.
    ///
    /// # Errors
    /// [`MigrateError::LinkLost`].
    pub fn receive_payload(&mut self, frame: &mut Frame) -> Result<(), MigrateError> {
        let mut counted = Counted { reader: &mut self.reader, bytes: 0 };
        let read = frame.read_payload(&mut counted);
        self.offset += counted.bytes;
        read.map_err(|error| self.lost(&error))
    }

    fn lost(&self, error: &std::io::Error) -> MigrateError {
        lost(&channel_name(Some(self.lane)), "receiving pages", error)
    }
}

struct Counted<'a, R> {
    reader: &'a mut R,
    bytes: u64,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.reader.read(into)?;
        self.bytes += read as u64;
        Ok(read)
    }
}

/// Tracks which frames of one lane are placed. Workers finish the frames of a round in any order.
/// These frames have no page in common, because the source sends each page once in a round.
#[derive(Debug, Default)]
pub struct LaneProgress {
    /// All frames up to this one are placed.
    placed: u64,
    /// Later frames that are already placed: bit `n` is frame `placed + 1 + n`.
    beyond: u128,
    acknowledged: u64,
    /// The last frame of a round, if it has arrived and its placement was not reported yet.
    end: Option<u64>,
}

/// The most frames of a lane that may be in progress at the same time.
pub const MOST_IN_MAKING: u64 = u128::BITS as u64;

impl LaneProgress {
    /// Records a placed frame. Returns what to report to the source and the session.
    pub fn finished(&mut self, header: &FrameHeader) -> Placed {
        if header.kind == FrameKind::EndOfRound {
            self.end = Some(header.sequence);
        }
        let place = header.sequence.saturating_sub(self.placed + 1);
        debug_assert!(place < MOST_IN_MAKING, "await_room limits the frames in progress");
        self.beyond |= 1_u128.checked_shl(place as u32).unwrap_or(0);
        let joined = self.beyond.trailing_ones();
        self.placed += u64::from(joined);
        self.beyond = self.beyond.checked_shr(joined).unwrap_or(0);
        let ended = self.end.filter(|end| *end <= self.placed);
        if ended.is_some() {
            self.end = None;
        }
        let due = ended.is_some() || self.placed >= self.acknowledged + ACKNOWLEDGE_FRAMES;
        if due {
            self.acknowledged = self.placed;
        }
        Placed { acknowledge: due.then_some(self.placed), ended }
    }

    /// The last frame up to which all frames are placed.
    #[must_use]
    pub fn placed(&self) -> u64 {
        self.placed
    }

    /// Whether a frame is placed already. Such a frame must not be placed again.
    #[must_use]
    pub fn is_placed(&self, sequence: u64) -> bool {
        let Some(behind) = sequence.checked_sub(self.placed + 1) else { return true };
        behind < MOST_IN_MAKING && self.beyond >> behind & 1 == 1
    }
}

/// What to report to the source and the session after a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// All frames up to this one are placed. To be acknowledged to the source.
    pub acknowledge: Option<u64>,
    /// The last frame of a round that is now completely placed.
    pub ended: Option<u64>,
}

/// Places frames in the guest's memory. A worker keeps its placer for the whole migration.
pub struct Placer {
    lanes: u8,
    memory: GuestMemory,
    hashes: Arc<PageHashes>,
    placed: Arc<PlacedCounters>,
    decoder: Decoder,
}

impl Placer {
    /// A placer for frames of all `lanes`. `hashes` are those of the pages as last placed.
    #[must_use]
    pub fn new(
        lanes: u8,
        memory: GuestMemory,
        hashes: Arc<PageHashes>,
        placed: Arc<PlacedCounters>,
        decompressors: Decompressors,
    ) -> Self {
        Self { lanes, memory, hashes, placed, decoder: Decoder::new(decompressors) }
    }

    /// Decodes and checks a frame that began at `offset` of the channel of lane `lane`, and places
    /// its pages if it is valid.
    ///
    /// # Errors
    /// [`MigrateError::Protocol`] for a frame that is corrupt, or names pages outside the guest or
    /// of another lane. Nothing of it was placed.
    pub fn place(&mut self, lane: u8, frame: &Frame, offset: u64) -> Result<(), MigrateError> {
        let lanes = self.lanes;
        let counts = self
            .decoder
            .place(frame, &self.memory, &self.hashes, |run| run_belongs(run, lane, lanes))
            .map_err(|error| refused(error, lane, offset))?;
        self.count(counts);
        Ok(())
    }

    fn count(&self, counts: PlacedPages) {
        self.placed.frames.fetch_add(1, Ordering::Relaxed);
        self.placed.content_pages.fetch_add(counts.content, Ordering::Relaxed);
        self.placed.zero_pages.fetch_add(counts.zero, Ordering::Relaxed);
    }
}

/// The error for a frame that began at `offset` of a lane's channel and can't be placed.
fn refused(error: CodecError, lane: u8, offset: u64) -> MigrateError {
    match error {
        CodecError::Memory(error) => error.into(),
        error => MigrateError::protocol(channel_name(Some(lane)), offset, chain(&error)),
    }
}

/// Whether all pages of a run belong to this lane.
fn run_belongs(run: &Run, lane: u8, lanes: u8) -> bool {
    let last = run.first + u64::from(run.pages.max(1)) - 1;
    let one_stripe = run.first / LANE_STRIPE_PAGES == last / LANE_STRIPE_PAGES;
    lanes == 1 || (one_stripe && lane_of(run.first, lanes) == lane)
}

#[cfg(test)]
mod tests {
    use vmferry_wire::Encoding;

    use super::*;

    fn header(sequence: u64, kind: FrameKind) -> FrameHeader {
        FrameHeader { kind, ..FrameHeader::end_of_round(1, sequence) }
    }

    #[test]
    fn progress_acknowledges_frames_that_are_placed_without_a_gap() {
        let mut progress = LaneProgress::default();
        let mut told = |sequence| {
            let placed = progress.finished(&header(sequence, FrameKind::Pages));
            (placed.acknowledge, placed.ended)
        };
        for sequence in [2, 4, 3, 5] {
            assert_eq!(told(sequence), (None, None));
        }
        assert_eq!(told(1), (Some(5), None));
        assert_eq!(told(6), (None, None));
        let end = progress.finished(&header(8, FrameKind::EndOfRound));
        assert_eq!(end, Placed::default(), "the round is not placed whole");
        let last = progress.finished(&header(7, FrameKind::Pages));
        assert_eq!(last, Placed { acknowledge: Some(8), ended: Some(8) });
        assert_eq!(progress.placed(), 8);
    }

    #[test]
    fn progress_records_frames_placed_after_a_gap() {
        let mut progress = LaneProgress::default();
        for sequence in [1, 2, 4, 7, MOST_IN_MAKING + 2] {
            progress.finished(&header(sequence, FrameKind::Pages));
        }
        let placed: Vec<u64> =
            (0..2 * MOST_IN_MAKING).filter(|sequence| progress.is_placed(*sequence)).collect();
        assert_eq!(placed, [0, 1, 2, 4, 7, MOST_IN_MAKING + 2]);
    }

    #[test]
    fn progress_accepts_the_most_frames_in_reverse_order() {
        let mut progress = LaneProgress::default();
        for sequence in (2..=MOST_IN_MAKING).rev() {
            assert_eq!(progress.finished(&header(sequence, FrameKind::Pages)), Placed::default());
        }
        let placed = progress.finished(&header(1, FrameKind::Pages));
        assert_eq!(placed.acknowledge, Some(MOST_IN_MAKING));
    }

    #[test]
    fn run_belongs_to_a_lane_with_all_of_its_pages() {
        let run = |first, pages| Run { first, pages, encoding: Encoding::Raw, content_sum: 0 };
        assert!(run_belongs(&run(0, 512), 0, 2));
        assert!(!run_belongs(&run(0, 513), 0, 2));
        assert!(run_belongs(&run(0, 5000), 0, 1));
        assert!(!run_belongs(&run(512, 1), 0, 2));
        assert!(run_belongs(&run(512, 1), 1, 2));
    }
}
