//! The threads that pack pieces of any stream.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{EncodedFrame, StreamEncoder};

use super::in_order::InOrder;
use super::{StreamContext, Tally};
use crate::data::source::chooser::{Chooser, Decision};
use crate::data::source::lane::{FrameSummary, QueuedFrame};
use crate::error::MigrateError;
use crate::link::channel_name;
use crate::machine::source::io::Input;

/// A piece of a stream that is divided into pages and other bytes, and not packed yet.
pub struct DividedPiece {
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

impl DividedPiece {
    /// Packs the piece and passes it on.
    ///
    /// # Errors
    /// The compressor's error.
    pub fn pack(
        mut self,
        encoder: &mut StreamEncoder,
        chooser: &Chooser,
        tally: &Tally,
    ) -> Result<(), MigrateError> {
        let begun = Instant::now();
        let encoded = encoder.encode(&mut self.frame, self.decision.choice.pack);
        let (counts, hash) = encoded.map_err(|error| MigrateError::Compression {
            channel: channel_name(Some(self.lane)),
            source: error.into(),
        })?;
        chooser.encoded(self.decision, counts, begun.elapsed());
        tally.add(hash);
        let summary = FrameSummary::Pages { counts, decision: self.decision };
        self.to.put(self.ticket, QueuedFrame { frame: self.frame, summary });
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
    pieces: Option<Sender<DividedPiece>>,
    threads: Vec<JoinHandle<()>>,
}

impl Packers {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(context: &StreamContext, tally: &Arc<Tally>) -> std::io::Result<Self> {
        // The lanes' queues and windows bound its length.
        let (pieces, pieces_in) = crossbeam_channel::unbounded();
        let mut packers = Self { pieces: Some(pieces), threads: Vec::new() };
        for number in 0..context.workers {
            let (pieces, results) = (pieces_in.clone(), context.results.clone());
            let (chooser, tally) = (Arc::clone(&context.chooser), Arc::clone(tally));
            let mut encoder = StreamEncoder::new(context.compressors.clone());
            let cpu = context.cpu.clone();
            let thread = std::thread::Builder::new().name(format!("pack{number}"));
            packers.threads.push(thread.spawn(move || {
                let _cpu = cpu.count_this_thread();
                let pieces: Receiver<DividedPiece> = pieces;
                for piece in pieces {
                    if let Err(error) = piece.pack(&mut encoder, &chooser, &tally) {
                        let _ = results.send(Input::Failed(error));
                    }
                }
            })?);
        }
        Ok(packers)
    }

    /// A sender for pieces. The threads end once every clone is dropped.
    pub fn pieces(&self) -> Sender<DividedPiece> {
        self.pieces.clone().unwrap_or_else(|| crossbeam_channel::bounded(0).0)
    }
}

impl Drop for Packers {
    fn drop(&mut self) {
        self.pieces = None;
        for thread in self.threads.drain(..) {
            // A panic there was noticed because a frame is missing, and the migration has ended.
            let _ = thread.join();
        }
    }
}
