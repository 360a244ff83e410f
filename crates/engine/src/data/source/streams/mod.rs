//! The streams of a carried guest, from the VMM's sockets to the lanes.
//!
//! ```text
//!  socket -> reader (one for each stream): recognize, divide
//!    -> packers (any order) -> in order -> queue of the lane
//! ```
//! An uncompressed piece never leaves its reader's thread. A reader reads from a socket only when
//! the lane's window has a free buffer and the lane's queue has room, so a slow link slows the VMM
//! down.

mod in_order;
mod packers;
mod reader;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use vmferry_codec::{Compressors, HotPages, StreamEncoder};
use vmferry_memory::GuestBytes;
use vmferry_wire::MAX_KEPT_PAGES;

use super::chooser::Chooser;
use super::lane::{Signal, SourceLane};
use crate::cpu::CpuMeter;
use crate::machine::source::io::Input;
use crate::vmm::streamed::OutgoingStream;
use in_order::InOrder;
use packers::Packers;
use reader::StreamReader;

/// State shared by all streams.
pub struct StreamContext {
    /// Decides how pieces are encoded.
    pub chooser: Arc<Chooser>,
    /// Raised when there may be a free buffer or room in a queue.
    pub signal: Arc<Signal>,
    /// The lanes, one for each stream.
    pub lanes: Vec<Arc<SourceLane>>,
    /// Queue for failures.
    pub results: Sender<Input>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// Constructs the packers' compressors.
    pub compressors: Compressors,
    /// Number of packer threads.
    pub workers: usize,
    /// Upper limit of the memory for pages that both sides keep, in bytes.
    pub kept_bytes: u64,
}

/// State shared by readers and packers.
#[derive(Debug)]
pub struct Tally {
    /// The VMM's present pass, from 1.
    pub pass: AtomicU32,
    /// Wrapping sum of the hashes of all pieces.
    pub digest: AtomicU64,
    /// The guest stays here, so streams must neither continue nor be ended.
    pub given_up: AtomicBool,
    /// The guest was stopped with post-copy: the streams end here, and go on another way.
    pub cut: Cut,
}

/// Ends the streams in the middle.
#[derive(Debug)]
pub struct Cut {
    is_made: AtomicBool,
    /// Readable once it is made, for readers that wait for the VMM: the guest is paused.
    made: OwnedFd,
    /// What is left of each stream, by lane.
    left: Mutex<BTreeMap<u8, Cutting>>,
}

/// What is left of a stream.
#[derive(Debug)]
pub struct Cutting {
    /// The socket to read on from.
    pub socket: UnixStream,
    /// Bytes that were read from it already.
    pub first: GuestBytes,
}

impl Cut {
    fn new() -> std::io::Result<Self> {
        let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { is_made: AtomicBool::new(false), made, left: Mutex::default() })
    }

    fn make(&self) {
        self.is_made.store(true, Ordering::Release);
        // It fails only after 2^64 cuts.
        let _ = rustix::io::write(&self.made, &1_u64.to_ne_bytes());
    }

    /// Readable once streams end here.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.made.as_fd()
    }

    /// Whether streams end here.
    pub fn is_made(&self) -> bool {
        self.is_made.load(Ordering::Acquire)
    }

    /// Keeps what is left of a lane's stream.
    pub fn keep(&self, lane: u8, left: Cutting) {
        self.left.lock().insert(lane, left);
    }
}

/// All running streams of a guest. After a drop, no thread is left.
pub struct Streams {
    readers: Vec<JoinHandle<()>>,
    packers: Option<Packers>,
    tally: Arc<Tally>,
}

impl Streams {
    /// Starts reading. There must be a lane for each stream.
    ///
    /// # Errors
    /// The system can't create a thread. The signal may be closed then.
    pub fn start(streams: Vec<OutgoingStream>, context: &StreamContext) -> std::io::Result<Self> {
        let (digest, given_up) = (AtomicU64::default(), AtomicBool::default());
        let pass = AtomicU32::new(1);
        let tally = Arc::new(Tally { pass, digest, given_up, cut: Cut::new()? });
        let share = u64::from(MAX_KEPT_PAGES) * vmferry_memory::PAGE_SIZE as u64;
        let kept_bytes = context.kept_bytes.min(share) / streams.len().max(1) as u64;
        let packers = Packers::start(context, &tally)?;
        let mut all = Self { readers: Vec::new(), packers: None, tally: Arc::clone(&tally) };
        for (stream, lane) in streams.into_iter().zip(&context.lanes) {
            let reader = StreamReader {
                lane: Arc::clone(lane),
                socket: stream.socket,
                recogniser: stream.recogniser,
                in_order: Arc::new(InOrder::new(Arc::clone(lane))),
                signal: Arc::clone(&context.signal),
                chooser: Arc::clone(&context.chooser),
                kept: HotPages::new(kept_bytes),
                encoder: StreamEncoder::new(context.compressors.clone()),
                pieces: packers.pieces(),
                tally: Arc::clone(&tally),
                results: context.results.clone(),
            };
            let cpu = context.cpu.clone();
            let thread = std::thread::Builder::new().name(format!("stream{}-read", lane.number()));
            let spawned = thread.spawn(move || {
                let _cpu = cpu.count_this_thread();
                reader.run();
            });
            // Dropping waits for the readers that already run. They would wait for their lanes
            // forever.
            all.readers.push(spawned.inspect_err(|_| context.signal.close())?);
        }
        all.packers = Some(packers);
        Ok(all)
    }

    /// Sets the VMM's present pass.
    pub fn set_pass(&self, pass: u32) {
        self.tally.pass.store(pass, Ordering::Relaxed);
    }

    /// The VMM begins its next pass.
    pub fn next_pass(&self) {
        self.tally.pass.fetch_add(1, Ordering::Relaxed);
    }

    /// Stops the streams without ending them. If the destination's VMM saw the end of a stream, or
    /// a stream of which the VMM here has discarded a part, it would report a failed load before
    /// the real reason arrives.
    pub fn give_up(&self) {
        self.tally.given_up.store(true, Ordering::Release);
    }

    /// Ends the streams here. The VMM waits, so nothing comes at the moment.
    pub fn cut(&self) {
        self.tally.cut.make();
    }

    /// What is left of a lane's stream, which was cut and has ended.
    #[must_use]
    pub fn left(&self, lane: u8) -> Option<Cutting> {
        self.tally.cut.left.lock().remove(&lane)
    }

    /// The digest of everything read so far, which is complete once the lanes have sent everything.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.tally.digest.load(Ordering::Relaxed)
    }
}

impl Drop for Streams {
    /// Waits for the threads. The signal must be closed. Sockets are closed but not shut down: the
    /// VMM may have duplicates of them.
    fn drop(&mut self) {
        for reader in self.readers.drain(..) {
            // A panic there was noticed because frames are missing, and the migration has ended.
            let _ = reader.join();
        }
        self.packers = None;
    }
}
