//! `qemu`: QEMU's own migration and vmferry's, with the same QEMU binary and the same guests.
//!
//! The guest's memory is a shared file, so vmferry attaches to QEMU. The module
//! [`qemus`](crate::qemus) explains how the time is measured.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use serde::Serialize;
use vmferry_qemu_lab::Backend;

use crate::qemus::{By, Guest, Lab, Order, Sample, Summary};
use crate::results::{Results, row};

/// How the guest is migrated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Qemu,
    QemuMultifd { channels: u8, tls: bool },
    Vmferry { channels: u8, tls: bool },
}

impl Way {
    /// The methods in the order of a pass. Each method finds the guest's memory as the previous one
    /// left it at its destination. QEMU with one stream populates zero pages there; multifd and
    /// vmferry do not. So QEMU with one stream comes last, and all methods start with the same kind
    /// of guest.
    const ALL: [Self; 7] = [
        Self::QemuMultifd { channels: 2, tls: false },
        Self::Vmferry { channels: 2, tls: false },
        Self::QemuMultifd { channels: 4, tls: false },
        Self::Vmferry { channels: 4, tls: false },
        Self::QemuMultifd { channels: 2, tls: true },
        Self::Vmferry { channels: 2, tls: true },
        Self::Qemu,
    ];

    /// A migration that is not measured. It removes the zero pages again.
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

    fn order(self) -> Order {
        let by = match self {
            Self::Qemu => By::Qemu { multifd: None },
            Self::QemuMultifd { channels, .. } => By::Qemu { multifd: Some(channels) },
            Self::Vmferry { channels, .. } => {
                By::Vmferry { carried: false, channels: Some(channels) }
            }
        };
        Order { by, tls: self.is_tls(), max_bandwidth: None, passes: None }
    }

    fn is_vmferry(self) -> bool {
        matches!(self, Self::Vmferry { .. })
    }
}

/// The guests' workloads. The first item is the name in the ratios.
const CASES: [(&str, &str); 3] = [("idle", ""), ("static", "static=1024"), ("hot", "dirty=100")];

/// Runs the benchmark. `quick` migrates a small guest once with each method.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let (mib, repetitions) = if quick { (256, 1) } else { (2048, 3) };
    let lab = Lab::new()?;
    let mut samples: BTreeMap<(usize, Way), Vec<Sample>> = BTreeMap::new();
    for (case, (name, workload)) in CASES.iter().enumerate() {
        if quick && case > 0 {
            break;
        }
        let mut guest =
            Guest::start(&lab, mib, Backend::File, workload).with_context(|| (*name).to_owned())?;
        for pass in 1..=repetitions {
            if pass <= 2 {
                guest = guest.move_on(Way::RESET.order())?.0;
            }
            // One stream is by far QEMU's slowest method, so it runs only once.
            for way in Way::ALL.into_iter().filter(|way| pass == 1 || *way != Way::Qemu) {
                let label = || format!("{name}: {} over {} channels", way.name(), way.channels());
                let (next, sample) = guest.move_on(way.order()).with_context(label)?;
                guest = next;
                samples.entry((case, way)).or_default().push(sample);
            }
            eprintln!("qemu: {name}, pass {pass} of {repetitions}");
        }
        ensure!(guest.corruptions()? == 0, "the guest found its memory corrupted");
    }
    results(&samples)
}

/// A row: one method and one guest.
#[derive(Serialize)]
struct QemuRow {
    guest: &'static str,
    way: &'static str,
    channels: u8,
    #[serde(flatten)]
    took: Summary,
}

fn results(samples: &BTreeMap<(usize, Way), Vec<Sample>>) -> anyhow::Result<Results> {
    let mut rows = Vec::new();
    let mut medians: BTreeMap<(usize, Way), Summary> = BTreeMap::new();
    for ((case, way), samples) in samples {
        let took = Summary::of(samples);
        medians.insert((*case, *way), took);
        let (guest, channels) = (CASES[*case].0, way.channels());
        rows.push(row(&QemuRow { guest, way: way.name(), channels, took })?);
    }
    Ok(Results::new("qemu", rows, BTreeMap::new(), ratios(&medians)))
}

/// The ratios of vmferry with its default of two channels to QEMU's best method with the same
/// security.
fn ratios(medians: &BTreeMap<(usize, Way), Summary>) -> BTreeMap<String, f64> {
    let mut ratios = BTreeMap::new();
    for (case, (name, _)) in CASES.iter().enumerate() {
        for tls in [false, true] {
            let ours = medians.get(&(case, Way::Vmferry { channels: 2, tls }));
            let theirs: Vec<&Summary> = medians
                .iter()
                .filter(|((of, way), _)| *of == case && !way.is_vmferry() && way.is_tls() == tls)
                .map(|(_, sample)| sample)
                .collect();
            let Some(ours) = ours else { continue };
            let mut ratio = |figure: &str, part: fn(&Summary) -> f64| {
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
