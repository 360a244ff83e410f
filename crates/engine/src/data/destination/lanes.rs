//! The destination's lanes: a receiving thread for each, and shared workers that decode and place.
//!
//! The next frame is read and decrypted while others are decoded and placed. Frames of one round
//! are placed in the order in which workers finish them. A lane's next round waits until the
//! previous one is completely placed.
//!
//! A lane outlives its channel. On a new channel the source continues after the last frame up to
//! which everything is placed. Later frames that were already placed are read and ignored.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{Decompressors, Frame};
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::{ControlMessage, FrameHeader, FrameKind};

use super::place::{
    Arriving, FrameReader, LaneProgress, MOST_IN_MAKING, Placer, is_placed_at_once,
};
use super::target::{LaneContext, LaneSet, MemoryTarget};
use crate::config::DestinationConfig;
use crate::config::compression::worker_threads;
use crate::error::MigrateError;
use crate::machine::destination::io::Input;

/// Frames of a lane that are read ahead while the workers are busy with others of the lane. A few
/// of 256 KiB keep both busy and stay in the cache.
const FRAMES_AHEAD: usize = 3;

/// All running lanes of a session. After a drop, no thread accesses the guest's memory.
pub struct Lanes {
    context: LaneContext,
    target: MemoryTarget,
    work: Option<Sender<Work>>,
    workers: Vec<JoinHandle<()>>,
    lanes: Vec<Lane>,
}

struct Lane {
    shared: Arc<LaneState>,
    /// How often the lane's channel was dialed before.
    attempt: u64,
    channel: Option<LaneChannel>,
}

/// A lane's channel and the thread that reads it.
struct LaneChannel {
    closer: ChannelCloser,
    thread: JoinHandle<()>,
    /// The sending half, kept open until the end.
    _writer: ChannelWriter,
}

/// A frame that was read, its offset in its channel, and its lane.
struct Work {
    frame: Frame,
    offset: u64,
    lane: Arc<LaneState>,
}

/// State shared by a lane's receiving thread and the workers.
struct LaneState {
    number: u8,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    progress: LaneProgress,
    free: Vec<Frame>,
    /// The number of frame buffers, in use or free.
    frames: usize,
    /// Receiving has stopped: the channel is being replaced, or the session ends.
    closed: bool,
    /// A frame could not be placed, and no later frame may be placed.
    failed: bool,
}

impl Lanes {
    /// Starts the workers.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        context: LaneContext,
        target: MemoryTarget,
        config: &DestinationConfig,
    ) -> std::io::Result<Self> {
        let workers = worker_threads(config.workers).max(1);
        let longest = usize::from(context.lanes) * (workers + FRAMES_AHEAD);
        let (work, work_in) = crossbeam_channel::bounded(longest);
        let (workers_made, lanes_made) = (Vec::new(), Vec::new());
        let mut all =
            Self { context, target, work: Some(work), workers: workers_made, lanes: lanes_made };
        for number in 0..workers {
            let worker = Worker {
                placer: placer(&all.context, &all.target, (config.decompressors)()),
                context: all.context.clone(),
            };
            let work = work_in.clone();
            let thread = std::thread::Builder::new()
                .name(format!("place{number}"))
                .spawn(move || worker.run(&work))?;
            all.workers.push(thread);
        }
        Ok(all)
    }
}

impl LaneSet for Lanes {
    /// Everything that was read from the lane's previous channel is placed before this returns.
    fn expect(&mut self, lane: u8, attempt: u64) -> Option<u64> {
        let Some(known) = self.lanes.iter_mut().find(|known| known.shared.number == lane) else {
            let shared = Arc::new(LaneState::new(lane, self.workers.len() + FRAMES_AHEAD));
            self.lanes.push(Lane { shared, attempt, channel: None });
            return Some(0);
        };
        if attempt <= known.attempt {
            return None;
        }
        known.attempt = attempt;
        known.end();
        known.shared.reopen()
    }

    fn join(
        &mut self,
        lane: u8,
        reader: ChannelReader,
        writer: ChannelWriter,
        closer: ChannelCloser,
    ) -> std::io::Result<()> {
        let known = self.lanes.iter_mut().find(|known| known.shared.number == lane);
        let (Some(known), Some(work)) = (known, self.work.clone()) else { return Ok(()) };
        let placed = known.shared.lock().progress.placed();
        let receiving = ReceivingThread {
            lane: Arc::clone(&known.shared),
            frames: FrameReader::after(
                lane,
                Arriving::new(reader, Arc::clone(&self.context.placed)),
                placed,
            ),
            closer: closer.clone(),
            placer: placer(&self.context, &self.target, Decompressors::default()),
            attempt: known.attempt,
            work,
            context: self.context.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("lane{lane}-receive"))
            .spawn(move || receiving.run())?;
        known.channel = Some(LaneChannel { closer, thread, _writer: writer });
        Ok(())
    }

    fn is_at(&self, lane: u8, attempt: u64) -> bool {
        self.lanes.iter().any(|known| known.shared.number == lane && known.attempt == attempt)
    }

    fn acknowledge(&self) {
        for lane in &self.lanes {
            let (lane, sequence) = (lane.shared.number, lane.shared.lock().progress.placed());
            self.context.control.send(&ControlMessage::Placed { lane, sequence });
        }
    }
}

impl Lane {
    /// Closes the channel and waits for the thread that reads it.
    fn end(&mut self) {
        self.shared.close();
        if let Some(LaneChannel { closer, thread, .. }) = self.channel.take() {
            closer.close();
            // A panic there was noticed as a lost lane.
            let _ = thread.join();
        }
    }
}

