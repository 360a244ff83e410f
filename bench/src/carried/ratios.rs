//! Ratios of a carried migration to QEMU's best with the same security.

use std::collections::BTreeMap;

use super::{Key, Link, Way, Work};
use crate::aims::{Ratios, Target};
use crate::qemus::Summary;

/// The guests that the targets are about. Real guests do not fill hot memory with random numbers.
const AIMED_AT: [Work; 2] = [Work::Program, Work::Hot];

/// Computes the ratios from the medians.
pub fn of(medians: &BTreeMap<Key, Summary>) -> Ratios {
    let mut ratios = Ratios::default();
    for link in Link::ALL {
        for (figure, part) in FIGURES {
            for work in Work::ALL {
                if let Some(ratio) = ratio(medians, (link, work), part) {
                    let name = format!("{figure}_{}_{}", link.name(), work.name());
                    ratios.values.insert(name, ratio);
                }
            }
        }
    }
    for (name, link, part, most, meaning) in [
        (
            "total_uncapped",
            Link::Uncapped,
            FIGURES[0].1,
            1.05,
            "total time over QEMU's best, both with TLS, the worse of `program` and `hot`",
        ),
        ("total_capped", Link::Capped, FIGURES[0].1, 0.6, "the same at 350 Mbit/s"),
        (
            "cpu_uncapped",
            Link::Uncapped,
            FIGURES[1].1,
            1.3,
            "CPU time of all processes without vCPUs over QEMU's best, the worse of the two",
        ),
    ] {
        let worst = AIMED_AT.into_iter().filter_map(|work| ratio(medians, (link, work), part));
        ratios.aim(name, worst.fold(0.0, f64::max), Target::AtMost(most), meaning);
    }
    ratios
}

/// A figure's name and how to read it.
type Figure = (&'static str, fn(&Summary) -> f64);

const FIGURES: [Figure; 3] = [
    ("total", |summary| summary.total_ms),
    ("cpu", |summary| summary.cpu_s),
    ("downtime", |summary| summary.downtime_ms),
];

/// The ratio for vmferry's default, which is one stream.
fn ratio(
    medians: &BTreeMap<Key, Summary>,
    (link, work): (Link, Work),
    part: fn(&Summary) -> f64,
) -> Option<f64> {
    let figure = |way| medians.get(&(link, work, way)).map(part);
    let qemu = Way::ALL.into_iter().filter(|way| way.is_qemus()).filter_map(figure);
    Some(figure(Way::Carried)? / qemu.reduce(f64::min)?)
}
