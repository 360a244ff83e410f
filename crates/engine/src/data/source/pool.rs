//! The source's workers. Each takes the next batch of any lane, reads and encodes it, and puts the
//! frame into the lane's queue. The frames of a round are finished in any order; the end of the
//! round comes last.
//!
//! There is no thread that distributes work. A worker asks the lane's plan itself, under a lock
//! that is held only while 64 page numbers are found. So a busy compressor can't stall a
//! distributor.
//!
//! While nothing is compressed, the lanes' senders [make their frames themselves](Maker), and only
//! the workers beyond the lane count help.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use vmferry_codec::{EncodedFrame, FrameCounts, Method};

use super::chooser::{Chooser, Decision};
use super::encode::PageEncoder;
use super::outgoing::{Next, Outgoing};
use super::plan::{Job, LanePlan, PageBatch, Task};
use super::signal::{Signal, Wake};
use super::window::Window;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::machine::source::io::Input;

/// A frame ready to be sent.
pub struct Finished {
    /// The frame.
    pub frame: EncodedFrame,
    /// Its kind.
    pub what: FrameInfo,
}

/// The kind of a frame.
#[derive(Clone, Copy)]
pub enum FrameInfo {
    /// Pages, and the decision about their encoding.
    Pages(FrameCounts, Decision),
    /// The end of a round.
    EndOfRound {
        /// Time for re-arming.
        rearm: Duration,
        /// The dirty log's name.
        log: &'static str,
        /// Pages that were not sent because the guest had hinted that they are free.
        free: u64,
    },
}

/// A lane as the workers use it.
pub struct PoolLane {
    work: Mutex<LaneWork>,
    /// The frame buffers.
    pub window: Arc<Window<EncodedFrame>>,
    /// Finished frames.
    pub outgoing: Arc<Outgoing<Finished>>,
}

/// Pending work and work in progress.
struct LaneWork {
    plan: LanePlan,
    /// Frames of pages that are being made.
    making: usize,
    /// The end of the round, which follows the last of these frames.
    end: Option<Finished>,
}

impl PoolLane {
    /// An idle lane.
    pub fn new(
        plan: LanePlan,
        window: Arc<Window<EncodedFrame>>,
        ahead: usize,
        signal: Arc<Signal>,
    ) -> Self {
        let work = Mutex::new(LaneWork { plan, making: 0, end: None });
        Self { work, window, outgoing: Arc::new(Outgoing::new(ahead, signal)) }
    }

    /// A batch of pages and a buffer for its frame.
    fn next(&self, chooser: &Chooser) -> Option<Result<(PageBatch, EncodedFrame), MigrateError>> {
        let mut work = lock(&self.work);
        if !work.plan.has_work() || !self.outgoing.try_begin() {
            return None;
        }
        let Some(mut frame) = self.window.try_acquire(EncodedFrame::new) else {
            self.outgoing.give_up();
            return None;
        };
        let begun = Instant::now();
        let task = work.plan.next(chooser.frame_pages(), chooser.rearm_pages());
        chooser.planned(begun.elapsed());
        match task {
            Ok(Some(Task::Pages(batch))) => {
                work.making += 1;
                return Some(Ok((batch, frame)));
            }
            Ok(Some(Task::EndOfRound { round, rearm, log, free })) => {
                frame.end_of_round(round);
                let what = FrameInfo::EndOfRound { rearm, log, free };
                work.end = Some(Finished { frame, what });
                self.end_if_all_is_made(&mut work);
            }
            Ok(None | Some(Task::Wait)) => {
                self.outgoing.give_up();
                self.window.give_back(frame);
            }
            Err(error) => return Some(Err(error)),
        }
        None
    }

    /// Enqueues a finished frame.
    fn finished(&self, frame: Finished) {
        self.outgoing.put(frame);
        self.made();
    }

    /// A frame was finished and passed on.
    fn made(&self) {
        let mut work = lock(&self.work);
        work.making -= 1;
        self.end_if_all_is_made(&mut work);
    }

    fn end_if_all_is_made(&self, work: &mut LaneWork) {
        if work.making == 0
            && let Some(end) = work.end.take()
        {
            self.outgoing.put(end);
        }
    }
}

/// The workers, and the state that they share with the lanes' senders.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    lanes: Vec<Arc<PoolLane>>,
    signal: Arc<Signal>,
    chooser: Arc<Chooser>,
    results: Sender<Input>,
    cpu: CpuMeter,
}

