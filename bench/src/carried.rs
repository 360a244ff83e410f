//! `carried`: guests that vmferry cannot attach to. QEMU's own migration over TLS is compared with
//! the same migration carried by vmferry over TLS.
//!
//! The guests' memory is private. One guest's memory is full of program pages (zstd level 1
//! compresses them to 1/2.4). The others rewrite 100 MiB all the time: program pages in which a few
//! words change, or incompressible pages. The module [`qemus`](crate::qemus) explains how the time
//! is measured.
//!
//! "Capped" sets QEMU's `max-bandwidth` and vmferry's `--max-bandwidth`. A capped guest that writes
//! faster than the link carries is switched over after the same number of rounds by both: vmferry
//! runs with `--when-stuck switch-over --max-rounds`, and QEMU's downtime limit is raised when the
//! next round begins.
//!
//! Three effects favor QEMU in these rows and are not corrected. QEMU does not apply its cap while
//! the guest is paused, so its downtime is not that of a 350 Mbit/s link. QEMU's cap covers all
//! `multifd` channels together, and they exceeded it by 10 to 20 %. The time of vmferry includes
//! starting the command.

mod ratios;

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use serde::Serialize;
use vmferry_memory::PAGE_SIZE;
use vmferry_qemu_lab::Backend;

use crate::guest::memory;
use crate::qemus::{By, Guest, Lab, Link, Order, Sample, Summary};
use crate::raw::{self, Sockets};
use crate::results::{Results, Row, row};

/// The cap, 350 Mbit/s, in bytes per second.
const CAP_BYTES_PER_S: u64 = 43_750_000;

/// Rounds after which a guest that writes faster than the link carries is switched over.
const PASSES: u32 = 3;

/// How the guest is migrated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Qemu,
    QemuMultifd,
    Carried,
    CarriedMultifd,
}

impl Way {
    const ALL: [Self; 4] = [Self::Qemu, Self::QemuMultifd, Self::Carried, Self::CarriedMultifd];

    fn name(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU, TLS",
            Self::QemuMultifd => "QEMU multifd 2, TLS",
            Self::Carried => "carried, TLS",
            Self::CarriedMultifd => "carried, --multifd 2, TLS",
        }
    }

    fn by(self) -> By {
        match self {
            Self::Qemu => By::Qemu { multifd: None },
            Self::QemuMultifd => By::Qemu { multifd: Some(2) },
            Self::Carried => By::Vmferry { carried: true, channels: None },
            Self::CarriedMultifd => By::Vmferry { carried: true, channels: Some(2) },
        }
    }

    fn is_qemus(self) -> bool {
        matches!(self, Self::Qemu | Self::QemuMultifd)
    }
}

/// What the guest does with its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    Program,
    Hot,
    HotRandom,
}

impl Work {
    const ALL: [Self; 3] = [Self::Program, Self::Hot, Self::HotRandom];

    fn name(self) -> &'static str {
        match self {
            Self::Program => "program",
            Self::Hot => "hot",
            Self::HotRandom => "hot_random",
        }
    }

    /// Returns the guest's memory and the part that the workload uses, both in MiB.
    fn size(self, link: Link, quick: bool) -> (u64, u64) {
        match (self, link) {
            (Self::Program, _) if quick => (256, 48),
            (_, _) if quick => (256, 20),
            (Self::Program, Link::Uncapped) => (1280, 1024),
            // At the cap, QEMU needs 10 s to send 352 MiB.
            (Self::Program, Link::Capped) => (512, 352),
            (_, Link::Uncapped) => (1280, 100),
            (_, Link::Capped) => (256, 100),
        }
    }

    fn option(self) -> &'static str {
        match self {
            Self::Program => "program",
            Self::Hot => "hot",
            Self::HotRandom => "dirty",
        }
    }
}

/// A measured case: link, guest and method.
type Key = (Link, Work, Way);

