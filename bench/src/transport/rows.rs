//! The rows of the table: one per case, over all runs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Samples;
use super::case::{Case, Way};
use super::run::Run;
use crate::results::{least, median, most};

/// A case. Values are medians, except minima, maxima, and the idle time, whose mean is over all
/// runs. A GB is 10^9 bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// The place.
    pub place: &'static str,
    /// Whether there is a cap.
    pub link: &'static str,
    /// The number of data channels.
    pub channels: u8,
    /// The method.
    pub way: &'static str,
    /// From the start of the dirty log until the guest runs at the destination.
    pub total_ms: f64,
    /// The shortest run.
    pub total_ms_min: f64,
    /// The longest run.
    pub total_ms_max: f64,
    /// Connecting, handshakes and closing, in addition to the total time.
    pub connect_ms: f64,
    /// The guest's memory divided by the total time.
    pub mb_per_s: f64,
    /// CPU time of the source's process per GB of guest memory.
    pub source_cpu_s_per_gb: f64,
    /// The same for the destination.
    pub destination_cpu_s_per_gb: f64,
    /// Idle time of the machine, which runs both sides.
    pub idle_cpu_percent_mean: f64,
    /// The minimum over a tenth of a second of any run.
    pub idle_cpu_percent_min: f64,
    /// The maximum over a tenth of a second of any run.
    pub idle_cpu_percent_max: f64,
    /// Number of runs.
    pub runs: usize,
}

impl Cell {
    /// CPU seconds of both sides per GB.
    pub fn cpu_s_per_gb(&self) -> f64 {
        self.source_cpu_s_per_gb + self.destination_cpu_s_per_gb
    }
}

/// Rows by case.
pub type Cells = BTreeMap<Case, Cell>;

/// Summarizes the runs, each of which moved `bytes` bytes.
pub fn cells(samples: &Samples, bytes: f64) -> Cells {
    samples.iter().map(|(case, runs)| (*case, cell(*case, runs, bytes))).collect()
}

fn cell(case: Case, runs: &[Run], bytes: f64) -> Cell {
    let of = |part: &dyn Fn(&Run) -> f64| median(runs.iter().map(part));
    let least = |part: &dyn Fn(&Run) -> f64| least(runs.iter().map(part));
    let most = |part: &dyn Fn(&Run) -> f64| most(runs.iter().map(part));
    let total_ms = |run: &Run| run.total_s * 1e3;
    let gb = bytes / 1e9;
    Cell {
        place: case.place.name(),
        link: case.link.name(),
        channels: case.channels,
        way: case.way.name(),
        total_ms: of(&total_ms),
        total_ms_min: least(&total_ms),
        total_ms_max: most(&total_ms),
        connect_ms: of(&|run| run.connect_s * 1e3),
        mb_per_s: bytes / of(&|run| run.total_s) / 1e6,
        source_cpu_s_per_gb: of(&|run| run.source_cpu_s) / gb,
        destination_cpu_s_per_gb: of(&|run| run.destination_cpu_s) / gb,
        idle_cpu_percent_mean: runs.iter().map(|run| run.idle.mean).sum::<f64>()
            / runs.len() as f64,
        idle_cpu_percent_min: least(&|run| run.idle.min),
        idle_cpu_percent_max: most(&|run| run.idle.max),
        runs: runs.len(),
    }
}

/// The throughput of the plain copies, and the cap in bytes per second.
pub fn yardsticks(cells: &Cells, cap: u64) -> BTreeMap<String, f64> {
    let mut yardsticks = BTreeMap::from([("cap_mb_per_s".to_owned(), cap as f64 / 1e6)]);
    for (case, cell) in cells {
        let name = match case.way {
            Way::RawSocket => "raw_socket",
            Way::RawRustls => "raw_rustls",
            _ => continue,
        };
        let name = format!("{name}_{}ch_{}_mb_per_s", case.channels, case.place.name());
        yardsticks.insert(name, cell.mb_per_s);
    }
    yardsticks
}
