//! Decides how the pages of each frame are encoded: in the way that the user has fixed, or in the
//! way that moves the most pages per second.
//!
//! With `auto` there are two possible bottlenecks: the link, in bytes per second, and the
//! processors, in encoded pages per second. Both are measured continuously. Each sender reports
//! what it sent and how long that took, and each worker reports how long a frame took to encode and
//! the resulting size. The predicted pages per second of each encoding are the smaller of what the
//! link and the workers allow, and the encoding with the highest prediction is used. Encodings that
//! were not tried recently and could be the best are tried with a frame now and then. When a
//! channel is idle, the next frame is encoded in the way that delivers it first.
//!
//! The measure is wall time, not CPU time: time that the processors spend on the guest, or on the
//! other side of a migration on the same host, is not available for encoding.

mod encodings;
mod link;
mod model;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use vmferry_codec::{Choice, DeltaUse, FrameCounts, Method};
use vmferry_wire::AlgorithmSet;

use crate::config::compression::FRAME_PAGES;
use crate::config::compression::{CompressionConfig, CompressionWay, WhenBusy, worker_threads};
use encodings::{ENCODINGS, FIXED, RAW};
use model::Model;

/// The reason for an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The user has fixed it.
    Fixed,
    /// It moves the most pages, by measurement.
    Best,
    /// The channel was idle, and this encoding delivers the frame sooner.
    Waiting,
    /// To measure this encoding.
    Trial,
}

/// The encoding of a frame and the reason for it.
#[derive(Clone, Copy, Debug)]
pub struct Decision {
    /// The encoding.
    pub choice: Choice,
    /// The reason.
    pub why: Why,
    /// Whether different threads must make frames from now on: with this decision pages begin or
    /// cease to be sent [without compression](Chooser::skips_compression), or a trial is due.
    pub turned: bool,
    /// Index of the encoding, for recording the frame's measurements.
    encoding: usize,
}

/// Decides and learns.
#[derive(Debug)]
pub struct Chooser {
    way: CompressionWay,
    when_busy: WhenBusy,
    deltas: bool,
    frame_pages: usize,
    workers: usize,
    /// Workers that are compressing with the method that the user has fixed.
    compressing: AtomicUsize,
    started: Instant,
    model: Mutex<Model>,
    /// Nanoseconds spent on planning, summed over all workers.
    planning: AtomicU64,
}

/// The time span of pages that are write-protected in one batch, at the present rate of sending. A
/// longer span means fewer interruptions of the vCPUs, and more pages that are written again before
/// they are read.
const REARM_SPAN: Duration = Duration::from_millis(50);

impl Chooser {
    /// A chooser without measurements. `cap` is in bytes per second.
    #[must_use]
    pub fn new(config: &CompressionConfig, lanes: u8, cap: Option<u64>) -> Self {
        Self {
            way: config.way,
            when_busy: config.when_busy,
            deltas: config.delta_memory > 0,
            frame_pages: config.frame_pages,
            workers: worker_threads(config.workers),
            compressing: AtomicUsize::new(0),
            started: Instant::now(),
            model: Mutex::new(Model::new(lanes, worker_threads(config.workers), cap)),
            planning: AtomicU64::new(0),
        }
    }

    /// The encoding of the next frame. `idle` means that all channels are idle.
    pub fn choose(&self, idle: bool, round: u32) -> Decision {
        let now = self.started.elapsed();
        let fixed = |method: Option<Method>, delta: bool| {
            let choice = Choice { pack: method, delta: self.delta(delta, round) };
            let encoding = if method.is_some() { FIXED } else { RAW };
            Decision { choice, why: Why::Fixed, turned: false, encoding }
        };
        match self.way {
            CompressionWay::Off => fixed(None, false),
            CompressionWay::Delta => fixed(None, true),
            CompressionWay::Fixed(method) => {
                // One worker is kept free. Otherwise the channel would be idle as soon as it has
                // sent the finished frames.
                let most = self.workers.saturating_sub(1).max(1);
                let busy = idle || self.compressing.load(Ordering::Relaxed) >= most;
                let raw = busy && self.when_busy == WhenBusy::Raw && self.model().raw_is_sooner();
                if raw {
                    Decision { why: Why::Waiting, ..fixed(None, true) }
                } else {
                    self.compressing.fetch_add(1, Ordering::Relaxed);
                    fixed(Some(method), true)
                }
            }
            CompressionWay::Auto => {
                let mut model = self.model();
                let was_raw = model.is_raw();
                let (encoding, why) = model.choose(now, idle);
                let turned = model.is_raw() != was_raw;
                let delta = model.tries_deltas(round);
                let choice = Choice { pack: ENCODINGS[encoding], delta: self.delta(delta, round) };
                Decision { choice, why, turned, encoding }
            }
        }
    }

