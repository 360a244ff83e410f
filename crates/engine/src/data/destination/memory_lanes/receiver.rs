//! The thread that receives a lane's frames. It places raw pages itself, and passes all other
//! frames to the placers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::Sender;
use vmferry_codec::Frame;
use vmferry_transport::{ChannelCloser, ChannelReader};
use vmferry_wire::{FrameHeader, FrameKind};

use super::lane_state::LaneState;
use super::placers::ReceivedFrame;
use crate::data::destination::place::{Arriving, FrameReader, Placer, is_placed_at_once};
use crate::data::destination::target::LaneContext;
use crate::error::MigrateError;
use crate::machine::destination::io::Input;

/// The thread of one channel of a lane.
pub struct ReceivingThread {
    pub lane: Arc<LaneState>,
    pub frames: FrameReader<Arriving<ChannelReader>>,
    /// Places raw pages.
    pub placer: Placer,
    pub closer: ChannelCloser,
    /// How often the channel was dialed before.
    pub attempt: u64,
    /// To the placers.
    pub received: Sender<ReceivedFrame>,
    pub context: LaneContext,
}

impl ReceivingThread {
    /// Receives until the channel ends or the lane is closed.
    pub fn run(mut self) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        while let Some(frame) = self.lane.acquire() {
            if !self.receive(frame) {
                return;
            }
        }
    }

    /// Receives a frame. Places it, passes it to the placers, or ignores it if it was placed before
    /// the channel was reestablished. `false` at the end.
    fn receive(&mut self, mut frame: Frame) -> bool {
        let offset = self.frames.offset();
        let received = self.receive_and_place(&mut frame, offset);
        let bytes = self.frames.offset() - offset;
        self.context.placed.bytes.fetch_add(bytes, Ordering::Relaxed);
        match received {
            Ok(Received::Placed(header)) => {
                self.lane.free(frame);
                self.lane.report(&header, &self.context);
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
                self.fail(error);
                false
            }
        }
    }

    fn receive_and_place(
        &mut self,
        frame: &mut Frame,
        offset: u64,
    ) -> Result<Received, MigrateError> {
        let header = self.frames.receive_head(frame)?;
        if !self.lane.await_room(header.sequence) {
            return Ok(Received::Nothing);
        }
        let again = self.lane.is_placed(header.sequence);
        if !again && is_placed_at_once(&header) {
            self.placer.receive(&mut self.frames, frame, offset)?;
            return Ok(Received::Placed(header));
        }
        self.frames.receive_payload(frame)?;
        Ok(if again { Received::Again } else { Received::ToDecode })
    }

    fn fail(&self, error: MigrateError) {
        // If only one direction is broken, the source would not notice the loss otherwise.
        self.closer.close();
        let (lane, attempt) = (self.lane.number(), self.attempt);
        let _ = self.context.results.send(match error {
            error @ MigrateError::LinkLost { .. } => Input::LaneLost { lane, attempt, error },
            error => {
                // Part of a corrupt frame may be in memory, so no later frame may be placed.
                self.lane.fail();
                Input::Failed(error)
            }
        });
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
