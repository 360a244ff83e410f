//! A lane's channel at the destination and the thread that reads it, for both kinds of guests.

use std::sync::Arc;
use std::thread::JoinHandle;

use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};

use super::place::{Arriving, FrameReader};
use super::target::LaneContext;
use crate::error::MigrateError;
use crate::link::DataChannel;
use crate::machine::destination::io::Input;

/// Where a channel continues its lane.
pub struct LanePosition {
    /// The lane's number.
    pub lane: u8,
    /// How often the lane's channel was dialed before.
    pub attempt: u64,
    /// The last frame that need not be sent again.
    pub sequence: u64,
}

/// A lane's channel and the thread that reads it.
pub struct LaneChannel {
    closer: ChannelCloser,
    thread: JoinHandle<()>,
    /// The sending half, kept open until the end.
    _writer: ChannelWriter,
}

impl LaneChannel {
    /// Starts the thread, which runs `receive`.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        channel: DataChannel,
        LanePosition { lane, attempt, sequence }: LanePosition,
        context: &LaneContext,
        receive: impl FnOnce(LaneReader) + Send + 'static,
    ) -> std::io::Result<Self> {
        let DataChannel { reader, writer, closer } = channel;
        let arriving = Arriving::new(reader, Arc::clone(&context.placed));
        let reader = LaneReader {
            lane,
            attempt,
            frames: FrameReader::after(lane, arriving, sequence),
            closer: closer.clone(),
            context: context.clone(),
        };
        let thread =
            std::thread::Builder::new().name(format!("lane{lane}-receive")).spawn(move || {
                let cpu = reader.context.cpu.clone();
                let _cpu = cpu.count_this_thread();
                receive(reader);
            })?;
        Ok(Self { closer, thread, _writer: writer })
    }

    /// Closes the channel and waits for the thread.
    pub fn end(self) {
        self.closer.close();
        // A panic there was noticed as a lost lane.
        let _ = self.thread.join();
    }
}

/// The reading thread's part of the channel.
pub struct LaneReader {
    lane: u8,
    attempt: u64,
    /// The lane's frames.
    pub frames: FrameReader<Arriving<ChannelReader>>,
    closer: ChannelCloser,
    /// The session.
    pub context: LaneContext,
}

impl LaneReader {
    /// Closes the channel after an error, and reports the error to the session.
    pub fn fail(&self, error: MigrateError) {
        // If only one direction is broken, the source would not notice the loss otherwise.
        self.closer.close();
        let (lane, attempt) = (self.lane, self.attempt);
        let _ = self.context.results.send(match error {
            error @ MigrateError::LinkLost { .. } => Input::LaneLost { lane, attempt, error },
            error => Input::Failed(error),
        });
    }
}
