//! The lanes of a carried guest at the destination. Each receives one stream of the source's VMM,
//! whose bytes are written in order into a socket of this host's VMM.
//!
//! A lane has a thread that receives frames and a thread that decodes and writes them. The writer
//! outlives the channel. A frame is acknowledged as placed once its bytes are written to the VMM's
//! socket. So a slow VMM slows down its source, and only a few frames per lane are buffered here.

use std::collections::VecDeque;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use vmferry_codec::{Decompressors, Frame, StreamDecoder};
use vmferry_wire::{ControlMessage, FrameHeader, FrameKind, MAX_KEPT_PAGES};

use super::lane_channel::{LaneChannel, LanePosition, LaneReader};
use super::place::ACKNOWLEDGE_FRAMES;
use super::target::{LaneContext, LaneSet, StreamTarget};
use crate::causes::chain;
use crate::error::MigrateError;
use crate::link::{DataChannel, channel_name};
use crate::machine::destination::io::Input;

/// Frames of a lane that are received ahead while one frame is decoded and written.
const FRAMES_AHEAD: usize = 3;

/// All lanes of a session, one for each stream.
pub struct StreamLanes {
    context: LaneContext,
    target: StreamTarget,
    lanes: Vec<Lane>,
}

struct Lane {
    number: u8,
    queue: Arc<Queue>,
    /// How often the lane's channel was dialed before.
    attempt: u64,
    channel: Option<LaneChannel>,
    writer: Option<JoinHandle<()>>,
    /// Used to end the writer's wait for the VMM.
    socket: Option<UnixStream>,
}

/// Frames between the two threads of a lane.
#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

struct QueueState {
    free: Vec<Frame>,
    /// Received frames with their offsets in their channel.
    received: VecDeque<(Frame, u64)>,
    /// The last frame that was received completely.
    sequence: u64,
    /// The last frame written to the VMM, and the last frame acknowledged to the source.
    placed: u64,
    acknowledged: u64,
    /// Receiving has stopped: the channel is being replaced, or the session ends.
    closed: bool,
    /// Writing has stopped.
    ended: bool,
    /// The stream has ended here, and its socket is used further.
    keeps_socket: bool,
}

impl Default for QueueState {
    fn default() -> Self {
        Self {
            free: (0..=FRAMES_AHEAD).map(|_| Frame::new()).collect(),
            received: VecDeque::new(),
            sequence: 0,
            placed: 0,
            acknowledged: 0,
            closed: false,
            ended: false,
            keeps_socket: false,
        }
    }
}

impl StreamLanes {
    /// Lanes without channels.
    pub fn new(context: LaneContext, target: StreamTarget) -> Self {
        Self { context, target, lanes: Vec::new() }
    }

    /// Starts the thread that writes a lane's stream.
    fn start_writer(&mut self, lane: usize) -> std::io::Result<()> {
        let known = &mut self.lanes[lane];
        let socket =
            self.target.sockets.lock().get_mut(usize::from(known.number)).and_then(Option::take);
        let Some(socket) = socket else { return Ok(()) };
        known.socket = Some(socket.try_clone()?);
        let entries = MAX_KEPT_PAGES / u32::from(self.context.lanes.max(1));
        let writing = WritingThread {
            lane: known.number,
            queue: Arc::clone(&known.queue),
            socket: Some(socket),
            is_refused: false,
            decoder: StreamDecoder::new(Decompressors::default(), entries),
            target: self.target.clone(),
            context: self.context.clone(),
        };
        let thread = std::thread::Builder::new().name(format!("stream{}-write", known.number));
        known.writer = Some(thread.spawn(move || writing.run())?);
        Ok(())
    }
}

impl LaneSet for StreamLanes {
    /// Frames received on the lane's previous channel are kept and will be written. This does not
    /// wait for that, since the VMM may be waiting for another lane before it reads this one.
    fn expect(&mut self, lane: u8, attempt: u64) -> Option<u64> {
        let Some(known) = self.lanes.iter_mut().find(|known| known.number == lane) else {
            let queue = Arc::default();
            let (channel, writer, socket) = (None, None, None);
            self.lanes.push(Lane { number: lane, queue, attempt, channel, writer, socket });
            return Some(0);
        };
        if attempt <= known.attempt {
            return None;
        }
        known.attempt = attempt;
        known.end_channel();
        let mut state = known.queue.state.lock();
        state.closed = state.ended;
        Some(state.sequence)
    }

    fn join(&mut self, lane: u8, channel: DataChannel) -> std::io::Result<()> {
        let Some(index) = self.lanes.iter().position(|known| known.number == lane) else {
            return Ok(());
        };
        if self.lanes[index].writer.is_none() {
            self.start_writer(index)?;
        }
        let known = &mut self.lanes[index];
        let queue = Arc::clone(&known.queue);
        let sequence = queue.state.lock().sequence;
        let position = LanePosition { lane, attempt: known.attempt, sequence };
        known.channel =
            Some(LaneChannel::start(channel, position, &self.context, move |reader| {
                receive(reader, &queue);
            })?);
        Ok(())
    }

    fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.lanes.iter().any(|known| known.number == lane && known.attempt == attempt)
    }

    fn acknowledge(&self) {
        for known in &self.lanes {
            let (lane, sequence) = (known.number, known.queue.state.lock().placed);
            self.context.control.send(&ControlMessage::Placed { lane, sequence });
        }
    }
}