/// Runs the benchmark. `quick` migrates small guests once with each method.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let lab = Lab::new()?;
    let mut samples: BTreeMap<Key, Vec<Sample>> = BTreeMap::new();
    for link in Link::ALL {
        for work in Work::ALL {
            let repetitions = match (link, work) {
                _ if quick => 1,
                (Link::Uncapped, _) => 3,
                // No target uses this case.
                (Link::Capped, Work::HotRandom) => 1,
                (Link::Capped, _) => 2,
            };
            move_in_turn(&lab, (link, work), quick, repetitions, &mut samples)
                .with_context(|| format!("{}, {}", link.name(), work.name()))?;
        }
    }
    let mut rows = Vec::new();
    let mut medians = BTreeMap::new();
    for (key, samples) in &samples {
        let (link, work, way) = *key;
        let took = Summary::of(samples);
        medians.insert(*key, took);
        let (link, guest, way) = (link.name(), work.name(), way.name());
        rows.push(row(&CarriedRow { link, guest, way, took })?);
    }
    let raw_mb_per_s = raw_rustls(&lab, quick)?;
    let mut ratios = ratios::of(&medians);
    let used_mb = (Work::Program.size(Link::Uncapped, quick).1 << 20) as f64 / 1e6;
    if let Some(carried) = medians.get(&(Link::Uncapped, Work::Program, Way::Carried)) {
        let of_raw = used_mb / (carried.total_ms / 1e3) / raw_mb_per_s;
        ratios.values.insert("carried_of_raw_rustls".to_owned(), of_raw);
    }
    let yardsticks = [
        ("raw_rustls_2_channels_mb_per_s", raw_mb_per_s),
        ("cap_mb_per_s", CAP_BYTES_PER_S as f64 / 1e6),
    ];
    let yardsticks = yardsticks.map(|(name, number)| (name.to_owned(), number)).into();
    let mut results = Results::new("carried", rows, yardsticks, ratios.values);
    let aims = ratios.aims.iter().map(row).collect::<anyhow::Result<Vec<Row>>>()?;
    results.more.insert("aims", aims);
    Ok(results)
}

/// Migrates one guest with each method in turn. Each pass begins with another method.
fn move_in_turn(
    lab: &Lab,
    (link, work): (Link, Work),
    quick: bool,
    repetitions: usize,
    samples: &mut BTreeMap<Key, Vec<Sample>>,
) -> anyhow::Result<()> {
    let (mib, used_mib) = work.size(link, quick);
    let workload = format!("{}={used_mib}", work.option());
    let mut guest = Guest::start(lab, mib, Backend::Private, &workload)?;
    for pass in 1..=repetitions {
        let mut ways = Way::ALL;
        ways.rotate_left((pass - 1) % Way::ALL.len());
        for way in ways {
            let max_bandwidth = (link == Link::Capped).then_some(CAP_BYTES_PER_S);
            let order = Order { by: way.by(), tls: true, max_bandwidth, passes: Some(PASSES) };
            let (next, sample) = guest.move_on(order).with_context(|| way.name())?;
            guest = next;
            eprintln!(
                "carried: {}, {}, {}, pass {pass} of {repetitions}: {:.0} ms, downtime {:.0} ms",
                link.name(),
                work.name(),
                way.name(),
                sample.total_ms,
                sample.downtime_ms,
            );
            samples.entry((link, work, way)).or_default().push(sample);
        }
    }
    ensure!(guest.corruptions()? == 0, "the guest found its memory corrupted");
    Ok(())
}

/// A row: one method, one guest, one link.
#[derive(Serialize)]
struct CarriedRow {
    link: &'static str,
    guest: &'static str,
    way: &'static str,
    #[serde(flatten)]
    took: Summary,
}

/// Returns the throughput of a plain memory copy over two TLS channels, in MB/s: the best of three
/// runs.
fn raw_rustls(lab: &Lab, quick: bool) -> anyhow::Result<f64> {
    let mib = if quick { 64 } else { 512 };
    let pages = mib << 8;
    let (source, destination) = (memory(pages)?, memory(pages)?);
    let tls = raw::Tls::load(&lab.tls)?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        best =
            best.min(raw::copy_here(&source, &destination, 2, Some(&tls), Sockets::Tuned)?.total_s);
    }
    Ok((pages * PAGE_SIZE as u64) as f64 / 1e6 / best)
}