impl Pool {
    /// Starts a worker for each encoder.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(
        lanes: Vec<Arc<PoolLane>>,
        signal: Arc<Signal>,
        chooser: Arc<Chooser>,
        encoders: Vec<PageEncoder>,
        results: Sender<Input>,
        cpu: CpuMeter,
    ) -> std::io::Result<Self> {
        let wake = |lane: &Arc<PoolLane>| {
            let outgoing: Weak<Outgoing<Finished>> = Arc::downgrade(&lane.outgoing);
            outgoing as Weak<dyn Wake>
        };
        signal.also_wakes(lanes.iter().map(wake).collect());
        let shared = Arc::new(Shared { lanes, signal, chooser, results, cpu });
        let mut pool = Self { shared, threads: Vec::with_capacity(encoders.len()) };
        for (number, encoder) in encoders.into_iter().enumerate() {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("encode{number}"))
                .spawn(move || shared.work(number, encoder))?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Gives every lane its share of a round. The lanes must be idle.
    pub fn send_round(&self, job: &Job) {
        for lane in &self.shared.lanes {
            lock(&lane.work).plan.begin(job.clone());
        }
        self.shared.signal.raise();
    }

    /// Stops the workers and ends the waits of the senders.
    pub fn close(&self) {
        self.shared.signal.close();
        for lane in &self.shared.lanes {
            lane.outgoing.close();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
        for thread in self.threads.drain(..) {
            // A panic in a worker was noticed because its frame is missing, and the migration has
            // ended.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Runs until the end. Each worker begins its search at a different lane.
    fn work(&self, number: usize, mut encoder: PageEncoder) {
        let _cpu = self.cpu.count_this_thread();
        let mut first = number;
        while let Some(seen) = self.signal.now() {
            let lanes = self.lanes.len();
            // Frames without compression are made faster by the senders, but workers beyond the
            // lane count still help.
            let idle = number < lanes && !self.chooser.needs_compressors();
            let searched = if idle { 0 } else { lanes };
            let found = (first..first + searched).find_map(|index| {
                let index = index % lanes;
                self.lanes[index].next(&self.chooser).map(|task| (index, task))
            });
            let Some((index, task)) = found else {
                self.signal.wait(seen);
                continue;
            };
            first = index + 1;
            let done =
                task.and_then(|(batch, frame)| self.make(index, &batch, frame, &mut encoder));
            if let Err(error) = done {
                let _ = self.results.send(Input::Failed(error));
                return;
            }
        }
    }

    fn make(
        &self,
        index: usize,
        batch: &PageBatch,
        frame: EncodedFrame,
        encoder: &mut PageEncoder,
    ) -> Result<(), MigrateError> {
        let lane = &self.lanes[index];
        // While any channel is sending, the link is not idle.
        let hungry = self.lanes.iter().all(|lane| lane.outgoing.is_hungry());
        let decision = self.chooser.choose(hungry, batch.as_batch().round);
        let (chooser, signal) = (&self.chooser, &self.signal);
        lane.finished(encode(index as u8, batch, frame, encoder, decision, chooser, signal)?);
        Ok(())
    }
}

/// Makes the frame of a batch.
fn encode(
    lane: u8,
    batch: &PageBatch,
    mut frame: EncodedFrame,
    encoder: &mut PageEncoder,
    mut decision: Decision,
    chooser: &Chooser,
    signal: &Signal,
) -> Result<Finished, MigrateError> {
    if decision.turned {
        signal.raise();
    }
    if batch.poisoned.as_ref().is_some_and(|hinted| hinted.poison() != Some(0)) {
        // Such pages repeat a single word. LZ4 is the fastest method for them, and they shrink to
        // almost nothing.
        decision.choice.pack = Some(Method::lz4());
    }
    let begun = Instant::now();
    let counts = encoder.encode(lane, batch, &mut frame, decision.choice)?;
    chooser.encoded(decision, counts, begun.elapsed());
    Ok(Finished { frame, what: FrameInfo::Pages(counts, decision) })
}

/// Makes frames in a lane's sender.
pub struct Maker {
    number: u8,
    lane: Arc<PoolLane>,
    chooser: Arc<Chooser>,
    encoder: PageEncoder,
    /// Wakes the workers.
    signal: Arc<Signal>,
}

impl Maker {
    /// A maker for lane `number`.
    #[must_use]
    pub fn new(
        number: u8,
        lane: Arc<PoolLane>,
        chooser: Arc<Chooser>,
        encoder: PageEncoder,
        signal: Arc<Signal>,
    ) -> Self {
        Self { number, lane, chooser, encoder, signal }
    }

    /// The lane's queue.
    #[must_use]
    pub fn outgoing(&self) -> Arc<Outgoing<Finished>> {
        Arc::clone(&self.lane.outgoing)
    }

    /// The lane's next frame: a finished one, else one made now, else one that is waited for.
    ///
    /// # Errors
    /// Errors of the memory, the dirty log or the compressor.
    pub fn next(&mut self) -> Result<Next<Finished>, MigrateError> {
        let lane = Arc::clone(&self.lane);
        lane.outgoing.take_or_make(|| self.make())
    }

    /// Makes a frame if the lane has pages to send, a buffer is free, and nothing is compressed.
    fn make(&mut self) -> Result<Option<Finished>, MigrateError> {
        let Self { number, lane, chooser, encoder, signal } = self;
        if !chooser.is_light() {
            return Ok(None);
        }
        let Some(next) = lane.next(chooser) else { return Ok(None) };
        let (batch, frame) = next?;
        let decision = chooser.choose_light(batch.as_batch().round);
        let finished = encode(*number, &batch, frame, encoder, decision, chooser, signal)?;
        lane.outgoing.pass();
        lane.made();
        Ok(Some(finished))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
