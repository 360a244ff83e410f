//! Medians, spread and ratios.

use std::collections::BTreeMap;

use serde::Serialize;

use super::cut::Outcome;
use super::guest::Sample;
use super::way::Way;
use super::{Case, Samples};
use crate::aims::{Ratios, Target};
use crate::results::{least, median, most};

/// Summary of the samples of one case and way.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Summary {
    pub total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    downtime_ms: f64,
    downtime_ms_min: f64,
    downtime_ms_max: f64,
    libvirt_downtime_ms: f64,
    wire_mb: f64,
    source_cpu_s: f64,
    destination_cpu_s: f64,
    pub cpu_s: f64,
    cpu_s_min: f64,
    cpu_s_max: f64,
    runs: usize,
}

impl Summary {
    fn of(samples: &[Sample]) -> Self {
        let all = |part: fn(&Sample) -> f64| samples.iter().map(part);
        let cpu = |sample: &Sample| sample.cpu_s.iter().sum::<f64>();
        Self {
            total_ms: median(all(|sample| sample.total_ms)),
            total_ms_min: least(all(|sample| sample.total_ms)),
            total_ms_max: most(all(|sample| sample.total_ms)),
            downtime_ms: median(all(|sample| sample.downtime_ms)),
            downtime_ms_min: least(all(|sample| sample.downtime_ms)),
            downtime_ms_max: most(all(|sample| sample.downtime_ms)),
            libvirt_downtime_ms: median(all(|sample| sample.libvirt_downtime_ms)),
            wire_mb: median(all(|sample| sample.wire_bytes)) / 1e6,
            source_cpu_s: median(all(|sample| sample.cpu_s[0])),
            destination_cpu_s: median(all(|sample| sample.cpu_s[1])),
            cpu_s: median(samples.iter().map(cpu)),
            cpu_s_min: least(samples.iter().map(cpu)),
            cpu_s_max: most(samples.iter().map(cpu)),
            runs: samples.len(),
        }
    }
}

/// A row: one case and one way.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LibvirtRow {
    case: &'static str,
    guest: &'static str,
    way: &'static str,
    #[serde(flatten)]
    pub took: Summary,
}

/// The rows, by case and way.
pub fn rows(samples: &Samples, quick: bool) -> BTreeMap<(Case, Way), LibvirtRow> {
    let row = |(key, samples): (&(Case, Way), &Vec<Sample>)| {
        let (case, way) = *key;
        let (guest, took) = (case.guest(quick), Summary::of(samples));
        (*key, LibvirtRow { case: case.name(), guest, way: way.name(), took })
    };
    samples.iter().map(row).collect()
}

/// A figure's name and how to read it.
type Figure = (&'static str, fn(&Summary) -> f64);

const FIGURES: [Figure; 3] = [
    ("total", |took| took.total_ms),
    ("cpu", |took| took.cpu_s),
    ("downtime", |took| took.downtime_ms),
];

/// The ratios that the targets are about, and the same for all other ways.
pub fn ratios(rows: &BTreeMap<(Case, Way), LibvirtRow>, cut: &[Outcome]) -> Ratios {
    let mut ratios = Ratios::default();
    let ratio = |case, over, part: fn(&Summary) -> f64| {
        let figure = |way| rows.get(&(case, way)).map(|row| part(&row.took));
        Some(figure(Way::Vmferry)? / figure(over)?)
    };
    let ways = [(Way::Plain, "plain"), (Way::Tls, "tls"), (Way::Socat, "socat")];
    for (case, name) in [(Case::Uncapped, "uncapped"), (Case::Capped, "capped")] {
        for (figure, part) in FIGURES {
            for (way, over) in ways {
                if let Some(ratio) = ratio(case, way, part) {
                    ratios.values.insert(format!("{figure}_{name}_over_{over}"), ratio);
                }
            }
        }
    }
    let [(_, total), (_, cpu), _] = FIGURES;
    for (name, case, over, part, most, meaning) in [
        (
            "total_uncapped_over_plain",
            Case::Uncapped,
            Way::Plain,
            total,
            1.15,
            "total time through vmferry with TLS over libvirt's plain TCP",
        ),
        ("total_uncapped_over_tls", Case::Uncapped, Way::Tls, total, 0.8, "over libvirt's TLS"),
        ("total_capped_over_tls", Case::Capped, Way::Tls, total, 0.5, "the same at 350 Mbit/s"),
        (
            "cpu_uncapped_over_tls",
            Case::Uncapped,
            Way::Tls,
            cpu,
            1.0,
            "CPU time of all processes of both hosts without vCPUs, over libvirt's TLS",
        ),
        (
            "disk_capped_over_nbd_tls",
            Case::Disk,
            Way::Tls,
            total,
            0.6,
            "total time with a disk's copy at 350 Mbit/s, over libvirt's TLS",
        ),
    ] {
        // Not a number if there are no rows, which misses the target.
        let value = ratio(case, over, part).unwrap_or(f64::NAN);
        ratios.aim(name, value, Target::AtMost(most), meaning);
    }
    let failed = |way: Way| {
        let of_way = cut.iter().filter(|outcome| outcome.way == way.name());
        of_way.map(|outcome| f64::from(outcome.failed)).sum()
    };
    let meaning = "migrations that failed after 10 s without a link, guest at the source";
    ratios.aim("failed_with_10s_cut", failed(Way::Vmferry), Target::AtMost(0.0), meaning);
    let of_libvirt = failed(Way::Plain);
    ratios.values.insert("failed_with_10s_cut_libvirt".to_owned(), of_libvirt);
    ratios
}