impl Lane {
    /// Closes the channel and waits for the thread that reads it.
    fn end_channel(&mut self) {
        self.queue.state.lock().closed = true;
        self.queue.changed.notify_all();
        if let Some(channel) = self.channel.take() {
            channel.end();
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.end_channel();
        let keeps_socket = {
            let mut state = self.queue.state.lock();
            state.ended = true;
            state.keeps_socket
        };
        self.queue.changed.notify_all();
        if let Some(socket) = self.socket.as_ref().filter(|_| !keeps_socket) {
            // An error only means that the VMM has closed the socket.
            let _ = socket.shutdown(Shutdown::Both);
        }
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl Queue {
    /// A frame buffer to receive into. Blocks until one is free; `None` at the end.
    fn acquire(&self) -> Option<Frame> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(frame) = state.free.pop() {
                return Some(frame);
            }
            self.changed.wait(&mut state);
        }
    }

    /// The next frame to write. Blocks until there is one; `None` at the end.
    fn next(&self) -> Option<(Frame, u64)> {
        let mut state = self.state.lock();
        loop {
            if state.ended {
                return None;
            }
            if let Some(next) = state.received.pop_front() {
                return Some(next);
            }
            self.changed.wait(&mut state);
        }
    }

    fn received(&self, frame: Frame, header: &FrameHeader, offset: u64) {
        let mut state = self.state.lock();
        state.sequence = header.sequence;
        state.received.push_back((frame, offset));
        drop(state);
        self.changed.notify_all();
    }

    fn free(&self, frame: Frame) {
        self.state.lock().free.push(frame);
        self.changed.notify_all();
    }

    /// Stops receiving and writing.
    fn end(&self) {
        let mut state = self.state.lock();
        (state.closed, state.ended) = (true, true);
        drop(state);
        self.changed.notify_all();
    }
}

/// Receives frames until the channel ends or the queue is closed.
fn receive(mut reader: LaneReader, queue: &Queue) {
    while let Some(mut frame) = queue.acquire() {
        let offset = reader.frames.offset();
        let received = reader.frames.receive(&mut frame);
        let bytes = reader.frames.offset() - offset;
        reader.context.placed.bytes.fetch_add(bytes, Ordering::Relaxed);
        match received {
            Ok(header) => queue.received(frame, &header, offset),
            Err(error) => {
                queue.free(frame);
                reader.fail(error);
                return;
            }
        }
    }
}

struct WritingThread {
    lane: u8,
    queue: Arc<Queue>,
    /// Closed after the stream's last byte.
    socket: Option<UnixStream>,
    /// The VMM reads the stream no longer, and the session decides whether that is an error.
    is_refused: bool,
    decoder: StreamDecoder,
    target: StreamTarget,
    context: LaneContext,
}

impl WritingThread {
    fn run(mut self) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        while let Some((frame, offset)) = self.queue.next() {
            if let Err(error) = self.write(&frame, offset) {
                let _ = self.context.results.send(Input::Failed(error));
                self.queue.end();
                return;
            }
            if let Some(header) = frame.header() {
                self.tell(header);
            }
            self.queue.free(frame);
        }
    }

    fn write(&mut self, frame: &Frame, offset: u64) -> Result<(), MigrateError> {
        if frame.header().is_some_and(|header| header.kind == FrameKind::EndOfRound) {
            match (self.socket.take(), &self.target.kept) {
                (Some(socket), Some(kept)) => {
                    self.queue.state.lock().keeps_socket = true;
                    kept.lock().insert(self.lane, socket);
                }
                (Some(socket), None) => {
                    // The VMM may have closed it already.
                    let _ = socket.shutdown(Shutdown::Write);
                }
                (None, _) => {}
            }
            return Ok(());
        }
        let lane = self.lane;
        let wrong = |reason| MigrateError::protocol(channel_name(Some(lane)), offset, reason);
        let piece = self.decoder.decode(frame).map_err(|error| wrong(chain(&error)))?;
        match &mut self.socket {
            // A VMM that has loaded the guest closes its streams, perhaps before their last bytes.
            Some(socket) => {
                if socket.write_all(piece.bytes).is_err() {
                    (self.socket, self.is_refused) = (None, true);
                    let _ = self.context.results.send(Input::StreamRefused);
                }
            }
            None if self.is_refused => {}
            None => return Err(wrong("a piece of a stream after its end".into())),
        }
        self.target.digest.fetch_add(piece.summary.content_hash, Ordering::Relaxed);
        let placed = &self.context.placed;
        placed.frames.fetch_add(1, Ordering::Relaxed);
        placed.content_pages.fetch_add(piece.summary.content_pages.into(), Ordering::Relaxed);
        placed.zero_pages.fetch_add(piece.summary.zero_pages.into(), Ordering::Relaxed);
        Ok(())
    }

    /// Reports what was written to the VMM to the source and the session.
    fn tell(&self, header: &FrameHeader) {
        let (lane, sequence) = (self.lane, header.sequence);
        let ended = header.kind == FrameKind::EndOfRound;
        let mut state = self.queue.state.lock();
        state.placed = sequence;
        // If no frame waits to be written, the source may be waiting for this acknowledgement.
        let due = ended
            || state.received.is_empty()
            || sequence >= state.acknowledged + ACKNOWLEDGE_FRAMES;
        if due {
            state.acknowledged = sequence;
        }
        drop(state);
        if due {
            self.context.control.send(&ControlMessage::Placed { lane, sequence });
        }
        if ended {
            self.context.end_of_round(lane, sequence);
        }
    }
}
