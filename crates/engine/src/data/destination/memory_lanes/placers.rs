//! The threads that decode and place frames for all lanes.

use std::sync::Arc;

use crossbeam_channel::Receiver;
use vmferry_codec::Frame;
use vmferry_wire::{ControlMessage, FrameHeader};

use super::lane_state::LaneState;
use crate::data::destination::place::Placer;
use crate::data::destination::target::LaneContext;
use crate::machine::destination::io::Input;

/// A frame that was received and must be decoded.
pub struct ReceivedFrame {
    /// The frame.
    pub frame: Frame,
    /// Its offset in its channel.
    pub offset: u64,
    /// Its lane.
    pub lane: Arc<LaneState>,
}

/// One thread.
pub struct PlacingThread {
    pub placer: Placer,
    pub context: LaneContext,
}

impl PlacingThread {
    /// Places frames until all senders are dropped.
    pub fn run(mut self, received: &Receiver<ReceivedFrame>) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        for ReceivedFrame { frame, offset, lane } in received {
            match self.placer.place(lane.number(), &frame, offset) {
                Ok(()) => {
                    if let Some(header) = frame.header() {
                        lane.report(header, &self.context);
                    }
                }
                Err(error) => {
                    let _ = self.context.results.send(Input::Failed(error));
                    lane.fail();
                }
            }
            lane.free(frame);
        }
    }
}

impl LaneState {
    /// Records a placed frame, and reports what is placed to the source and the session.
    pub fn report(&self, header: &FrameHeader, context: &LaneContext) {
        let placed = self.finished(header);
        let lane = self.number();
        if let Some(sequence) = placed.acknowledge {
            context.control.send(&ControlMessage::Placed { lane, sequence });
        }
        if let Some(sequence) = placed.ended {
            context.end_of_round(lane, sequence);
        }
    }
}
