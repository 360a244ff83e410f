//! A lane of the destination, which outlives its channels.

use std::io::Cursor;

use vmferry::MigrateError;
use vmferry::data::destination::place::{FrameReader, LaneProgress, Placer, is_placed_at_once};
use vmferry_codec::Frame;
use vmferry_wire::FrameHeader;

use crate::network::ChannelId;

/// The received data of one lane.
pub(super) struct Lane {
    pub(super) channel: ChannelId,
    /// How often its channel was dialed before.
    pub(super) attempt: u64,
    pub(super) frames: FrameReader<Cursor<Vec<u8>>>,
    pub(super) placer: Placer,
    pub(super) progress: LaneProgress,
    /// Its channel is broken, or a frame was wrong: nothing more is read from it.
    pub(super) ended: bool,
    /// A frame could not be placed, and no later one may be.
    pub(super) failed: bool,
    /// The last frame that was placed, independent of the engine's own count.
    pub(super) last: u64,
}

impl Lane {
    /// Reads a frame and places it, partially if it is cut off, as the receiving thread and a
    /// worker do. `None` for a frame that is placed already, unless `again` is set.
    pub(super) fn receive(
        &mut self,
        number: u8,
        offset: u64,
        again: bool,
    ) -> Result<Option<FrameHeader>, MigrateError> {
        let mut frame = Frame::new();
        let header = self.frames.receive_head(&mut frame)?;
        let placed = self.progress.is_placed(header.sequence) && !again;
        if !placed && is_placed_at_once(&header) {
            self.placer.receive(&mut self.frames, &frame, offset)?;
            return Ok(Some(header));
        }
        self.frames.receive_payload(&mut frame)?;
        if placed {
            return Ok(None);
        }
        self.placer.place(number, &frame, offset)?;
        Ok(Some(header))
    }
}
