//! `qemu`: QEMU's own migration and vmferry's, the same QEMU binary and the same guests.
//!
//! A guest wanders from QEMU to QEMU over loopback TCP, each time in another way, in turns. The clock
//! runs from the order (`migrate` by QMP; the start of the `vmferry send` process) until the guest is
//! heard at the destination. How long it stood still is heard too: it writes to a debug port all the time,
//! and the host's clock measures the gap between the last byte there and the first here. CPU time is that
//! of both QEMU processes and both vmferry processes, without the vCPU threads.

mod ferry;
mod guest;
mod native;

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use serde::Serialize;

use crate::results::{Results, median, row};
use guest::{Guest, Lab};

/// How the guest is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Qemu,
    QemuMultifd { channels: u8, tls: bool },
    Vmferry { channels: u8, tls: bool },
}

impl Way {
    /// In the order of a pass. Each way finds the guest's memory as the one before has left it at its
    /// destination. QEMU with one stream populates pages of zeros there, multifd and vmferry do not: the
    /// former comes last, so that all begin with a guest of the same kind.
    const ALL: [Self; 7] = [
        Self::QemuMultifd { channels: 2, tls: false },
        Self::Vmferry { channels: 2, tls: false },
        Self::QemuMultifd { channels: 4, tls: false },
        Self::Vmferry { channels: 4, tls: false },
        Self::QemuMultifd { channels: 2, tls: true },
        Self::Vmferry { channels: 2, tls: true },
        Self::Qemu,
    ];

    /// Not measured: takes the pages of zeros away again.
    const RESET: Self = Self::Vmferry { channels: 2, tls: false };

    fn name(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU",
            Self::QemuMultifd { tls: false, .. } => "QEMU multifd",
            Self::QemuMultifd { tls: true, .. } => "QEMU multifd, TLS",
            Self::Vmferry { tls: false, .. } => "vmferry",
            Self::Vmferry { tls: true, .. } => "vmferry, TLS",
        }
    }

    fn channels(self) -> u8 {
        match self {
            Self::Qemu => 1,
            Self::QemuMultifd { channels, .. } | Self::Vmferry { channels, .. } => channels,
        }
    }

    fn is_tls(self) -> bool {
        matches!(self, Self::QemuMultifd { tls: true, .. } | Self::Vmferry { tls: true, .. })
    }

    fn is_vmferry(self) -> bool {
        matches!(self, Self::Vmferry { .. })
    }
}

/// What the guest does, by the name that the ratios have.
const CASES: [(&str, &str); 3] = [("idle", ""), ("static", "static=1024"), ("hot", "dirty=100")];

/// What one migration took.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    total_ms: f64,
    downtime_ms: f64,
    bytes: f64,
    cpu_s: f64,
}

/// Runs it. `quick` moves a small guest once in each way.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let (mib, repetitions) = if quick { (256, 1) } else { (2048, 3) };
    let lab = Lab::new()?;
    let mut samples: BTreeMap<(usize, Way), Vec<Sample>> = BTreeMap::new();
    for (case, (name, workload)) in CASES.iter().enumerate() {
        if quick && case > 0 {
            break;
        }
        let mut guest = Guest::start(&lab, mib, workload).with_context(|| (*name).to_owned())?;
        for pass in 1..=repetitions {
            if pass <= 2 {
                guest = guest.move_on(Way::RESET)?.0;
            }
            // One stream is QEMU's slowest way by far: once is enough to see it.
            for way in Way::ALL.into_iter().filter(|way| pass == 1 || *way != Way::Qemu) {
                let label = || format!("{name}: {} over {} channels", way.name(), way.channels());
                let (next, sample) = guest.move_on(way).with_context(label)?;
                guest = next;
                samples.entry((case, way)).or_default().push(sample);
            }
            eprintln!("qemu: {name}, pass {pass} of {repetitions}");
        }
        ensure!(guest.corruptions()? == 0, "the guest has found its memory corrupted");
    }
    results(&samples)
}

/// One way in one case.
#[derive(Serialize)]
struct QemuRow {
    guest: &'static str,
    way: &'static str,
    channels: u8,
    total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    downtime_ms: f64,
    downtime_ms_min: f64,
    downtime_ms_max: f64,
    sent_mb: f64,
    cpu_s: f64,
    runs: usize,
}

fn results(samples: &BTreeMap<(usize, Way), Vec<Sample>>) -> anyhow::Result<Results> {
    let mut rows = Vec::new();
    let mut medians: BTreeMap<(usize, Way), Sample> = BTreeMap::new();
    for ((case, way), samples) in samples {
        let all = |part: fn(&Sample) -> f64| samples.iter().map(part);
        let mid = |part: fn(&Sample) -> f64| median(all(part).collect());
        let least = |part: fn(&Sample) -> f64| all(part).fold(f64::INFINITY, f64::min);
        let most = |part: fn(&Sample) -> f64| all(part).fold(0.0, f64::max);
        let sample = Sample {
            total_ms: mid(|sample| sample.total_ms),
            downtime_ms: mid(|sample| sample.downtime_ms),
            bytes: mid(|sample| sample.bytes),
            cpu_s: mid(|sample| sample.cpu_s),
        };
        medians.insert((*case, *way), sample);
        rows.push(row(&QemuRow {
            guest: CASES[*case].0,
            way: way.name(),
            channels: way.channels(),
            total_ms: sample.total_ms,
            total_ms_min: least(|sample| sample.total_ms),
            total_ms_max: most(|sample| sample.total_ms),
            downtime_ms: sample.downtime_ms,
            downtime_ms_min: least(|sample| sample.downtime_ms),
            downtime_ms_max: most(|sample| sample.downtime_ms),
            sent_mb: sample.bytes / 1e6,
            cpu_s: sample.cpu_s,
            runs: samples.len(),
        })?);
    }
    Ok(Results::new("qemu", rows, BTreeMap::new(), ratios(&medians)))
}

/// vmferry with its default of two channels over the best of QEMU's ways of the same security, figure by
/// figure.
fn ratios(medians: &BTreeMap<(usize, Way), Sample>) -> BTreeMap<String, f64> {
    let mut ratios = BTreeMap::new();
    for (case, (name, _)) in CASES.iter().enumerate() {
        for tls in [false, true] {
            let ours = medians.get(&(case, Way::Vmferry { channels: 2, tls }));
            let theirs: Vec<&Sample> = medians
                .iter()
                .filter(|((of, way), _)| *of == case && !way.is_vmferry() && way.is_tls() == tls)
                .map(|(_, sample)| sample)
                .collect();
            let Some(ours) = ours else { continue };
            let mut ratio = |figure: &str, part: fn(&Sample) -> f64| {
                let best = theirs.iter().map(|sample| part(sample)).fold(f64::INFINITY, f64::min);
                let security = if tls { "_tls" } else { "" };
                ratios.insert(format!("{figure}_{name}{security}"), part(ours) / best);
            };
            ratio("total", |sample| sample.total_ms);
            ratio("downtime", |sample| sample.downtime_ms);
            ratio("cpu", |sample| sample.cpu_s);
        }
    }
    ratios
}
