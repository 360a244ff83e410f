//! A VMM's own streams on their way to the lanes.
//!
//! ```text
//!  socket -> reader (one for each stream): recognise, divide -> packers (any order) -> in order -> queue of the lane
//! ```
//! A piece that goes as it is never leaves its reader's thread. Nothing is read from a socket unless there is a buffer of
//! the lane's window for it and room in the lane's queue: so a slow link slows the VMM.

mod in_order;
mod packers;
mod reader;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::Sender;
use vmferry_codec::{Compressors, EncodedFrame, HotPages, StreamEncoder};
use vmferry_wire::MAX_KEPT_PAGES;

use super::chooser::Chooser;
use super::io::Input;
use super::outgoing::Outgoing;
use super::pool::Finished;
use super::signal::Signal;
use super::window::Window;
use crate::cpu::CpuMeter;
use crate::streamed::OutgoingStream;
use in_order::InOrder;
use packers::Packers;
use reader::StreamReader;

/// What all streams share.
pub struct StreamContext {
    /// Decides how pieces travel.
    pub chooser: Arc<Chooser>,
    /// Raised when there may be a buffer or room in a queue.
    pub signal: Arc<Signal>,
    /// The lanes' windows.
    pub windows: Vec<Arc<Window<EncodedFrame>>>,
    /// The lanes' queues.
    pub queues: Vec<Arc<Outgoing<Finished>>>,
    /// Where failures go.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// What makes the packers' compressors.
    pub compressors: Compressors,
    /// Threads that pack.
    pub workers: usize,
    /// Most memory for pages that both sides keep, in bytes.
    pub kept_bytes: u64,
}

/// What readers and packers tell of the whole.
#[derive(Debug, Default)]
pub struct Tally {
    /// The pass that the VMM is in, from 1.
    pub pass: AtomicU32,
    /// Wrapping sum of the hashes of all pieces.
    pub digest: AtomicU64,
    /// The guest stays, and no stream is to go on or to come to its end.
    pub given_up: AtomicBool,
}

/// All streams of a guest at work. Dropped, no thread is left.
pub struct Streams {
    readers: Vec<JoinHandle<()>>,
    packers: Option<Packers>,
    tally: Arc<Tally>,
}

impl Streams {
    /// Starts to read. There must be a lane for each stream.
    ///
    /// # Errors
    /// If the system has no thread left. The signal may be closed then.
    pub fn start(streams: Vec<OutgoingStream>, context: &StreamContext) -> std::io::Result<Self> {
        let tally = Arc::new(Tally { pass: AtomicU32::new(1), ..Tally::default() });
        let share = u64::from(MAX_KEPT_PAGES) * vmferry_memory::PAGE_SIZE as u64;
        let kept_bytes = context.kept_bytes.min(share) / streams.len().max(1) as u64;
        let packers = Packers::start(context, &tally)?;
        let mut all = Self { readers: Vec::new(), packers: None, tally: Arc::clone(&tally) };
        for (lane, (stream, outgoing)) in (0..).zip(streams.into_iter().zip(&context.queues)) {
            let reader = StreamReader {
                lane,
                socket: stream.socket,
                recogniser: stream.recogniser,
                window: Arc::clone(&context.windows[usize::from(lane)]),
                outgoing: Arc::clone(outgoing),
                in_order: Arc::new(InOrder::new(Arc::clone(outgoing))),
                signal: Arc::clone(&context.signal),
                chooser: Arc::clone(&context.chooser),
                kept: HotPages::new(kept_bytes),
                encoder: StreamEncoder::new(context.compressors.clone()),
                work: packers.work(),
                tally: Arc::clone(&tally),
                results: context.results.clone(),
            };
            let cpu = context.cpu.clone();
            let thread = std::thread::Builder::new().name(format!("stream{lane}-read"));
            let spawned = thread.spawn(move || {
                let _cpu = cpu.count_this_thread();
                reader.run();
            });
            // Those that read already are waited for, and would wait for their lanes.
            all.readers.push(spawned.inspect_err(|_| context.signal.close())?);
        }
        all.packers = Some(packers);
        Ok(all)
    }

    /// The VMM is in this pass from now on.
    pub fn set_pass(&self, pass: u32) {
        self.tally.pass.store(pass, Ordering::Relaxed);
    }

    /// The VMM is in the next pass from now on.
    pub fn next_pass(&self) {
        self.tally.pass.fetch_add(1, Ordering::Relaxed);
    }

    /// No stream goes on from now on, and none comes to its end: a destination whose VMM was told that there is no more, or
    /// got a stream of which the VMM here has thrown a part away, would say that its load has failed, before it hears why.
    pub fn give_up(&self) {
        self.tally.given_up.store(true, Ordering::Release);
    }

    /// The digest of everything that was read; of all of it once the lanes have sent all.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.tally.digest.load(Ordering::Relaxed)
    }
}

impl Drop for Streams {
    /// Waits for the threads. The signal must be closed. Sockets are let go of and not shut: the VMM may hold others of
    /// the same streams.
    fn drop(&mut self) {
        for reader in self.readers.drain(..) {
            // A panic there was noticed by the frames that never came: the migration has ended.
            let _ = reader.join();
        }
        self.packers = None;
    }
}
