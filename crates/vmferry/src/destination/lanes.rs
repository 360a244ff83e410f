//! The lanes of the destination: a thread for each that receives, and workers for all that decode and place.
//!
//! The next frame is read (and decrypted) while others are decoded and placed. Frames of one round are placed
//! in whatever order the workers finish; a lane's next round waits until all of the one before is placed.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{Decompressors, Frame, PageHashes};
use vmferry_memory::GuestMemory;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::{ControlMessage, FrameHeader, FrameKind};

use super::io::Input;
use super::place::{
    FrameReader, LaneProgress, MOST_IN_MAKING, PlacedCounters, Placer, is_placed_at_once,
};
use crate::compression::worker_threads;
use crate::config::DestinationConfig;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::{ControlWriter, lost};

/// Frames of a lane that are read while the workers are busy with others of it. A few of 256 KiB keep both
/// busy and stay in the cache.
const FRAMES_AHEAD: usize = 3;

/// What all lanes of a session share.
#[derive(Clone)]
pub struct LaneContext {
    /// The guest's memory.
    pub memory: GuestMemory,
    /// Hashes of the pages as last placed.
    pub hashes: Arc<PageHashes>,
    /// Where acknowledgements go.
    pub control: Arc<ControlWriter<ChannelWriter>>,
    /// Where results go.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// What was placed.
    pub placed: Arc<PlacedCounters>,
    /// Number of lanes.
    pub lanes: u8,
}

/// All lanes of a session at work. Dropped, no thread touches the guest's memory any more.
pub struct Lanes {
    context: LaneContext,
    work: Option<Sender<Work>>,
    workers: Vec<JoinHandle<()>>,
    lanes: Vec<Lane>,
}

struct Lane {
    closer: ChannelCloser,
    shared: Arc<LaneState>,
    thread: Option<JoinHandle<()>>,
    /// The sending half, kept open until the end.
    _writer: ChannelWriter,
}

/// A frame that is read, where on its channel it began, and its lane.
struct Work {
    frame: Frame,
    offset: u64,
    lane: Arc<LaneState>,
}

/// What the receiving thread of a lane shares with the workers.
struct LaneState {
    number: u8,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    progress: LaneProgress,
    free: Vec<Frame>,
    closed: bool,
}

