//! The thread that receives a lane's frames. It places raw pages itself, and passes all other
//! frames to the placers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::Sender;
use vmferry_codec::Frame;
use vmferry_wire::{FrameHeader, FrameKind};

use super::lane_state::LaneState;
use super::placers::ReceivedFrame;
use crate::data::destination::lane_channel::LaneReader;
use crate::data::destination::place::{Placer, is_placed_at_once};
use crate::error::MigrateError;

/// The thread of one channel of a lane.
pub struct ReceivingThread {
    pub lane: Arc<LaneState>,
    pub reader: LaneReader,
    /// Places raw pages.
    pub placer: Placer,
    /// To the placers.
    pub received: Sender<ReceivedFrame>,
}

impl ReceivingThread {
    /// Receives until the channel ends or the lane is closed.
    pub fn run(mut self) {
        while let Some(frame) = self.lane.acquire() {
            if !self.receive(frame) {
                return;
            }
        }
    }

    /// Receives a frame. Places it, passes it to the placers, or ignores it if it was placed before
    /// the channel was reestablished. `false` at the end.
    fn receive(&mut self, mut frame: Frame) -> bool {
        let offset = self.reader.frames.offset();
        let received = self.receive_and_place(&mut frame, offset);
        let bytes = self.reader.frames.offset() - offset;
        self.reader.context.placed.bytes.fetch_add(bytes, Ordering::Relaxed);
        match received {
            Ok(Received::Placed(header)) => {
                self.lane.free(frame);
                self.lane.report(&header, &self.reader.context);
                // The frames that follow may contain newer versions of the same pages.
                header.kind != FrameKind::EndOfRound || self.lane.await_placed(header.sequence)
            }
            Ok(Received::ToDecode) => {
                let lane = Arc::clone(&self.lane);
                let sent = self.received.send(ReceivedFrame { frame, offset, lane });
                sent.map_err(|error| self.lane.free(error.into_inner().frame)).is_ok()
            }
            Ok(Received::Again) => {
                self.lane.free(frame);
                true
            }
            Ok(Received::Nothing) => {
                self.lane.free(frame);
                false
            }
            Err(error) => {
                self.lane.free(frame);
                if !matches!(error, MigrateError::LinkLost { .. }) {
                    // Part of a corrupt frame may be in memory, so no later frame may be placed.
                    self.lane.fail();
                }
                self.reader.fail(error);
                false
            }
        }
    }

    fn receive_and_place(
        &mut self,
        frame: &mut Frame,
        offset: u64,
    ) -> Result<Received, MigrateError> {
        let header = self.reader.frames.receive_head(frame)?;
        if !self.lane.await_room(header.sequence) {
            return Ok(Received::Nothing);
        }
        let again = self.lane.is_placed(header.sequence);
        if !again && is_placed_at_once(&header) {
            self.placer.receive(&mut self.reader.frames, frame, offset)?;
            return Ok(Received::Placed(header));
        }
        self.reader.frames.receive_payload(frame)?;
        Ok(if again { Received::Again } else { Received::ToDecode })
    }
}

/// The result of receiving a frame.
enum Received {
    /// It is placed.
    Placed(FrameHeader),
    /// It was received completely and must be decoded.
    ToDecode,
    /// It was placed before.
    Again,
    /// It is not needed because the session ends.
    Nothing,
}
