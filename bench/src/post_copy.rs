//! `post-copy`: guests that write faster than any link carries, moved by QEMU's own post-copy and
//! by vmferry's, between two network namespaces.
//!
//! Each guest runs on KVM and rewrites most of its memory at random, as fast as it can. It is
//! switched over after the first round. In one scene the guest is so large that it lacks tens of
//! thousands of pages then without a cap too: a mean of a few waits means nothing. QEMU uses its
//! pre-empt channel. All methods get the same guest, whose memory is a shared file, and no
//! compression, because the guest's pages would compress to almost nothing; one further row shows
//! vmferry's defaults. vmferry is the command, with a process on each host.
//!
//! The wait for a page begins when a handler has read the fault, and ends when the page is placed.
//! QEMU's waits are read from its trace events, which cost it a line of text for each page. The
//! downtime is the time from QEMU's event `STOP` at the source to `RESUME` at the destination, by
//! the host's clock; that of the microvm is the command's own figure. The guest's work is the
//! number of pages that it has checked and written within a window after the switchover.

mod attached;
mod command;
mod microvm;
mod native;
mod observed;
mod pair;
mod trace;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use vmferry_net_lab::{Direction, Namespaces};

use crate::aims::{Ratios, Target};
use crate::faults;
use crate::qemus::Lab;
use crate::results::{Results, Row, least, median, most, row};

use self::observed::Sample;
use self::pair::Pair;

/// The slow link's rate.
const SLOW_KBIT_PER_S: u32 = 350_000;

/// The downtime limit of both, which no round of these guests meets.
const DOWNTIME_LIMIT: Duration = Duration::from_millis(1);

/// How the guest is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Qemu,
    QemuTls,
    Attached,
    AttachedDefaults,
    Microvm,
}

impl Way {
    const ALL: [Self; 5] =
        [Self::Qemu, Self::QemuTls, Self::Attached, Self::AttachedDefaults, Self::Microvm];

    fn name(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU",
            Self::QemuTls => "QEMU, TLS",
            Self::Attached => "vmferry, TLS",
            Self::AttachedDefaults => "vmferry, TLS, compressed",
            Self::Microvm => "microvm, TLS",
        }
    }
}

/// The link and the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Scene {
    Uncapped,
    Capped,
    /// Without a cap, and with a guest that lacks many pages.
    Many,
}

impl Scene {
    const ALL: [Self; 3] = [Self::Uncapped, Self::Capped, Self::Many];

    fn name(self) -> &'static str {
        match self {
            Self::Uncapped => "uncapped",
            Self::Capped => "capped",
            Self::Many => "many_missing",
        }
    }

    fn ways(self) -> &'static [Way] {
        match self {
            Self::Uncapped | Self::Capped => &Way::ALL,
            Self::Many => &[Way::Qemu, Way::QemuTls, Way::Attached],
        }
    }
}

/// The size of the guest.
#[derive(Clone, Copy)]
struct Plan {
    mib: u64,
    hot_mib: u64,
    /// How long the guest's work is observed.
    window: Duration,
}

/// The size of the benchmark.
#[derive(Clone, Copy)]
struct Size {
    usual: Plan,
    many: Plan,
    repetitions: usize,
}

const WINDOW: Duration = Duration::from_secs(10);
const USUAL: Size = Size {
    usual: Plan { mib: 2048, hot_mib: 512, window: WINDOW },
    many: Plan { mib: 4096, hot_mib: 3072, window: WINDOW },
    repetitions: 3,
};
const SECOND: Duration = Duration::from_secs(1);
const QUICK: Size = Size {
    usual: Plan { mib: 128, hot_mib: 24, window: SECOND },
    many: Plan { mib: 192, hot_mib: 128, window: SECOND },
    repetitions: 1,
};