    /// Whether pages are sent without compression at present. Each channel's thread then makes its
    /// frames itself: it sends them from its own core's cache, and no other thread has to be woken.
    pub fn skips_compression(&self) -> bool {
        match self.way {
            CompressionWay::Off | CompressionWay::Delta => true,
            CompressionWay::Fixed(_) => false,
            CompressionWay::Auto => self.model().is_raw(),
        }
    }

    /// Whether any frame has to be compressed, be it as a trial.
    pub fn needs_compressors(&self) -> bool {
        match self.way {
            CompressionWay::Off | CompressionWay::Delta => false,
            CompressionWay::Fixed(_) => true,
            CompressionWay::Auto => {
                let model = self.model();
                !model.is_raw() || model.is_trial_due(self.started.elapsed())
            }
        }
    }

    /// The encoding of the next frame that a channel's thread makes, which does not compress.
    pub fn choose_uncompressed(&self, round: u32) -> Decision {
        let (mut delta, mut turned) = (self.way == CompressionWay::Delta, false);
        if self.way == CompressionWay::Auto {
            let mut model = self.model();
            model.reconsider();
            turned = !model.is_raw() || model.is_trial_due(self.started.elapsed());
            delta = model.tries_deltas(round);
        }
        let choice = Choice { pack: None, delta: self.delta(delta, round) };
        let why = if self.way == CompressionWay::Auto { Why::Best } else { Why::Fixed };
        Decision { choice, why, turned, encoding: RAW }
    }

    fn delta(&self, wanted: bool, round: u32) -> DeltaUse {
        // In the first round no page was sent before.
        if wanted && self.deltas && round > 1 { DeltaUse::Make } else { DeltaUse::Off }
    }

    /// Records a frame that was encoded in this time, including reading.
    pub fn encoded(&self, decision: Decision, counts: FrameCounts, took: Duration) {
        if decision.encoding == FIXED {
            self.compressing.fetch_sub(1, Ordering::Relaxed);
        }
        self.model().encoded(self.started.elapsed(), decision.encoding, &counts, took);
    }

    /// Records a frame that a lane's channel has accepted, after the channel had waited for the
    /// frame.
    pub fn sent(&self, lane: u8, bytes: u64, waited: Duration, took: Duration) {
        self.model().sent(usize::from(lane), bytes, waited, took);
    }

    /// Records the time for planning a batch.
    pub fn planned(&self, took: Duration) {
        self.planning.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The cap on all lanes together has changed, in bytes per second.
    pub fn set_cap(&self, cap: Option<u64>) {
        self.model().set_cap(cap);
    }

    /// Sets the algorithms that the destination can decode. Called before the first frame.
    pub fn set_algorithms(&self, algorithms: AlgorithmSet) {
        self.model().set_algorithms(algorithms);
    }

    /// The method, if the destination can decode it.
    #[must_use]
    pub fn decodable(&self, method: Method) -> Option<Method> {
        self.model().can_be_decoded(method).then_some(method)
    }

    /// Time spent on planning, summed over all workers.
    #[must_use]
    pub fn planning(&self) -> Duration {
        Duration::from_nanos(self.planning.load(Ordering::Relaxed))
    }

    /// The number of pages in the next frame.
    #[must_use]
    pub fn frame_pages(&self) -> usize {
        match self.way {
            // Uncompressed pages gain nothing from larger frames, and neither side gains from
            // larger buffers.
            CompressionWay::Off | CompressionWay::Delta => self.frame_pages,
            _ if self.frame_pages < FRAME_PAGES => self.frame_pages,
            _ => self.model().frame_pages(),
        }
    }

    /// The number of pages to write-protect in one batch.
    #[must_use]
    pub fn rearm_pages(&self) -> u64 {
        (self.model().pages_per_s() * REARM_SPAN.as_secs_f64()) as u64
    }

    /// The estimated rate of the link in bytes per second, once it was measured.
    #[must_use]
    pub fn link_bytes_per_s(&self) -> Option<f64> {
        self.model().link_bytes_per_s()
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock()
    }
}