fn placer(context: &LaneContext, target: &MemoryTarget, decompressors: Decompressors) -> Placer {
    Placer::new(
        context.lanes,
        target.memory.clone(),
        Arc::clone(&target.hashes),
        Arc::clone(&context.placed),
        decompressors,
    )
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.lanes.iter_mut().for_each(Lane::end);
        // The receiving threads, which have ended, held the other senders.
        self.work = None;
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl LaneState {
    fn new(number: u8, frames: usize) -> Self {
        let frames = frames.min(MOST_IN_MAKING as usize);
        let state = State {
            progress: LaneProgress::default(),
            free: (0..frames).map(|_| Frame::new()).collect(),
            frames,
            closed: false,
            failed: false,
        };
        Self { number, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits until the workers have finished everything that was read, and allows a new channel.
    /// Returns the last frame up to which all frames are placed, or `None` if a frame could not be
    /// placed.
    fn reopen(&self) -> Option<u64> {
        let mut state = self.lock();
        while state.free.len() < state.frames && !state.failed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.failed {
            return None;
        }
        state.closed = false;
        Some(state.progress.placed())
    }

    /// Returns a frame buffer that is no longer needed.
    fn free(&self, frame: Frame) {
        self.lock().free.push(frame);
        self.changed.notify_all();
    }

    /// A frame could not be placed, so no later frame is placed either.
    fn fail(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.failed = true;
        drop(state);
        self.changed.notify_all();
    }

    /// A frame buffer to read into. Blocks until one is free; `None` at the end.
    fn acquire(&self) -> Option<Frame> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(frame) = state.free.pop() {
                return Some(frame);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Blocks until all frames up to `sequence` are placed; `false` at the end.
    fn await_placed(&self, sequence: u64) -> bool {
        let mut state = self.lock();
        while state.progress.placed() < sequence && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.closed
    }

    /// Blocks until a frame may be passed to the workers; `false` at the end. Frames after a slow
    /// one are tracked in a bitmap of limited size. A source that respects its window never reaches
    /// this limit.
    fn await_room(&self, sequence: u64) -> bool {
        self.await_placed(sequence.saturating_sub(MOST_IN_MAKING))
    }

    fn is_placed(&self, sequence: u64) -> bool {
        self.lock().progress.is_placed(sequence)
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct ReceivingThread {
    lane: Arc<LaneState>,
    frames: FrameReader<Arriving<ChannelReader>>,
    placer: Placer,
    closer: ChannelCloser,
    attempt: u64,
    work: Sender<Work>,
    context: LaneContext,
}

impl ReceivingThread {
    fn run(mut self) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        while let Some(frame) = self.lane.acquire() {
            if !self.receive(frame) {
                return;
            }
        }
    }

    /// Receives a frame. Places it, passes it to the workers, or ignores it if it was placed before
    /// the channel was reestablished. `false` at the end.
    fn receive(&mut self, mut frame: Frame) -> bool {
        let offset = self.frames.offset();
        let received = self.receive_and_place(&mut frame, offset);
        let bytes = self.frames.offset() - offset;
        self.context.placed.bytes.fetch_add(bytes, Ordering::Relaxed);
        match received {
            Ok(Received::Placed(header)) => {
                self.lane.free(frame);
                self.context.tell(&self.lane, &header);
                // The frames that follow may contain newer versions of the same pages.
                header.kind != FrameKind::EndOfRound || self.lane.await_placed(header.sequence)
            }
            Ok(Received::ToDecode) => {
                let sent = self.work.send(Work { frame, offset, lane: Arc::clone(&self.lane) });
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
        let (lane, attempt) = (self.lane.number, self.attempt);
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

struct Worker {
    placer: Placer,
    context: LaneContext,
}

impl Worker {
    fn run(mut self, work: &Receiver<Work>) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        for Work { frame, offset, lane } in work {
            match self.placer.place(lane.number, &frame, offset) {
                Ok(()) => {
                    if let Some(header) = frame.header() {
                        self.context.tell(&lane, header);
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

impl LaneContext {
    /// Reports what is placed to the source and the session.
    fn tell(&self, lane: &LaneState, header: &FrameHeader) {
        let placed = lane.lock().progress.finished(header);
        let number = lane.number;
        if let Some(sequence) = placed.acknowledge {
            self.control.send(&ControlMessage::Placed { lane: number, sequence });
        }
        if let Some(sequence) = placed.ended {
            self.end_of_round(number, sequence);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_frames_are_begun_behind_a_slow_one_than_can_be_counted() {
        let lane = LaneState::new(0, 4);
        let finish = |sequence| {
            let header =
                FrameHeader { kind: FrameKind::Pages, ..FrameHeader::end_of_round(1, sequence) };
            lane.lock().progress.finished(&header);
            lane.changed.notify_all();
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(lane.await_room(MOST_IN_MAKING + 1));
                finish(MOST_IN_MAKING + 1);
            });
            (2..=MOST_IN_MAKING).for_each(finish);
            finish(1);
        });
        assert_eq!(lane.lock().progress.placed(), MOST_IN_MAKING + 1);
    }

    #[test]
    fn the_end_ends_the_wait_for_room() {
        let lane = LaneState::new(0, 4);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lane.await_room(MOST_IN_MAKING + 1));
            lane.close();
            assert!(!waiting.join().unwrap());
        });
    }
}
