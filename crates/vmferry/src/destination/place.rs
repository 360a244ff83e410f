//! What one lane of the destination does with a frame: reads it whole, checks it, places its pages.
//!
//! Frames are placed in the order of their numbers, which must be without gaps: a page always has the
//! lane that its number gives it, so no version of it can overtake another.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmferry_codec::{CodecError, Decoder, Frame, PageHashes, ReadError};
use vmferry_memory::GuestMemory;
use vmferry_wire::{FrameHeader, FrameKind, Run};

use crate::config::{LANE_STRIPE_PAGES, lane_of};
use crate::error::MigrateError;
use crate::link::lost;

/// Frames between two acknowledgements: 1 MiB, so that the source's window of 64 MiB turns over
/// smoothly and the control channel carries few of them.
const ACKNOWLEDGE_FRAMES: u64 = 4;

/// What all lanes have placed so far.
#[derive(Debug, Default)]
pub struct PlacedCounters {
    /// Frames.
    pub frames: AtomicU64,
    /// Pages with content.
    pub content_pages: AtomicU64,
    /// Pages of zeros.
    pub zero_pages: AtomicU64,
    /// Bytes read.
    pub bytes: AtomicU64,
}

/// Reads a lane's frames, each whole, in the order of their numbers.
pub struct FrameReader<R> {
    lane: u8,
    reader: R,
    offset: u64,
    sequence: u64,
}

impl<R: Read> FrameReader<R> {
    /// A lane on which no frame has come yet.
    pub fn new(lane: u8, reader: R) -> Self {
        Self { lane, reader, offset: 0, sequence: 0 }
    }

    /// Bytes read so far.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// What the frames are read from.
    pub fn get_mut(&mut self) -> &mut R {
        &mut self.reader
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// [`MigrateError::LinkLost`] at the channel's end, whether between frames or within one, and
    /// [`MigrateError::Protocol`], which names the lane and the offset, for everything else.
    pub fn receive(&mut self, frame: &mut Frame) -> Result<FrameHeader, MigrateError> {
        let channel = || format!("lane {}", self.lane);
        let offset = self.offset;
        let protocol =
            |reason: String| MigrateError::Protocol { channel: channel(), offset, reason };
        let mut counted = Counted { reader: &mut self.reader, bytes: 0 };
        let read = frame.read_from(&mut counted);
        self.offset += counted.bytes;
        let header = match read {
            Ok(Some(header)) => header,
            Ok(None) => {
                let end = std::io::ErrorKind::UnexpectedEof.into();
                return Err(lost(&channel(), "receiving pages", &end));
            }
            Err(ReadError::Io(error)) => return Err(lost(&channel(), "receiving pages", &error)),
            Err(ReadError::Wire(error)) => return Err(protocol(error.to_string())),
        };
        let due = self.sequence + 1;
        if header.sequence != due {
            return Err(protocol(format!("frame {} came where {due} was due", header.sequence)));
        }
        self.sequence = due;
        Ok(header)
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

/// What the source and the session are to be told after a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// All frames up to this one are placed: to be said to the source.
    pub acknowledge: Option<u64>,
    /// The frame was the last of its round.
    pub ended: Option<u64>,
}

/// Places one lane's frames.
pub struct Placer {
    lane: u8,
    lanes: u8,
    memory: GuestMemory,
    hashes: Arc<PageHashes>,
    placed: Arc<PlacedCounters>,
    decoder: Decoder,
    unacknowledged: u64,
}

impl Placer {
    /// Lane `lane` of `lanes`. `hashes` are those of the pages as last placed, over all lanes.
    #[must_use]
    pub fn new(
        lane: u8,
        lanes: u8,
        memory: GuestMemory,
        hashes: Arc<PageHashes>,
        placed: Arc<PlacedCounters>,
    ) -> Self {
        Self { lane, lanes, memory, hashes, placed, decoder: Decoder::new(), unacknowledged: 0 }
    }

    /// Checks a frame that began at `offset` of the channel, and places its pages if it is right.
    ///
    /// # Errors
    /// [`MigrateError::Protocol`] for a frame that is damaged, names pages outside the guest or of
    /// another lane; nothing of it was placed.
    pub fn place(&mut self, frame: &Frame, offset: u64) -> Result<Placed, MigrateError> {
        let Some(header) = frame.header() else { return Ok(Placed::default()) };
        let counts = self
            .decoder
            .place(frame, &self.memory, &self.hashes, |run| run_belongs(run, self.lane, self.lanes))
            .map_err(|error| match error {
                CodecError::Memory(error) => error.into(),
                error => {
                    let channel = format!("lane {}", self.lane);
                    MigrateError::Protocol { channel, offset, reason: error.to_string() }
                }
            })?;
        self.placed.frames.fetch_add(1, Ordering::Relaxed);
        self.placed.content_pages.fetch_add(counts.content_pages, Ordering::Relaxed);
        self.placed.zero_pages.fetch_add(counts.zero_pages, Ordering::Relaxed);
        let ended = (header.kind == FrameKind::EndOfRound).then_some(header.sequence);
        self.unacknowledged += 1;
        let due = ended.is_some() || self.unacknowledged == ACKNOWLEDGE_FRAMES;
        if due {
            self.unacknowledged = 0;
        }
        Ok(Placed { acknowledge: due.then_some(header.sequence), ended })
    }
}

/// Whether all pages of a run travel on this lane.
fn run_belongs(run: &Run, lane: u8, lanes: u8) -> bool {
    let last = run.first + u64::from(run.pages.max(1)) - 1;
    let one_stripe = run.first / LANE_STRIPE_PAGES == last / LANE_STRIPE_PAGES;
    lanes == 1 || (one_stripe && lane_of(run.first, lanes) == lane)
}

#[cfg(test)]
mod tests {
    use vmferry_wire::Encoding;

    use super::*;

    #[test]
    fn a_run_belongs_to_one_lane_whole() {
        let run = |first, pages| Run { first, pages, encoding: Encoding::Raw };
        assert!(run_belongs(&run(0, 512), 0, 2));
        assert!(!run_belongs(&run(0, 513), 0, 2));
        assert!(run_belongs(&run(0, 5000), 0, 1));
        assert!(!run_belongs(&run(512, 1), 0, 2));
        assert!(run_belongs(&run(512, 1), 1, 2));
    }
}
