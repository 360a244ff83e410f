//! QEMUs that a guest wanders between, each time in another way: QEMU's own migration, ordered by QMP, or the
//! `vmferry` command.
//!
//! The clock runs from the order (`migrate` by QMP; the start of the `vmferry send` process) until the guest is
//! heard at the destination. How long it stood still is heard too: it writes to a debug port all the time, and the host's
//! clock measures the gap between the last byte there and the first here. CPU time is that of both QEMU
//! processes and both vmferry processes, without the vCPU threads.

mod beats;
mod ferry;
mod guest;
mod host;
mod lab;
mod native;
mod warmth;

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::results::median;

pub use guest::Guest;
pub use lab::Lab;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// The downtime that both QEMU and vmferry may take, in milliseconds: QEMU's default.
const DOWNTIME_LIMIT_MS: u64 = 300;

/// Who moves the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum By {
    /// QEMU itself: one stream, or `multifd` with so many channels beside it.
    Qemu { multifd: Option<u8> },
    /// `vmferry send`, with its default of channels or so many.
    Vmferry { carried: bool, channels: Option<u8> },
}

/// An order to move a guest.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    pub by: By,
    pub tls: bool,
    /// Bytes per second, at most.
    pub max_bandwidth: Option<u64>,
    /// After so many passes over memory the guest is stopped, whatever downtime it costs.
    pub passes: Option<u32>,
}

/// What one migration took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub total_ms: f64,
    pub downtime_ms: f64,
    pub bytes: f64,
    pub cpu_s: f64,
}

/// What a way of migrating reports.
struct Moved {
    /// When it was ordered.
    begun: Instant,
    /// Bytes sent.
    bytes: f64,
    /// CPU time of vmferry's processes.
    vmferry_cpu_s: f64,
}

/// Several samples of the same.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Summary {
    pub total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    pub downtime_ms: f64,
    downtime_ms_min: f64,
    downtime_ms_max: f64,
    sent_mb: f64,
    pub cpu_s: f64,
    runs: usize,
}

impl Summary {
    /// Medians and spread.
    pub fn of(samples: &[Sample]) -> Self {
        let all = |part: fn(&Sample) -> f64| samples.iter().map(part);
        let mid = |part: fn(&Sample) -> f64| median(all(part).collect());
        let least = |part: fn(&Sample) -> f64| all(part).fold(f64::INFINITY, f64::min);
        let most = |part: fn(&Sample) -> f64| all(part).fold(0.0, f64::max);
        Self {
            total_ms: mid(|sample| sample.total_ms),
            total_ms_min: least(|sample| sample.total_ms),
            total_ms_max: most(|sample| sample.total_ms),
            downtime_ms: mid(|sample| sample.downtime_ms),
            downtime_ms_min: least(|sample| sample.downtime_ms),
            downtime_ms_max: most(|sample| sample.downtime_ms),
            sent_mb: mid(|sample| sample.bytes) / 1e6,
            cpu_s: mid(|sample| sample.cpu_s),
            runs: samples.len(),
        }
    }
}
