//! The threads that compress pieces of all streams.
//!
//! A stream's reader divides its pieces in order. Pieces that are to be compressed are encoded
//! here, several at a time, and leave in order, because each has its number in the stream already.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use vmferry_codec::{Compressors, StreamEncoder};

use crate::packing::DividedPiece;
use crate::stream::{Stream, StreamFailure};

/// Hands pieces to the threads, which end once every clone is dropped.
#[derive(Clone)]
pub struct Packers {
    pieces: Sender<Job>,
}

/// A piece, its number in the stream, and the stream.
struct Job {
    piece: DividedPiece,
    number: u64,
    stream: Arc<Stream>,
}

impl Packers {
    /// Starts this number of threads.
    ///
    /// # Errors
    /// The system can't create a thread.
    pub fn start(threads: usize, compressors: &Compressors) -> std::io::Result<Self> {
        // The streams' windows bound its length.
        let (pieces, taken) = crossbeam_channel::unbounded();
        for number in 0..threads {
            let (taken, compressors) = (taken.clone(), compressors.clone());
            let thread = std::thread::Builder::new().name(format!("pack{number}"));
            thread.spawn(move || pack(&taken, compressors))?;
        }
        Ok(Self { pieces })
    }

    /// Encodes the piece, and sends it when its turn in the stream comes.
    pub fn encode(&self, piece: DividedPiece, number: u64, stream: &Arc<Stream>) {
        let job = Job { piece, number, stream: Arc::clone(stream) };
        if self.pieces.send(job).is_err() {
            stream.fail(StreamFailure::Local { problem: "no thread compresses".into() });
        }
    }
}

fn pack(jobs: &Receiver<Job>, compressors: Compressors) {
    let mut encoder = StreamEncoder::new(compressors);
    for Job { piece, number, stream } in jobs {
        if !stream.is_over() {
            encode(piece, &mut encoder, number, &stream);
        }
    }
}

/// Encodes the piece, and sends it when its turn in the stream comes.
pub fn encode(piece: DividedPiece, encoder: &mut StreamEncoder, number: u64, stream: &Stream) {
    match piece.encode(encoder) {
        Ok(frame) => stream.put(number, frame),
        Err(error) => {
            let problem = format!("compressing: {}", vmferry::chain(&error));
            stream.fail(StreamFailure::Local { problem });
        }
    }
}
