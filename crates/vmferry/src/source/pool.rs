//! The workers of the source: each takes the next batch of any lane, reads it, encodes it, and puts the
//! frame into the lane's queue.
//!
//! Nobody hands work out: a worker asks the lane's plan itself, under a lock that is held for as long as it
//! takes to find 64 page numbers. So there is no thread that a busy compressor could stall.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use vmferry_codec::{EncodedFrame, FrameCounts};

use super::chooser::{Chooser, Decision};
use super::encode::PageEncoder;
use super::io::Input;
use super::outgoing::Outgoing;
use super::plan::{Job, LanePlan, Task};
use super::signal::Signal;
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
    /// The end of a round, with what re-arming took and the dirty log's name.
    EndOfRound(Duration, &'static str),
}

/// What the workers know of a lane.
pub struct PoolLane {
    plan: Mutex<LanePlan>,
    /// Buffers.
    pub window: Arc<Window<EncodedFrame>>,
    /// Finished frames.
    pub outgoing: Outgoing<Finished>,
}

impl PoolLane {
    /// An idle lane.
    pub fn new(
        plan: LanePlan,
        window: Arc<Window<EncodedFrame>>,
        ahead: usize,
        signal: Arc<Signal>,
    ) -> Self {
        Self { plan: Mutex::new(plan), window, outgoing: Outgoing::new(ahead, signal) }
    }

    /// Something to do, a buffer for it, and whether the channel waits for it.
    fn next(&self, chooser: &Chooser) -> Option<Result<(Task, EncodedFrame), MigrateError>> {
        let mut plan = lock(&self.plan);
        if !plan.has_work() || !self.outgoing.has_room(plan.sequence()) {
            return None;
        }
        let frame = self.window.try_acquire(EncodedFrame::new)?;
        let begun = Instant::now();
        let task = plan.next(chooser.frame_pages(), chooser.rearm_pages());
        drop(plan);
        chooser.planned(begun.elapsed());
        match task {
            Ok(Some(task)) => Some(Ok((task, frame))),
            Ok(None) => {
                self.window.give_back(frame);
                None
            }
            Err(error) => Some(Err(error)),
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
            lock(&lane.plan).begin(job.clone());
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
            let found = (first..first + lanes).find_map(|index| {
                let index = index % lanes;
                self.lanes[index].next(&self.chooser).map(|task| (index, task))
            });
            let Some((index, task)) = found else {
                self.signal.wait(seen);
                continue;
            };
            first = index + 1;
            let done = task.and_then(|(task, frame)| self.finish(index, task, frame, &mut encoder));
            if let Err(error) = done {
                let _ = self.results.send(Input::Failed(error));
                return;
            }
        }
    }

    fn finish(
        &self,
        index: usize,
        task: Task,
        mut frame: EncodedFrame,
        encoder: &mut PageEncoder,
    ) -> Result<(), MigrateError> {
        let lane = &self.lanes[index];
        let (sequence, what) = match task {
            Task::Pages(batch) => {
                let decision =
                    self.chooser.choose(lane.outgoing.is_hungry(), batch.as_batch().round);
                let begun = Instant::now();
                let counts = encoder.encode(index as u8, &batch, &mut frame, decision.choice)?;
                self.chooser.encoded(decision, counts, begun.elapsed());
                (batch.sequence, FrameInfo::Pages(counts, decision))
            }
            Task::EndOfRound { round, sequence, rearm, log } => {
                frame.end_of_round(round, sequence);
                (sequence, FrameInfo::EndOfRound(rearm, log))
            }
        };
        lane.outgoing.put(sequence, Finished { frame, what });
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
