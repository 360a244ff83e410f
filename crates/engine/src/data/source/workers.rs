//! The source's workers. Each takes the next batch of any lane, reads and encodes it, and puts the
//! frame into the lane's queue.
//!
//! While nothing is compressed, the lanes' senders encode their frames themselves, and only the
//! workers beyond the lane count help.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::Sender;

use super::chooser::Chooser;
use super::lane::plan::RoundOrder;
use super::lane::{Signal, SourceLane};
use super::page_encoder::PageEncoder;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::machine::source::io::Input;

/// The running workers.
pub struct Workers {
    context: Arc<WorkerContext>,
    threads: Vec<JoinHandle<()>>,
}

/// State shared by all workers.
pub struct WorkerContext {
    /// All lanes.
    pub lanes: Vec<Arc<SourceLane>>,
    /// Raised when there may be a batch to encode.
    pub signal: Arc<Signal>,
    /// Decides how pages are encoded.
    pub chooser: Arc<Chooser>,
    /// Queue for failures.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
}

impl Workers {
    /// Starts a worker for each encoder.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(context: WorkerContext, encoders: Vec<PageEncoder>) -> std::io::Result<Self> {
        context.signal.also_wakes(&context.lanes);
        let context = Arc::new(context);
        let mut workers = Self { context, threads: Vec::with_capacity(encoders.len()) };
        for (number, encoder) in encoders.into_iter().enumerate() {
            let context = Arc::clone(&workers.context);
            let thread = std::thread::Builder::new()
                .name(format!("encode{number}"))
                .spawn(move || context.run(number, encoder))?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Gives every lane its share of a round. The lanes must be idle.
    pub fn send_round(&self, order: &RoundOrder) {
        for lane in &self.context.lanes {
            lane.begin_round(order.clone());
        }
        self.context.signal.raise();
    }
}

impl Drop for Workers {
    /// Stops the workers and closes the lanes.
    fn drop(&mut self) {
        self.context.signal.close();
        self.context.lanes.iter().for_each(|lane| lane.close());
        for thread in self.threads.drain(..) {
            // A panic in a worker was noticed because its frame is missing, and the migration has
            // ended.
            let _ = thread.join();
        }
    }
}

impl WorkerContext {
    fn run(&self, number: usize, encoder: PageEncoder) {
        let _cpu = self.cpu.count_this_thread();
        if let Err(error) = self.encode_batches(number, encoder) {
            let _ = self.results.send(Input::Failed(error));
        }
    }

    /// Runs until the end. Each worker begins its search at a different lane.
    fn encode_batches(&self, number: usize, mut encoder: PageEncoder) -> Result<(), MigrateError> {
        let lanes = self.lanes.len();
        let mut first = number;
        while let Some(seen) = self.signal.now() {
            // Frames without compression are made faster by the senders, but workers beyond the
            // lane count still help.
            let rests = number < lanes && !self.chooser.needs_compressors();
            let searched = if rests { 0 } else { lanes };
            let mut found = None;
            for index in first..first + searched {
                let lane = &self.lanes[index % lanes];
                if let Some((batch, buffer)) = lane.next_batch()? {
                    found = Some((lane, batch, buffer));
                    first = index % lanes + 1;
                    break;
                }
            }
            let Some((lane, batch, buffer)) = found else {
                self.signal.wait(seen);
                continue;
            };
            // While any channel is sending, the link is not idle.
            let idle = self.lanes.iter().all(|lane| lane.is_channel_idle());
            let decision = self.chooser.choose(idle, batch.round());
            lane.enqueue(lane.encode(&mut encoder, &batch, buffer, decision)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
