//! The threads that pack pieces of any stream.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{EncodedFrame, StreamEncoder};

use super::in_order::InOrder;
use super::{StreamContext, Tally};
use crate::data::source::chooser::{Chooser, Decision};
use crate::data::source::pool::{Finished, FrameInfo};
use crate::error::MigrateError;
use crate::machine::source::io::Input;

/// A divided piece.
pub struct Work {
    /// Its frame.
    pub frame: EncodedFrame,
    /// Its encoding.
    pub decision: Decision,
    /// Its place in its stream.
    pub ticket: u64,
    /// The stream's lane.
    pub lane: u8,
    /// The queue that it goes to.
    pub to: Arc<InOrder>,
}

impl Work {
    /// Packs the piece and passes it on.
    ///
    /// # Errors
    /// The compressor's error.
    pub fn finish(
        mut self,
        encoder: &mut StreamEncoder,
        chooser: &Chooser,
        tally: &Tally,
    ) -> Result<(), MigrateError> {
        let begun = Instant::now();
        let encoded = encoder.encode(&mut self.frame, self.decision.choice.pack);
        let (counts, hash) = encoded.map_err(|error| MigrateError::Compression {
            channel: format!("lane {}", self.lane),
            source: error.into(),
        })?;
        chooser.encoded(self.decision, counts, begun.elapsed());
        tally.add(hash);
        let what = FrameInfo::Pages(counts, self.decision);
        self.to.put(self.ticket, Finished { frame: self.frame, what });
        Ok(())
    }
}

impl Tally {
    fn add(&self, hash: u64) {
        self.digest.fetch_add(hash, std::sync::atomic::Ordering::Relaxed);
    }
}

/// The packer threads.
pub struct Packers {
    work: Option<Sender<Work>>,
    threads: Vec<JoinHandle<()>>,
}

impl Packers {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(context: &StreamContext, tally: &Arc<Tally>) -> std::io::Result<Self> {
        // The lanes' queues and windows bound its length.
        let (work, work_in) = crossbeam_channel::unbounded();
        let mut packers = Self { work: Some(work), threads: Vec::new() };
        for number in 0..context.workers {
            let (work, results) = (work_in.clone(), context.results.clone());
            let (chooser, tally) = (Arc::clone(&context.chooser), Arc::clone(tally));
            let mut encoder = StreamEncoder::new(context.compressors.clone());
            let cpu = context.cpu.clone();
            let thread = std::thread::Builder::new().name(format!("pack{number}"));
            packers.threads.push(thread.spawn(move || {
                let _cpu = cpu.count_this_thread();
                let work: Receiver<Work> = work;
                for work in work {
                    if let Err(error) = work.finish(&mut encoder, &chooser, &tally) {
                        let _ = results.send(Input::Failed(error));
                    }
                }
            })?);
        }
        Ok(packers)
    }

    /// A sender for work. The threads end once every clone is dropped.
    pub fn work(&self) -> Sender<Work> {
        self.work.clone().unwrap_or_else(|| crossbeam_channel::bounded(0).0)
    }
}

impl Drop for Packers {
    fn drop(&mut self) {
        self.work = None;
        for thread in self.threads.drain(..) {
            // A panic there was noticed because a frame is missing, and the migration has ended.
            let _ = thread.join();
        }
    }
}
