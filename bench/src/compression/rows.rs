//! The rows of the table: one per case, over all repetitions.

use std::collections::BTreeMap;

use serde::Serialize;
use vmferry_memory::PAGE_SIZE;

use super::content::Content;
use super::window::{Sample, Window};
use super::{Key, Link};
use crate::results::{least, median, most};

/// A case. Values are medians, except the minimum and maximum.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The content class.
    pub content: &'static str,
    /// The link's cap.
    pub link: &'static str,
    /// The method.
    pub way: &'static str,
    /// Pages with content.
    pub pages_per_s: f64,
    /// The slowest repetition.
    pub pages_per_s_min: f64,
    /// The fastest repetition.
    pub pages_per_s_max: f64,
    /// Zero pages per second, which come in addition.
    pub zero_pages_per_s: f64,
    /// Bytes on the link.
    pub wire_mb_per_s: f64,
    /// Bytes of pages with content over bytes on the link.
    pub ratio: f64,
    /// CPU seconds of the source's threads per GiB of guest memory, including zero pages.
    pub source_cpu_s_per_gib: f64,
    /// The same for the destination.
    pub destination_cpu_s_per_gib: f64,
    /// The window's length.
    pub window_ms: f64,
    /// Number of windows.
    pub runs: usize,
    /// The profile is a separate table.
    #[serde(skip)]
    pub profile: Profile,
}

/// The quantities of the published profiles, as medians of a case. Time in locks was published too,
/// but only the kernel's profiler knows it; a thread that waits for a lock sleeps, and that is
/// counted.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// As in [`Cell`].
    pub content: &'static str,
    /// As in [`Cell`].
    pub link: &'static str,
    /// As in [`Cell`].
    pub way: &'static str,
    /// The migration thread's share of the source's CPU time, in percent.
    pub migration_thread_percent: f64,
    /// Allocations by both sides, in Rust and in C libraries, per page of any kind.
    pub allocations_per_page: f64,
    /// Minor page faults. This and the following values cover both sides' threads, not the guest's.
    pub minor_faults_per_1000_pages: f64,
    /// Page faults that needed disk I/O.
    pub major_faults_per_1000_pages: f64,
    /// Voluntary context switches: a thread went to sleep.
    pub voluntary_switches_per_1000_pages: f64,
    /// Involuntary context switches: a thread was preempted.
    pub involuntary_switches_per_1000_pages: f64,
}

/// Bytes of a GiB.
const GIB: f64 = (1_u64 << 30) as f64;

/// Summarizes the samples of each case.
pub fn cells(
    samples: &BTreeMap<Key, Vec<Sample>>,
    window: impl Fn(Content, Link) -> Window,
) -> BTreeMap<Key, Cell> {
    let cell =
        |(key, samples): (&Key, &Vec<Sample>)| (*key, cell(key, samples, window(key.0, key.1)));
    samples.iter().map(cell).collect()
}

fn cell((content, link, way): &Key, samples: &[Sample], window: Window) -> Cell {
    let of = |part: &dyn Fn(&Sample) -> f64| median(samples.iter().map(part));
    let pages_per_s = |sample: &Sample| sample.content_pages / sample.seconds;
    let all = |sample: &Sample| sample.content_pages + sample.zero_pages;
    let speeds = || samples.iter().map(pages_per_s);
    let per_1000 = |part: fn(&Sample) -> u64| of(&|sample| 1e3 * part(sample) as f64 / all(sample));
    let per_gib = GIB / PAGE_SIZE as f64;
    Cell {
        content: content.name(),
        link: link.name(),
        way: way.name(),
        pages_per_s: of(&pages_per_s),
        pages_per_s_min: least(speeds()),
        pages_per_s_max: most(speeds()),
        zero_pages_per_s: of(&|sample| sample.zero_pages / sample.seconds),
        wire_mb_per_s: of(&|sample| sample.bytes / sample.seconds / 1e6),
        ratio: of(&|sample| sample.content_pages * PAGE_SIZE as f64 / sample.bytes.max(1.0)),
        source_cpu_s_per_gib: of(&|sample| sample.source_cpu_s / all(sample) * per_gib),
        destination_cpu_s_per_gib: of(&|sample| sample.destination_cpu_s / all(sample) * per_gib),
        window_ms: window.length.as_secs_f64() * 1e3,
        runs: samples.len(),
        profile: Profile {
            content: content.name(),
            link: link.name(),
            way: way.name(),
            migration_thread_percent: of(&|sample| 100.0 * sample.migration_thread_share),
            allocations_per_page: of(&|sample| sample.allocations / all(sample)),
            minor_faults_per_1000_pages: per_1000(|sample| sample.used.minor_faults),
            major_faults_per_1000_pages: per_1000(|sample| sample.used.major_faults),
            voluntary_switches_per_1000_pages: per_1000(|sample| sample.used.voluntary_switches),
            involuntary_switches_per_1000_pages: per_1000(|sample| {
                sample.used.involuntary_switches
            }),
        },
    }
}
