//! A guest that migrates between QEMU processes, by QEMU's own migration over QMP or by the
//! `vmferry` command.
//!
//! The total time starts with the order (`migrate` over QMP, or the start of the `vmferry send`
//! process) and ends when the guest is heard at the destination. The guest writes to a debug port
//! all the time. The downtime is the gap between the last byte at the source and the first at the
//! destination, by the host's clock. CPU time is that of both QEMU processes and both vmferry
//! processes, without the vCPU threads.

mod beats;
mod ferry;
mod guest;
mod host;
mod lab;
mod native;
mod warmth;

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::results::{least, median, most};

pub use beats::Beats;
pub use guest::Guest;
pub use host::{children_cpu_s, process_cpu_s, process_tree_cpu_s};
pub use lab::Lab;

/// Timeout for any single operation.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The downtime limit of QEMU and vmferry in milliseconds: QEMU's default.
const DOWNTIME_LIMIT_MS: u64 = 300;

/// The link between the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    Uncapped,
    /// 350 Mbit/s.
    Capped,
}

impl Link {
    pub const ALL: [Self; 2] = [Self::Uncapped, Self::Capped];

    pub fn name(self) -> &'static str {
        match self {
            Self::Uncapped => "uncapped",
            Self::Capped => "capped",
        }
    }
}

/// Who migrates the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum By {
    /// QEMU itself: one stream, or `multifd` with this number of channels.
    Qemu { multifd: Option<u8> },
    /// `vmferry send`, with its default number of channels or this one.
    Vmferry { carried: bool, channels: Option<u8> },
}

/// How to migrate a guest.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    pub by: By,
    pub tls: bool,
    /// The bandwidth cap in bytes per second.
    pub max_bandwidth: Option<u64>,
    /// The number of rounds after which the guest is switched over, whatever the downtime is.
    pub passes: Option<u32>,
}

/// The cost of one migration.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub total_ms: f64,
    pub downtime_ms: f64,
    pub bytes: f64,
    pub cpu_s: f64,
}

/// What a migration method reports.
struct Moved {
    /// When the migration was ordered.
    begun: Instant,
    /// Bytes sent.
    bytes: f64,
    /// CPU time of vmferry's processes.
    vmferry_cpu_s: f64,
}

/// Summary of the samples of one case.
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
    /// Computes medians and spread.
    pub fn of(samples: &[Sample]) -> Self {
        let all = |part: fn(&Sample) -> f64| samples.iter().map(part);
        let mid = |part: fn(&Sample) -> f64| median(all(part));
        let least = |part: fn(&Sample) -> f64| least(all(part));
        let most = |part: fn(&Sample) -> f64| most(all(part));
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