/// Runs the benchmark. `quick` moves a small guest once with each method.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let size = if quick { QUICK } else { USUAL };
    let lab = Lab::new()?;
    let namespaces = Namespaces::make()?;
    let mut samples: BTreeMap<(Scene, Way), Vec<Sample>> = BTreeMap::new();
    let mut floors_us = Vec::new();
    for pass in 1..=size.repetitions {
        for scene in Scene::ALL {
            if scene == Scene::Capped {
                namespaces.slow_down(Direction::Both, SLOW_KBIT_PER_S)?;
            }
            let plan = if scene == Scene::Many { size.many } else { size.usual };
            let mut ways = scene.ways().to_vec();
            ways.rotate_left((pass - 1) % scene.ways().len());
            for way in ways {
                let label = || format!("{}, {}", scene.name(), way.name());
                let sample = measure(&lab, &namespaces, way, plan).with_context(label)?;
                eprintln!(
                    "post-copy: pass {pass} of {}, {}: {} pages, mean wait {:.0} us",
                    size.repetitions,
                    label(),
                    sample.missing_pages,
                    sample.wait_mean_us,
                );
                samples.entry((scene, way)).or_default().push(sample);
            }
            if scene == Scene::Capped {
                namespaces.mend(Direction::Both)?;
            }
        }
        floors_us.push(faults::post_copy_floor_us(quick)?);
    }
    results(&samples, median(floors_us))
}

fn measure(lab: &Lab, namespaces: &Namespaces, way: Way, plan: Plan) -> anyhow::Result<Sample> {
    if way == Way::Microvm {
        return microvm::measure(lab, namespaces, plan);
    }
    let pair = Pair::start(lab, namespaces, plan)?;
    pair.observe(plan.window, |ends| match way {
        Way::Qemu => native::migrate(ends, false),
        Way::QemuTls => native::migrate(ends, true),
        _ => attached::migrate(lab, namespaces, ends, way == Way::AttachedDefaults),
    })
}

/// A row: one method on one link. All figures are medians over the runs, except where the name
/// says otherwise.
#[derive(Clone, Debug, Serialize)]
struct PostCopyRow {
    scene: &'static str,
    way: &'static str,
    missing_pages: f64,
    missing_pages_min: f64,
    waits: f64,
    wait_mean_us: f64,
    wait_mean_us_min: f64,
    wait_mean_us_max: f64,
    wait_p50_us: f64,
    wait_p99_us: f64,
    wait_max_us: f64,
    fetch_ms: f64,
    fetch_mb_per_s: f64,
    precopy_mb_per_s: Option<f64>,
    downtime_ms: f64,
    downtime_ms_min: f64,
    downtime_ms_max: f64,
    guest_work: Option<f64>,
    runs: usize,
}

fn row_of(scene: Scene, way: Way, samples: &[Sample]) -> PostCopyRow {
    let all = |part: fn(&Sample) -> f64| samples.iter().map(part);
    let mid = |part: fn(&Sample) -> f64| median(all(part));
    let known = |part: fn(&Sample) -> Option<f64>| {
        let values: Vec<f64> = samples.iter().filter_map(part).collect();
        (!values.is_empty()).then(|| median(values))
    };
    PostCopyRow {
        scene: scene.name(),
        way: way.name(),
        missing_pages: mid(|sample| sample.missing_pages),
        missing_pages_min: least(all(|sample| sample.missing_pages)),
        waits: mid(|sample| sample.waits),
        wait_mean_us: mid(|sample| sample.wait_mean_us),
        wait_mean_us_min: least(all(|sample| sample.wait_mean_us)),
        wait_mean_us_max: most(all(|sample| sample.wait_mean_us)),
        wait_p50_us: mid(|sample| sample.wait_p50_us),
        wait_p99_us: mid(|sample| sample.wait_p99_us),
        wait_max_us: most(all(|sample| sample.wait_max_us)),
        fetch_ms: mid(|sample| sample.fetch_ms),
        fetch_mb_per_s: mid(Sample::fetch_mb_per_s),
        precopy_mb_per_s: known(|sample| sample.precopy_mb_per_s),
        downtime_ms: mid(|sample| sample.downtime_ms),
        downtime_ms_min: least(all(|sample| sample.downtime_ms)),
        downtime_ms_max: most(all(|sample| sample.downtime_ms)),
        guest_work: known(|sample| sample.guest_work),
        runs: samples.len(),
    }
}

