//! The progress of a fetch, for threads of the VMM while the guest runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use serde::Serialize;
use vmferry_memory::{GuestMemory, PAGE_SIZE, PageRun};

use super::FetchContext;
use super::lanes::Lanes;
use crate::data::destination::missing::MissingPages;
use crate::machine::destination::io::Input;
use crate::stats::FetchStats;

/// How often the rate is measured.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// A handle to the pages that a guest lacks while it runs here.
#[derive(Clone)]
pub struct FetchHandle(Arc<Shared>);

struct Shared {
    /// The source, for people.
    source: String,
    started: Instant,
    /// `None` once the session has ended.
    fetch: Mutex<Option<Fetch>>,
}

struct Fetch {
    missing: Arc<MissingPages>,
    lanes: Arc<Mutex<Lanes>>,
    results: Sender<Input>,
    /// Pages that were missing when the guest started.
    missing_pages: u64,
    sampled: Sample,
    pages_per_s: f64,
}

/// The pages that were missing at some time.
#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    remaining_pages: u64,
}

/// The progress of a guest's fetch at the destination.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FetchProgress {
    /// The source: its address, and its name if that is known.
    pub source: String,
    /// Pages that are still missing.
    pub remaining_pages: u64,
    /// The same in bytes.
    pub remaining_bytes: u64,
    /// Missing pages that threads of the guest wait for now.
    pub awaited_pages: u64,
    /// For how long the first of these threads has been waiting, in milliseconds.
    pub awaited_ms: f64,
    /// The rate at which pages arrived during the last seconds, in bytes per second.
    pub bytes_per_s: f64,
    /// The time until the last page arrives at this rate, in milliseconds; absent while none does.
    pub eta_ms: Option<f64>,
    /// Channels over which pages are fetched.
    pub channels: u32,
    /// Those of them that are lost now.
    pub lost_channels: u32,
    /// For how long at least one channel has been lost, in milliseconds; absent if none is.
    pub link_lost_ms: Option<f64>,
    /// The statistics so far.
    #[serde(flatten)]
    pub stats: FetchStats,
}

impl FetchProgress {
    /// How long the rest takes at the present rate, for people.
    #[must_use]
    pub fn time_left(&self) -> String {
        match self.eta_ms {
            None => "no page arrives now".into(),
            Some(ms) if ms < 120e3 => format!("about {:.0} s are left", (ms / 1e3).max(1.0)),
            Some(ms) => format!("about {:.0} min are left", ms / 60e3),
        }
    }
}

impl std::fmt::Debug for FetchHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FetchHandle").field(&self.progress()).finish()
    }
}

impl FetchHandle {
    /// A handle for a guest that has just been started.
    pub(super) fn new(source: String, context: FetchContext, lanes: Arc<Mutex<Lanes>>) -> Self {
        let FetchContext { missing, results, .. } = context;
        let started = Instant::now();
        let remaining_pages = missing.left();
        let sampled = Sample { at: started, remaining_pages };
        let missing_pages = missing.counts().0.placed_pages() + remaining_pages;
        let fetch = Fetch { missing, lanes, results, missing_pages, sampled, pages_per_s: 0.0 };
        Self(Arc::new(Shared { source, started, fetch: Mutex::new(Some(fetch)) }))
    }

    /// The progress, or `None` if the destination needs nothing of the source any more.
    #[must_use]
    pub fn progress(&self) -> Option<FetchProgress> {
        self.0.fetch.lock().as_ref().map(|fetch| fetch.progress(&self.0.source, self.0.started))
    }

    /// Whether all guest memory at these guest-physical addresses is here. Any thread that reads a
    /// missing page waits for it, which may take as long as the link is down.
    #[must_use]
    pub fn has(&self, memory: &GuestMemory, addresses: std::ops::Range<u64>) -> bool {
        let fetch = self.0.fetch.lock();
        let Some(fetch) = fetch.as_ref() else { return true };
        let page = PAGE_SIZE as u64;
        let touched = memory.slots().iter().filter_map(|slot| {
            let start = slot.gpa().0;
            let first = addresses.start.max(start).saturating_sub(start) / page;
            let end = addresses.end.saturating_sub(start).div_ceil(page).min(slot.pages());
            (first < end).then(|| PageRun { slot: slot.id(), first, pages: end - first })
        });
        !touched.into_iter().any(|run| fetch.missing.has_any(run))
    }

