//! `place`: the ways to put pages into an empty memory file. This limits the first round at a
//! destination.
//!
//! Compared are page faults by stores, `pwrite`, populating run by run or everything ahead, and
//! huge pages. One and two threads each have their own stripes and place runs of 256 KiB, as in
//! frames.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, ensure};
use serde::Serialize;
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout, whole_hash};
use vmferry_qemu_lab::{HugePages, Mounted, World};

use crate::results::{Results, least, median, most, row};

/// Pages per run.
const RUN_PAGES: u64 = 64;

/// Pages per stripe. Stripes alternate between the threads, as they do between lanes.
const STRIPE_PAGES: u64 = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Store,
    Pwrite,
    PopulateRun,
    PopulateAhead,
    StoreHuge,
    PopulateRunHuge,
}

impl Way {
    const ALL: [Self; 6] = [
        Self::Store,
        Self::Pwrite,
        Self::PopulateRun,
        Self::PopulateAhead,
        Self::StoreHuge,
        Self::PopulateRunHuge,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Store => "store, a fault at each page",
            Self::Pwrite => "pwrite",
            Self::PopulateRun => "populate each run, store (vmferry)",
            Self::PopulateAhead => "populate all ahead, store",
            Self::StoreHuge => "store, transparent huge pages",
            Self::PopulateRunHuge => "populate each run, store (vmferry), huge pages",
        }
    }

    fn is_huge(self) -> bool {
        matches!(self, Self::StoreHuge | Self::PopulateRunHuge)
    }
}

#[derive(Serialize)]
struct PlaceRow {
    way: &'static str,
    threads: u64,
    total_ms: f64,
    total_ms_min: f64,
    total_ms_max: f64,
    mb_per_s: f64,
    cpu_s: f64,
    runs: usize,
}

/// Runs the benchmark. `quick` places 32 MiB once; otherwise 1 GiB is placed five times.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let (mib, repetitions) = if quick { (32, 1) } else { (1024, 5) };
    let pages = mib << 8;
    let world = World::new();
    let huge = world.path("huge");
    let mounted = Mounted::new(&huge, HugePages::Transparent, mib + 64);
    if let Err(error) = &mounted {
        eprintln!("place: huge pages are not available: {error}");
    }
    let small = world.path_on_tmpfs("");
    let mut samples: BTreeMap<(Way, u64), Vec<Sample>> = BTreeMap::new();
    for pass in 1..=repetitions {
        for way in Way::ALL.into_iter().filter(|way| mounted.is_ok() || !way.is_huge()) {
            for threads in [1, 2] {
                let directory = if way.is_huge() { &huge } else { &small };
                let sample = place(directory, way, pages, threads)
                    .with_context(|| format!("{} by {threads} threads", way.name()))?;
                samples.entry((way, threads)).or_default().push(sample);
            }
        }
        eprintln!("place: pass {pass} of {repetitions}");
    }
    let mut rows = Vec::new();
    let mut medians = BTreeMap::new();
    for ((way, threads), samples) in &samples {
        let total_s = median(samples.iter().map(|sample| sample.total_s));
        medians.insert((*way, *threads), total_s);
        rows.push(row(&PlaceRow {
            way: way.name(),
            threads: *threads,
            total_ms: total_s * 1e3,
            total_ms_min: least(samples.iter().map(|sample| sample.total_s)) * 1e3,
            total_ms_max: most(samples.iter().map(|sample| sample.total_s)) * 1e3,
            mb_per_s: pages as f64 * PAGE_SIZE as f64 / total_s / 1e6,
            cpu_s: median(samples.iter().map(|sample| sample.cpu_s)),
            runs: samples.len(),
        })?);
    }
    let mut ratios = BTreeMap::new();
    for threads in [1, 2] {
        let of = |way| medians.get(&(way, threads)).copied();
        let Some(ours) = of(Way::PopulateRun) else { continue };
        for (name, way) in
            [("store", Way::Store), ("pwrite", Way::Pwrite), ("populate_ahead", Way::PopulateAhead)]
        {
            if let Some(theirs) = of(way) {
                ratios.insert(format!("vmferry_of_{name}_{threads}_threads"), ours / theirs);
            }
        }
    }
    let yardsticks = BTreeMap::new();
    Ok(Results::new("place", rows, yardsticks, ratios))
}

/// The cost of one run.
struct Sample {
    total_s: f64,
    cpu_s: f64,
}

/// Fills a new file with this method.
fn place(directory: &Path, way: Way, pages: u64, threads: u64) -> anyhow::Result<Sample> {
    warm_up(pages)?;
    let path = directory.join("placed");
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    // The file disappears with its last user, even after an error.
    std::fs::remove_file(&path)?;
    file.set_len(pages * PAGE_SIZE as u64)?;
    let layout = SlotLayout { slot: SlotId(0), gpa: 0, pages };
    let memory = GuestMemory::map_files(vec![(layout, file.try_clone()?, 0)])?;
    let content = vec![7; RUN_PAGES as usize * PAGE_SIZE];
    let cpu_before = crate::machine::process_cpu_s();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (memory, file, content) = (&memory, &file, &content);
                scope.spawn(move || fill(way, memory, file, content, pages, (thread, threads)))
            })
            .collect();
        workers.into_iter().try_for_each(|worker| {
            worker.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })
    })?;
    let total_s = begun.elapsed().as_secs_f64();
    let sample = Sample { total_s, cpu_s: crate::machine::process_cpu_s() - cpu_before };
    let found = whole_hash(&memory)?;
    ensure!(found.pages == pages, "only {} of {pages} pages were placed", found.pages);
    Ok(sample)
}

/// Fills one thread's stripes.
fn fill(
    way: Way,
    memory: &GuestMemory,
    file: &File,
    content: &[u8],
    pages: u64,
    (thread, threads): (u64, u64),
) -> anyhow::Result<()> {
    let slot = SlotId(0);
    let stripes = (thread * STRIPE_PAGES..pages).step_by((threads * STRIPE_PAGES) as usize);
    if way == Way::PopulateAhead {
        for first in stripes.clone() {
            memory.populate(PageRun { slot, first, pages: STRIPE_PAGES.min(pages - first) })?;
        }
    }
    for stripe in stripes {
        for first in (stripe..(stripe + STRIPE_PAGES).min(pages)).step_by(RUN_PAGES as usize) {
            let run = PageRun { slot, first, pages: RUN_PAGES };
            match way {
                Way::Store | Way::StoreHuge | Way::PopulateAhead => memory.copy_in(run, content)?,
                Way::PopulateRun | Way::PopulateRunHuge => memory.copy_in_new(run, content)?,
                Way::Pwrite => file.write_all_at(content, first * PAGE_SIZE as u64)?,
            }
        }
    }
    Ok(())
}

/// Allocates memory once and frees it. A virtual machine returns memory that was free for long to
/// its host, and getting it back is slow.
pub fn warm_up(pages: u64) -> anyhow::Result<()> {
    let pages = pages * 2;
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Thp)?;
    memory.populate(PageRun { slot: SlotId(0), first: 0, pages })?;
    Ok(())
}
