//! `libvirt`: guests that libvirt 11.3 with QEMU 10.0 moves between two hosts, by itself, with its
//! TLS, through `socat`, and through `vmferry daemon`.
//!
//! Each host is a network namespace with libvirt, the daemon and `socat`. The capped link is a
//! token bucket of 350 Mbit/s at both ends of the cable. The guest is the self-checking Linux of
//! the benchmarks `qemu` and `carried`, emulated (TCG). Most of its memory is program pages, and it
//! rewrites 100 MiB of them, resting between pages so that every way converges with libvirt's
//! default downtime limit of 300 ms at 350 Mbit/s. It moves there and back, by each way in turn.
//!
//! The total time is that of `virsh migrate`, which includes the start of the destination's QEMU,
//! about 1 s. The downtime is the gap between the last byte on the guest's debug port at the source
//! and the first at the destination. CPU time is that of both QEMUs, libvirtds, daemons and all
//! `socat`, without vCPU threads. The bytes are those of the cable's interface, both directions.
//!
//! One effect favors libvirt and is not corrected: without a forwarder its own connection is a Unix
//! socket that does not use the cable.

mod cpu;
mod cut;
mod disk;
mod guest;
mod lab;
mod rows;
mod warmth;
mod way;
mod yardsticks;

use std::collections::BTreeMap;

use anyhow::Context;
use vmferry_net_lab::Direction;

use crate::results::{Results, Row, row};
use disk::LocalDisk;
use guest::{Guest, Sample, Workload};
use lab::Lab;
use way::Way;

/// The cap in kilobits per second.
const CAP_KBIT_PER_S: u32 = 350_000;

/// What the table is about.
const HEADING: &str = "libvirt 11.3, QEMU 10.0; self-checking Linux, emulated (TCG), with program \
    pages of which it rewrites 100 MiB at about 20 MB/s";
const QUICK_HEADING: &str =
    "quick: small guests, each way once, 4 migrations cut; the numbers mean nothing";

/// What is moved over which link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Case {
    Uncapped,
    Capped,
    /// A small guest with a disk, capped.
    Disk,
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Self::Uncapped => "uncapped",
            Self::Capped => "capped",
            Self::Disk => "disk, capped",
        }
    }

    /// The guest, for the table.
    fn guest(self, quick: bool) -> &'static str {
        match (self, quick) {
            (Self::Disk, false) => "Linux (TCG), 128 MiB, disk 1 GiB",
            (_, false) => "Linux (TCG), 1 GiB, 100 MiB hot",
            (Self::Disk, true) => "quick: Linux (TCG), 128 MiB, disk 64 MiB",
            (_, true) => "quick: Linux (TCG), 256 MiB, 20 MiB hot",
        }
    }
}

/// All samples.
type Samples = BTreeMap<(Case, Way), Vec<Sample>>;

/// How much is measured.
struct Size {
    /// The large guest's memory, program pages and hot pages, in MiB.
    guest: [u64; 3],
    disk_mib: u64,
    uncapped_runs: usize,
    capped_runs: usize,
    /// Migrations with each kind of cut, and how many of them at the same time.
    cuts: (u32, usize),
    /// Bytes of the yardsticks, uncapped and capped, in MiB.
    yardstick_mib: [u64; 2],
}

const USUAL: Size = Size {
    guest: [1024, 768, 100],
    disk_mib: 1024,
    uncapped_runs: 9,
    capped_runs: 3,
    cuts: (11, 6),
    yardstick_mib: [512, 64],
};

const QUICK: Size = Size {
    guest: [256, 100, 20],
    disk_mib: 64,
    uncapped_runs: 1,
    capped_runs: 1,
    cuts: (2, 2),
    yardstick_mib: [64, 16],
};

