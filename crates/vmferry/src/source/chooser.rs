//! How the pages of each frame are encoded: what the user has fixed, or what moves the most pages per
//! second.
//!
//! With `auto` two things can hold a migration up: the link, which carries so many bytes per second, and the
//! processors, which encode so many pages per second. Both are measured all the time: each sender tells
//! what it sent and how long that took, each worker how long a frame took to encode and how long it became.
//! So for every way of encoding there is a prediction of pages per second, the smaller of what the link
//! and what the workers allow, and the largest one wins. Ways that were not tried lately, and could win if
//! they did as well as they may, are tried with a frame now and then. And whenever a channel waits for a
//! frame, the frame goes in whatever way gets it there first.
//!
//! Wall time is measured, not CPU time: what the processors do besides, for the guest or for the other
//! side of a migration on one host, is time that encoding does not get.

mod model;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmferry_codec::{Choice, DeltaUse, FrameCounts, Method};
use vmferry_wire::AlgorithmSet;

use crate::compression::{CompressionConfig, CompressionWay, WhenBusy, worker_threads};
use crate::config::FRAME_PAGES;
use model::{FIXED, Model, RAW, WAYS};

/// Why pages are encoded as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The user has said so.
    Fixed,
    /// It moves the most pages, by what was measured.
    Best,
    /// The channel was waiting, and so it is sooner there.
    Waiting,
    /// To measure this way.
    Trial,
}

/// How a frame is encoded, and why.
#[derive(Clone, Copy, Debug)]
pub struct Decision {
    /// How.
    pub choice: Choice,
    /// Why.
    pub why: Why,
    /// Whether others are to make frames than before: with this decision pages began, or ceased, to go
    /// [without compression](Chooser::is_light), or a trial is due.
    pub turned: bool,
    /// Number of the way, for what is learnt from the frame.
    way: usize,
}

/// Decides, and learns.
#[derive(Debug)]
pub struct Chooser {
    way: CompressionWay,
    when_busy: WhenBusy,
    deltas: bool,
    frame_pages: usize,
    workers: usize,
    /// Workers that compress in the way that the user has fixed.
    compressing: AtomicUsize,
    started: Instant,
    model: Mutex<Model>,
    /// Nanoseconds that planning took, over all workers.
    planning: AtomicU64,
}

/// How much of the guest is protected again at a time: what is sent in about so long.
const REARM: Duration = Duration::from_millis(50);

impl Chooser {
    /// One that has measured nothing. `cap`: in bytes per second.
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

    /// How the next frame is to be encoded. `hungry`: all channels wait for one.
    pub fn choose(&self, hungry: bool, round: u32) -> Decision {
        let now = self.started.elapsed();
        let fixed = |method: Option<Method>, delta: bool| {
            let choice = Choice { pack: method, delta: self.delta(delta, round) };
            let way = if method.is_some() { FIXED } else { RAW };
            Decision { choice, why: Why::Fixed, turned: false, way }
        };
        match self.way {
            CompressionWay::Off => fixed(None, false),
            CompressionWay::Delta => fixed(None, true),
            CompressionWay::Fixed(method) => {
                // One worker is kept free, or the channel would wait as soon as it is through with what is ready.
                let most = self.workers.saturating_sub(1).max(1);
                let busy = hungry || self.compressing.load(Ordering::Relaxed) >= most;
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
                let (way, why) = model.choose(now, hungry);
                let turned = model.is_raw() != was_raw;
                let delta = model.tries_deltas(round);
                let choice = Choice { pack: WAYS[way], delta: self.delta(delta, round) };
                Decision { choice, why, turned, way }
            }
        }
    }

    /// Whether pages go without compression at present. Then each channel's thread makes its frames itself: it
    /// sends them from its own core's cache, and nobody has to be woken.
    pub fn is_light(&self) -> bool {
        match self.way {
            CompressionWay::Off | CompressionWay::Delta => true,
            CompressionWay::Fixed(_) => false,
            CompressionWay::Auto => self.model().is_raw(),
        }
    }

    /// Whether there is something to compress, be it as a trial.
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

    /// How the next frame is to be encoded by a channel's thread, which does not compress.
    pub fn choose_light(&self, round: u32) -> Decision {
        let (mut delta, mut turned) = (self.way == CompressionWay::Delta, false);
        if self.way == CompressionWay::Auto {
            let mut model = self.model();
            model.reconsider();
            turned = !model.is_raw() || model.is_trial_due(self.started.elapsed());
            delta = model.tries_deltas(round);
        }
        let choice = Choice { pack: None, delta: self.delta(delta, round) };
        let why = if self.way == CompressionWay::Auto { Why::Best } else { Why::Fixed };
        Decision { choice, why, turned, way: RAW }
    }

    fn delta(&self, wanted: bool, round: u32) -> DeltaUse {
        // In the first round nothing was sent before.
        if wanted && self.deltas && round > 1 { DeltaUse::Make } else { DeltaUse::Off }
    }

    /// A frame was encoded, reading included, in so much time.
    pub fn encoded(&self, decision: Decision, counts: FrameCounts, took: Duration) {
        if decision.way == FIXED {
            self.compressing.fetch_sub(1, Ordering::Relaxed);
        }
        self.model().encoded(self.started.elapsed(), decision.way, &counts, took);
    }

    /// A lane's channel took a frame, after it had waited for it.
    pub fn sent(&self, lane: u8, bytes: u64, waited: Duration, took: Duration) {
        self.model().sent(usize::from(lane), bytes, waited, took);
    }

    /// A batch was found in so much time.
    pub fn planned(&self, took: Duration) {
        self.planning.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The cap on all lanes together has changed, in bytes per second.
    pub fn set_cap(&self, cap: Option<u64>) {
        self.model().set_cap(cap);
    }

    /// What the destination can decode. Before the first frame.
    pub fn set_algorithms(&self, algorithms: AlgorithmSet) {
        self.model().set_algorithms(algorithms);
    }

    /// Time that planning took, over all workers.
    #[must_use]
    pub fn planning(&self) -> Duration {
        Duration::from_nanos(self.planning.load(Ordering::Relaxed))
    }

    /// Pages of the next frame.
    #[must_use]
    pub fn frame_pages(&self) -> usize {
        match self.way {
            // As they are they gain nothing from company, and neither side gains from larger buffers.
            CompressionWay::Off | CompressionWay::Delta => self.frame_pages,
            _ if self.frame_pages < FRAME_PAGES => self.frame_pages,
            _ => self.model().frame_pages(),
        }
    }

    /// Pages to be protected again at a time.
    #[must_use]
    pub fn rearm_pages(&self) -> u64 {
        (self.model().pages_per_s() * REARM.as_secs_f64()) as u64
    }

    /// What the link is taken to carry, in bytes per second, once it was measured.
    #[must_use]
    pub fn link_bytes_per_s(&self) -> Option<f64> {
        self.model().link_bytes_per_s()
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