    /// The guest's VMM is a process of its own, and has ended. Without this the destination notices
    /// it only when the next page arrives. Means nothing once no page is missing.
    pub fn guest_has_ended(&self) {
        if let Some(fetch) = self.0.fetch.lock().as_ref() {
            // Fails only if the session has ended.
            let _ = fetch.results.send(Input::VmmGone);
        }
    }

    /// Measures the rate, and returns the progress once in each interval.
    pub(crate) fn sample(&self) -> Option<FetchProgress> {
        let mut fetch = self.0.fetch.lock();
        let fetch = fetch.as_mut()?;
        let passed = fetch.sampled.at.elapsed();
        if passed < SAMPLE_INTERVAL {
            return None;
        }
        fetch.measure(passed);
        Some(fetch.progress(&self.0.source, self.0.started))
    }

    /// The statistics so far.
    pub(crate) fn stats(&self) -> Option<FetchStats> {
        self.0.fetch.lock().as_ref().map(|fetch| fetch.stats(self.0.started))
    }

    /// The session has ended.
    pub(crate) fn end(&self) {
        *self.0.fetch.lock() = None;
    }
}

impl Fetch {
    fn measure(&mut self, passed: Duration) {
        let remaining_pages = self.missing.left();
        let arrived = self.sampled.remaining_pages - remaining_pages;
        let rate = arrived as f64 / passed.as_secs_f64();
        // The mean of the last seconds, of which the latest counts most.
        let is_first = self.sampled.remaining_pages == self.missing_pages;
        self.pages_per_s = if is_first { rate } else { f64::midpoint(self.pages_per_s, rate) };
        self.sampled = Sample { at: self.sampled.at + passed, remaining_pages };
    }

    fn progress(&self, source: &str, started: Instant) -> FetchProgress {
        let remaining_pages = self.missing.left();
        let (awaited_pages, awaited) = self.missing.awaited_now();
        let (channels, lost_channels, link_lost) = {
            let mut lanes = self.lanes.lock();
            let (lost, since) = lanes.lost_now();
            (lanes.count(), lost, since)
        };
        // Before the first sample, the mean since the start.
        let pages_per_s = match self.sampled.at == started {
            true => {
                let arrived = self.missing_pages - remaining_pages;
                arrived as f64 / started.elapsed().as_secs_f64().max(1e-3)
            }
            false => self.pages_per_s,
        };
        let eta_s = remaining_pages as f64 / pages_per_s;
        FetchProgress {
            source: source.to_owned(),
            remaining_pages,
            remaining_bytes: remaining_pages * PAGE_SIZE as u64,
            awaited_pages,
            awaited_ms: awaited.as_secs_f64() * 1e3,
            bytes_per_s: pages_per_s * PAGE_SIZE as f64,
            eta_ms: (pages_per_s > 1e-3).then_some(eta_s * 1e3),
            channels,
            lost_channels,
            link_lost_ms: link_lost.map(|lost| lost.as_secs_f64() * 1e3),
            stats: self.stats(started),
        }
    }

    fn stats(&self, started: Instant) -> FetchStats {
        let (counts, waits) = self.missing.counts();
        let (reconnections, down) = self.lanes.lock().reconnections();
        FetchStats {
            missing_pages: self.missing_pages,
            fault_pages: counts.fault_pages,
            background_pages: counts.background_pages,
            again_pages: counts.again_pages,
            faults: counts.faults,
            zero_faults: counts.zero_faults,
            fetch_ms: started.elapsed().as_secs_f64() * 1e3,
            waited_ms: waits.total().as_secs_f64() * 1e3,
            wait_mean_us: waits.mean_us(),
            wait_p50_us: waits.quantile_us(0.5),
            wait_p99_us: waits.quantile_us(0.99),
            wait_max_us: waits.max_us(),
            reconnections,
            link_down_ms: down.as_secs_f64() * 1e3,
        }
    }
}
