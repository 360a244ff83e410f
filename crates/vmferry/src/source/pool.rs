//! The workers of the source: each takes the next batch of any lane, reads it, encodes it, and puts the
//! frame into the lane's queue. The frames of a round are finished in any order; its end comes last.
//!
//! Nobody hands work out: a worker asks the lane's plan itself, under a lock that is held for as long as it
//! takes to find 64 page numbers. So there is no thread that a busy compressor could stall.
//!
//! While nothing is compressed, the lanes' senders [make their frames themselves](Maker), and of the workers only
//! those help that are more than there are lanes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use vmferry_codec::{EncodedFrame, FrameCounts, Method};

use super::chooser::{Chooser, Decision};
use super::encode::PageEncoder;
use super::io::Input;
use super::outgoing::{Next, Outgoing};
use super::plan::{Job, LanePlan, PageBatch, Task};
use super::signal::{Signal, Wake};
use super::window::Window;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;

/// A frame on its way to the channel.
pub struct Finished {
    /// The frame.
    pub frame: EncodedFrame,
    /// What it is.
    pub what: FrameInfo,
}

/// What a frame is.
#[derive(Clone, Copy)]
pub enum FrameInfo {
    /// Pages, and how it was decided that they are encoded.
    Pages(FrameCounts, Decision),
    /// The end of a round.
    EndOfRound {
        /// What re-arming took.
        rearm: Duration,
        /// The dirty log's name.
        log: &'static str,
        /// Pages that were left out because the guest had hinted that they are free.
        free: u64,
    },
}

/// What the workers know of a lane.
pub struct PoolLane {
    work: Mutex<LaneWork>,
    /// Buffers.
    pub window: Arc<Window<EncodedFrame>>,
    /// Finished frames.
    pub outgoing: Arc<Outgoing<Finished>>,
}

/// What is to be done, and what is being done.
struct LaneWork {
    plan: LanePlan,
    /// Frames of pages that workers are making.
    making: usize,
    /// The end of the round, which follows on the last of them.
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

    /// Pages to be made a frame of, and a buffer for it.
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

    /// A frame is finished.
    fn finished(&self, frame: Finished) {
        self.outgoing.put(frame);
        self.made();
    }

    /// A frame is finished and on its way.
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

/// The workers, and what they share with the lanes' senders.
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
    /// If the system has no thread left.
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

    /// Ends the workers and the senders' waits.
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
            // A panic in a worker was reported by the frame that never came: the migration has ended.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Works until the end. Each worker begins its search at another lane.
    fn work(&self, number: usize, mut encoder: PageEncoder) {
        let _cpu = self.cpu.count_this_thread();
        let mut first = number;
        while let Some(seen) = self.signal.now() {
            let lanes = self.lanes.len();
            // A sender is quicker with what needs no compression, but more threads than there are senders help.
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
        // While any channel sends, the link is not idle.
        let hungry = self.lanes.iter().all(|lane| lane.outgoing.is_hungry());
        let decision = self.chooser.choose(hungry, batch.as_batch().round);
        let (chooser, signal) = (&self.chooser, &self.signal);
        lane.finished(encode(index as u8, batch, frame, encoder, decision, chooser, signal)?);
        Ok(())
    }
}

/// Makes a frame of a batch.
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
        // Pages that are one word again and again: nothing is quicker with them, and nothing is left of them.
        decision.choice.pack = Some(Method::lz4());
    }
    let begun = Instant::now();
    let counts = encoder.encode(lane, batch, &mut frame, decision.choice)?;
    chooser.encoded(decision, counts, begun.elapsed());
    Ok(Finished { frame, what: FrameInfo::Pages(counts, decision) })
}

/// What a lane's sender makes frames with.
pub struct Maker {
    number: u8,
    lane: Arc<PoolLane>,
    chooser: Arc<Chooser>,
    encoder: PageEncoder,
    /// Wakes the workers.
    signal: Arc<Signal>,
}

impl Maker {
    /// That of lane `number`.
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

    /// The lane's next frame: a finished one, or one that is made now, or one that is waited for.
    ///
    /// # Errors
    /// What the memory, the dirty log or the compressor says.
    pub fn next(&mut self) -> Result<Next<Finished>, MigrateError> {
        let lane = Arc::clone(&self.lane);
        lane.outgoing.take_or_make(|| self.make())
    }

    /// A frame, if the lane has pages to send, a buffer is free, and nothing is compressed.
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