/// Runs the benchmark. `quick` moves small guests once with each way, and cuts 4 migrations of each
/// way.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let size = if quick { QUICK } else { USUAL };
    let lab = Lab::new()?;
    let mut samples = Samples::new();
    let [mib, program, hot] = size.guest;
    let options = format!("program={program} hot={hot} rest=10000");
    let workload = Workload { name: "web".to_owned(), mib, options };
    let mut web = Guest::start(&lab, &workload, None)?;
    move_in_turn(&mut web, Case::Uncapped, size.uncapped_runs, &mut samples)?;
    let [socket, rustls] = yardsticks::throughput(&lab, size.yardstick_mib[0])?;
    lab.networks.slow_down(Direction::Both, CAP_KBIT_PER_S)?;
    let [capped_socket, capped_rustls] = yardsticks::throughput(&lab, size.yardstick_mib[1])?;
    move_in_turn(&mut web, Case::Capped, size.capped_runs, &mut samples)?;
    // The guest goes on checking its memory meanwhile, which takes minutes.
    let checked = web.check()?;
    move_disks(&lab, &size, &mut samples)?;
    let mut cut = Vec::new();
    for way in [Way::Vmferry, Way::Plain] {
        cut.extend(cut::measure(&lab, way, size.cuts)?);
    }
    lab.networks.mend(Direction::Both)?;
    web.check_all_since(checked)?;

    let found = rows::rows(&samples, quick);
    let ratios = rows::ratios(&found, &cut);
    let rows = found.values().map(row).collect::<anyhow::Result<Vec<Row>>>()?;
    let yardsticks = [
        ("bare_socket_mb_per_s", socket),
        ("rustls_mb_per_s", rustls),
        ("capped_bare_socket_mb_per_s", capped_socket),
        ("capped_rustls_mb_per_s", capped_rustls),
        ("cap_mb_per_s", f64::from(CAP_KBIT_PER_S) / 8e3),
    ];
    let yardsticks = yardsticks.map(|(name, number)| (name.to_owned(), number)).into();
    let mut results = Results::new("libvirt", rows, yardsticks, ratios.values);
    results.heading = Some(if quick { QUICK_HEADING } else { HEADING });
    let aims = ratios.aims.iter().map(row).collect::<anyhow::Result<Vec<Row>>>()?;
    results.more.insert("aims", aims);
    let cut = cut.iter().map(row).collect::<anyhow::Result<Vec<Row>>>()?;
    results.more.insert("link_cut_for_10_s", cut);
    Ok(results)
}

/// Moves the guest by each way in turn. Each pass begins with another way.
fn move_in_turn(
    guest: &mut Guest<'_>,
    case: Case,
    runs: usize,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    for pass in 0..runs {
        let mut ways = Way::ALL;
        ways.rotate_left(pass % Way::ALL.len());
        for way in ways {
            let sample = guest.move_on(way, false).with_context(|| way.name())?;
            tell(case, way, pass + 1, runs, &sample);
            samples.entry((case, way)).or_default().push(sample);
        }
    }
    Ok(())
}

/// Moves a small guest with a disk by vmferry and by libvirt's TLS.
fn move_disks(lab: &Lab, size: &Size, samples: &mut Samples) -> anyhow::Result<()> {
    let disk = LocalDisk::create(lab, size.disk_mib)?;
    let options = "program=32 rest=10000".to_owned();
    let workload = Workload { name: "disks".to_owned(), mib: 128, options };
    let mut guest = Guest::start(lab, &workload, Some(disk.disk.clone()))?;
    for pass in 0..size.capped_runs {
        let mut ways = [Way::Tls, Way::Vmferry];
        ways.rotate_left(pass % 2);
        for way in ways {
            disk.empty(1 - guest.host)?;
            let sample = guest.move_on(way, true).with_context(|| way.name())?;
            disk.check()?;
            tell(Case::Disk, way, pass + 1, size.capped_runs, &sample);
            samples.entry((Case::Disk, way)).or_default().push(sample);
        }
    }
    guest.end();
    Ok(())
}

fn tell(case: Case, way: Way, pass: usize, runs: usize, sample: &Sample) {
    let Sample { total_ms, downtime_ms, libvirt_downtime_ms, wire_bytes, cpu_s } = sample;
    eprintln!(
        "libvirt: {}, {}, pass {pass} of {runs}: {total_ms:.0} ms, downtime {downtime_ms:.0} ms \
         (libvirt: {libvirt_downtime_ms:.0}), {:.0} MB, CPU {:.2} s + {:.2} s",
        case.name(),
        way.name(),
        wire_bytes / 1e6,
        cpu_s[0],
        cpu_s[1]
    );
}