fn results(
    samples: &BTreeMap<(Scene, Way), Vec<Sample>>,
    floor_us: f64,
) -> anyhow::Result<Results> {
    let medians: BTreeMap<(Scene, Way), PostCopyRow> = samples
        .iter()
        .map(|(&(scene, way), samples)| ((scene, way), row_of(scene, way, samples)))
        .collect();
    let mut ratios = Ratios::default();
    for scene in Scene::ALL {
        compare(&mut ratios, &medians, scene, floor_us)?;
    }
    let rows = medians.values().map(row).collect::<anyhow::Result<Vec<Row>>>()?;
    let yardsticks = BTreeMap::from([
        ("post_copy_floor_p50_us".to_owned(), floor_us),
        ("slow_link_mb_per_s".to_owned(), f64::from(SLOW_KBIT_PER_S) / 8e3),
    ]);
    let mut results = Results::new("post-copy", rows, yardsticks, ratios.values);
    let aims = ratios.aims.iter().map(row).collect::<anyhow::Result<Vec<Row>>>()?;
    results.more.insert("aims", aims);
    Ok(results)
}

/// Compares vmferry with QEMU over TLS, both without compression.
fn compare(
    ratios: &mut Ratios,
    medians: &BTreeMap<(Scene, Way), PostCopyRow>,
    scene: Scene,
    floor_us: f64,
) -> anyhow::Result<()> {
    let of = |way: Way| {
        medians.get(&(scene, way)).with_context(|| format!("{} was not measured", way.name()))
    };
    let (ours, theirs, plain) = (of(Way::Attached)?, of(Way::QemuTls)?, of(Way::Qemu)?);
    // The large guest is not moved with it.
    let microvm = of(Way::Microvm).ok();
    let mut aim = |name: &str, value: f64, target: Target, meaning: &'static str| {
        ratios.aim(&format!("{name}_{}", scene.name()), value, target, meaning);
    };
    if scene == Scene::Many {
        let fewest = ours.missing_pages_min.min(theirs.missing_pages_min);
        let meaning = "the fewest missing pages of a run, vmferry's and QEMU's over TLS";
        aim("missing_pages", fewest, Target::AtLeast(50_000.0), meaning);
    }
    let half = Target::AtMost(0.5);
    let (mean, p99) = (ours.wait_mean_us, ours.wait_p99_us);
    aim("fault_mean_over_qemu", mean / theirs.wait_mean_us, half, "mean wait, both over TLS");
    aim("fault_p99_over_qemu", p99 / theirs.wait_p99_us, half, "p99 of the wait, both over TLS");
    let (meaning, plain_us) = ("mean wait, vmferry over TLS and QEMU without", plain.wait_mean_us);
    aim("fault_mean_over_plain_qemu", mean / plain_us, half, meaning);
    // The slow link alone takes longer than the floor.
    if scene == Scene::Uncapped {
        let over_floor = ours.wait_p50_us / floor_us;
        let floor = "median wait over userfaultfd and a page over raw rustls on loopback";
        aim("fault_p50_over_floor", over_floor, Target::AtMost(3.0), floor);
    }
    for (name, row) in
        std::iter::once(("drain", ours)).chain(microvm.map(|row| ("drain_microvm", row)))
    {
        let precopy = row.precopy_mb_per_s.unwrap_or(f64::NAN);
        let ratio = row.fetch_mb_per_s / precopy;
        let meaning = "fetched bytes per second over those of the first round";
        let name = format!("{name}_over_precopy_throughput");
        aim(&name, ratio, Target::AtLeast(0.8), meaning);
    }
    let work = |row: &PostCopyRow| row.guest_work.unwrap_or(f64::NAN);
    let meaning = "pages that the guest worked on after the switchover, both over TLS";
    aim("guest_work_over_qemu", work(ours) / work(theirs), Target::AtLeast(1.5), meaning);
    let ms = Target::AtMost(20.0);
    aim("downtime_hot_ms", ours.downtime_ms, ms, "downtime in milliseconds");
    if let Some(microvm) = microvm {
        aim("downtime_hot_microvm_ms", microvm.downtime_ms, ms, "downtime in milliseconds");
    }
    let downtime = ours.downtime_ms / theirs.downtime_ms;
    aim("downtime_hot_over_qemu", downtime, half, "downtime, both over TLS");
    Ok(())
}
