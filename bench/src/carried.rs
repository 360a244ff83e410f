//! `carried`: guests that can't be attached. QEMU's own migration over TLS, and the same migration carried by vmferry over
//! TLS.
//!
//! The guests' memory is private. It is full of what programs have in theirs (which zstd -1 makes 1/2.4), or 100 MiB of it are
//! rewritten all the time: pages of programs of which a few words change, and the same with incompressible pages. What
//! is measured and how: see [`qemus`](crate::qemus).
//!
//! Capped means QEMU's `max-bandwidth` and vmferry's `--max-bandwidth`. A capped guest that writes faster than the link
//! carries is handed over after the same number of passes over memory by both: there, vmferry is told `--when-stuck switch-over
//! --max-rounds`, and QEMU's downtime limit is raised as soon as the next pass begins. Three things favour QEMU in these rows, and
//! are left as they are: what QEMU sends while the guest stands still has no cap, so its downtime is not that of a link of
//! 350 Mbit/s; its cap is over all `multifd` channels together, and they were seen to exceed it by 10 to 20 %; and the clock of
//! vmferry includes starting the command.

mod ratios;

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use serde::Serialize;
use vmferry_memory::PAGE_SIZE;
use vmferry_qemu_lab::Backend;

use crate::guest::memory;
use crate::qemus::{By, Guest, Lab, Order, Sample, Summary};
use crate::raw;
use crate::results::{Results, Row, row};

/// 350 Mbit/s in bytes.
const CAP_BYTES_PER_S: u64 = 43_750_000;

/// Passes over memory after which a guest is stopped that writes faster than it is sent.
const PASSES: u32 = 3;

/// How the guest is moved.
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

/// What is between the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Link {
    Uncapped,
    Capped,
}

impl Link {
    const ALL: [Self; 2] = [Self::Uncapped, Self::Capped];

    fn name(self) -> &'static str {
        match self {
            Self::Uncapped => "uncapped",
            Self::Capped => "capped",
        }
    }

    fn bytes_per_s(self) -> Option<u64> {
        (self == Self::Capped).then_some(CAP_BYTES_PER_S)
    }
}

/// What the guest's memory is.
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

    /// The guest's memory in MiB, and how much of it is used for what.
    fn size(self, link: Link, quick: bool) -> (u64, u64) {
        match (self, link) {
            (Self::Program, _) if quick => (256, 48),
            (_, _) if quick => (256, 20),
            (Self::Program, Link::Uncapped) => (1280, 1024),
            // QEMU takes 10 s to send it.
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

/// What was measured, by link, guest and way.
type Key = (Link, Work, Way);

/// Runs it. `quick` moves small guests once in each way.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let lab = Lab::new()?;
    let mut samples: BTreeMap<Key, Vec<Sample>> = BTreeMap::new();
    for link in Link::ALL {
        for work in Work::ALL {
            let repetitions = match (link, work) {
                _ if quick => 1,
                (Link::Uncapped, _) => 3,
                // No aim is about it.
                (Link::Capped, Work::HotRandom) => 1,
                (Link::Capped, _) => 2,
            };
            move_about(&lab, (link, work), quick, repetitions, &mut samples)
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

/// Moves one guest in all ways in turn, each time beginning with another one.
fn move_about(
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
            let max_bandwidth = link.bytes_per_s();
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
    ensure!(guest.corruptions()? == 0, "the guest has found its memory corrupted");
    Ok(())
}

/// One way, of one guest, over one link.
#[derive(Serialize)]
struct CarriedRow {
    link: &'static str,
    guest: &'static str,
    way: &'static str,
    #[serde(flatten)]
    took: Summary,
}

/// What two channels of TLS carry from memory to memory, and nothing else, in MB per second: the best of three.
fn raw_rustls(lab: &Lab, quick: bool) -> anyhow::Result<f64> {
    let mib = if quick { 64 } else { 512 };
    let pages = mib << 8;
    let (source, destination) = (memory(pages)?, memory(pages)?);
    let tls = raw::Tls::load(&lab.tls)?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        best = best.min(raw::copy_here(&source, &destination, 2, Some(&tls), true)?.total_s);
    }
    Ok((pages * PAGE_SIZE as u64) as f64 / 1e6 / best)
}