impl Lanes {
    /// Starts the workers.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start(context: LaneContext, config: &DestinationConfig) -> std::io::Result<Self> {
        let workers = worker_threads(config.workers).max(1);
        let longest = usize::from(context.lanes) * (workers + FRAMES_AHEAD);
        let (work, work_in) = crossbeam_channel::bounded(longest);
        let mut all = Self { context, work: Some(work), workers: Vec::new(), lanes: Vec::new() };
        for number in 0..workers {
            let decompressors = if config.keep_decompressors {
                Decompressors::default()
            } else {
                Decompressors::per_call()
            };
            let worker = Worker {
                placer: placer(&all.context, decompressors),
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

    /// Whether a lane has its channel.
    #[must_use]
    pub fn has(&self, lane: u8) -> bool {
        self.lanes.iter().any(|joined| joined.shared.number == lane)
    }

    /// Starts to receive on a lane's greeted channel.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn join(
        &mut self,
        lane: u8,
        reader: ChannelReader,
        writer: ChannelWriter,
        closer: ChannelCloser,
    ) -> std::io::Result<()> {
        let Some(work) = self.work.clone() else { return Ok(()) };
        let shared = Arc::new(LaneState::new(lane, self.workers.len() + FRAMES_AHEAD));
        let receiving = ReceivingThread {
            lane: Arc::clone(&shared),
            frames: FrameReader::new(lane, reader),
            placer: placer(&self.context, Decompressors::default()),
            work,
            context: self.context.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("lane{lane}-receive"))
            .spawn(move || receiving.run())?;
        self.lanes.push(Lane { closer, shared, thread: Some(thread), _writer: writer });
        Ok(())
    }
}

fn placer(context: &LaneContext, decompressors: Decompressors) -> Placer {
    Placer::new(
        context.lanes,
        context.memory.clone(),
        Arc::clone(&context.hashes),
        Arc::clone(&context.placed),
        decompressors,
    )
}

impl Drop for Lanes {
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            lane.closer.close();
            lane.shared.close();
            if let Some(thread) = lane.thread.take() {
                // A panic there has been noticed as a lost lane.
                let _ = thread.join();
            }
        }
        // The receiving threads had the other ends.
        self.work = None;
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl LaneState {
    fn new(number: u8, frames: usize) -> Self {
        let frames = frames.min(MOST_IN_MAKING as usize);
        let free = (0..frames).map(|_| Frame::new()).collect();
        let state = State { progress: LaneProgress::default(), free, closed: false };
        Self { number, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// A frame to read into, waiting until one is free; `None` at the end.
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

    /// Waits until all frames up to `sequence` are placed; `false` at the end.
    fn await_placed(&self, sequence: u64) -> bool {
        let mut state = self.lock();
        while state.progress.placed() < sequence && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.closed
    }

    /// Waits until a frame may be handed to the workers; `false` at the end. While one of them is slow with
    /// a frame, those behind it are counted, and there is a limit to that. A source that keeps to its window
    /// never comes near it.
    fn await_room(&self, sequence: u64) -> bool {
        self.await_placed(sequence.saturating_sub(MOST_IN_MAKING))
    }

    /// A frame that is not needed any more.
    fn free(&self, frame: Frame) {
        self.lock().free.push(frame);
        self.changed.notify_all();
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
    frames: FrameReader<ChannelReader>,
    placer: Placer,
    work: Sender<Work>,
    context: LaneContext,
}

impl ReceivingThread {
    fn run(mut self) {
        let cpu = self.context.cpu.clone();
        let _cpu = cpu.count_this_thread();
        while let Some(frame) = self.lane.acquire() {
            match self.receive(frame) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    fail(&self.context, error);
                    return;
                }
            }
        }
    }

    /// Receives a frame, and places it or hands it to the workers; `false` at the end.
    fn receive(&mut self, mut frame: Frame) -> Result<bool, MigrateError> {
        let offset = self.frames.offset();
        let received = self.receive_and_place(&mut frame, offset);
        let bytes = self.frames.offset() - offset;
        self.context.placed.bytes.fetch_add(bytes, Ordering::Relaxed);
        let Some(header) = received? else { return Ok(false) };
        if is_placed_at_once(&header) {
            self.lane.free(frame);
            self.context.tell(&self.lane, &header)?;
        } else if self.work.send(Work { frame, offset, lane: Arc::clone(&self.lane) }).is_err() {
            return Ok(false);
        }
        // What follows may be newer versions of the same pages.
        Ok(header.kind != FrameKind::EndOfRound || self.lane.await_placed(header.sequence))
    }

    /// Receives a frame, and places it if there is nothing to decode; `None` at the end.
    fn receive_and_place(
        &mut self,
        frame: &mut Frame,
        offset: u64,
    ) -> Result<Option<FrameHeader>, MigrateError> {
        let header = self.frames.receive_head(frame)?;
        if !self.lane.await_room(header.sequence) {
            return Ok(None);
        }
        if is_placed_at_once(&header) {
            self.placer.receive(&mut self.frames, frame, offset)?;
        } else {
            self.frames.receive_payload(frame)?;
        }
        Ok(Some(header))
    }
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
            let placed = self.placer.place(lane.number, &frame, offset);
            let done = placed.and_then(|()| match frame.header() {
                Some(header) => self.context.tell(&lane, header),
                None => Ok(()),
            });
            if let Err(error) = done {
                fail(&self.context, error);
                // Nothing more is placed of this lane: what has failed must not be followed.
                lane.close();
            }
            lane.free(frame);
        }
    }
}

impl LaneContext {
    /// Tells the source and the session what is placed.
    fn tell(&self, lane: &LaneState, header: &FrameHeader) -> Result<(), MigrateError> {
        let placed = lane.lock().progress.finished(header);
        let number = lane.number;
        if let Some(sequence) = placed.acknowledge {
            self.control
                .send(&ControlMessage::Placed { lane: number, sequence })
                .map_err(|error| lost("control", "acknowledging pages", &error))?;
        }
        if let Some(sequence) = placed.ended {
            let _ = self.results.send(Input::LaneEnded { lane: number, sequence });
        }
        Ok(())
    }
}

fn fail(context: &LaneContext, error: MigrateError) {
    let _ = context.results.send(match error {
        error @ MigrateError::LinkLost { .. } => Input::LaneLost(error),
        error => Input::Failed(error),
    });
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
