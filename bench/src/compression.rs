//! `compression`: guest pages per second with each compression method, by content and link.
//!
//! The published old method is included: one migration thread that allocates a context for each
//! page.
//!
//! In the published test, eight threads rewrote a guest of 6 GB repeatedly, over a link capped at
//! 350. The unit was not given, so both 350 Mbit/s and 350 MB/s are measured, and no cap. The guest
//! is this process's own memory; `--full` gives it 6 GiB. The methods take turns, and each gets a
//! window of time. The guest's threads run at the lowest priority. A harvest waits until they have
//! rewritten everything, and the wait is not counted: see [`guest::RewrittenLog`].

mod allocations;
pub mod content;
mod converge;
mod guest;
mod hot;
mod plots;
mod ratios;
mod rows;
mod run;
mod system;
mod way;
mod window;
mod yardsticks;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use vmferry_memory::{GuestMemory, PageRun, SlotId};

use crate::guest::memory;
use crate::results::{Results, row};
use content::{Content, Pool, pools};
use ratios::Measured;
use way::Way;
use window::{Hosts, Sample, Window, measure};

/// The size of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Shows that the benchmark works.
    Quick,
    /// Takes some minutes.
    Usual,
    /// Uses the memory size of the published test, and longer windows.
    Full,
}

/// The cap on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// 350 Mbit/s.
    Mbit350,
    /// 350 MB/s.
    Mb350,
    /// Loopback without a cap.
    Uncapped,
}

impl Link {
    /// The name in tables and in ratio names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mbit350 => "350mbit",
            Self::Mb350 => "350mb",
            Self::Uncapped => "uncapped",
        }
    }

    /// The cap in bytes per second.
    pub fn cap(self) -> Option<u64> {
        match self {
            Self::Mbit350 => Some(350_000_000 / 8),
            Self::Mb350 => Some(350_000_000),
            Self::Uncapped => None,
        }
    }
}

/// A measured case: content, link and method.
pub type Key = (Content, Link, Way);

/// The cases and sizes to measure.
struct Plan {
    pages: u64,
    pool_bytes: usize,
    contents: &'static [Content],
    links: &'static [Link],
    /// The window for every capped case and for the uncapped ones. An uncapped round is short, so
    /// its window must be long enough to see more than the one-time costs of the first and second
    /// rounds.
    capped: Window,
    uncapped: Window,
    /// The window for the published comparison: program pages at 350 Mbit/s and without a cap.
    published: Window,
    repetitions: usize,
    /// The number of hot pages, and the cap on the link in bytes per second.
    hot: (u64, u64),
    converge: converge::Case,
}

impl Plan {
    fn new(size: Size) -> Self {
        let window = |warm_up, length| Window {
            warm_up: Duration::from_millis(warm_up),
            length: Duration::from_millis(length),
        };
        let converge = converge::Case {
            hot_pages: (64 << 20) / 4096,
            cold_pages: (16 << 20) / 4096,
            cap: 350_000_000 / 8,
            max_rounds: 6,
        };
        let usual = Self {
            pages: (512 << 20) / 4096,
            pool_bytes: 64 << 20,
            contents: &Content::ALL,
            links: &[Link::Mbit350, Link::Mb350, Link::Uncapped],
            capped: window(200, 350),
            uncapped: window(350, 650),
            published: window(400, 1200),
            repetitions: 3,
            hot: ((16 << 20) / 4096, 350_000_000 / 8),
            converge,
        };
        match size {
            Size::Usual => usual,
            Size::Full => Self {
                pages: (6 << 30) / 4096,
                pool_bytes: 256 << 20,
                capped: window(1000, 10_000),
                uncapped: window(1000, 10_000),
                published: window(1000, 10_000),
                ..usual
            },
            Size::Quick => Self {
                pages: (64 << 20) / 4096,
                pool_bytes: 4 << 20,
                contents: &[Content::Program, Content::ZeroHeavy],
                links: &[Link::Mbit350, Link::Uncapped],
                capped: window(50, 100),
                uncapped: window(50, 100),
                published: window(50, 100),
                repetitions: 1,
                hot: ((1 << 20) / 4096, 4_000_000),
                converge: converge::Case {
                    hot_pages: (2 << 20) / 4096,
                    cold_pages: 64,
                    cap: 3_000_000,
                    max_rounds: 3,
                },
            },
        }
    }

    /// The methods for a case, and the window for each.
    fn ways(&self, content: Content, link: Link) -> (&'static [Way], Window) {
        if content == Content::Program && link != Link::Mb350 {
            (&Way::PUBLISHED, self.published)
        } else {
            (&Way::GRID, if link == Link::Uncapped { self.uncapped } else { self.capped })
        }
    }
}

/// Runs the benchmark.
///
/// # Errors
/// A case could not be measured. No case is skipped.
pub fn run(size: Size) -> anyhow::Result<Results> {
    ensure!(allocations::SUPPORTED, "allocations can be counted only with glibc");
    let plan = Plan::new(size);
    let directory = tempfile::tempdir()?;
    let pools = pools(plan.contents, plan.pool_bytes)?;
    let mut codecs = Vec::new();
    for (content, pool) in &pools {
        codecs.extend(yardsticks::codecs(*content, pool, plan.pool_bytes.min(16 << 20))?);
    }
    eprintln!("compression: codecs done");
    let hot = hot::measure(plan.hot.0, plan.hot.1, directory.path())?;
    eprintln!("compression: hot pages done");
    let converge = converge::measure(plan.converge, directory.path())?;
    eprintln!("compression: convergence done");
    let (samples, copy_mb_per_s) = grid(&plan, pools, directory.path())?;

    let cells = rows::cells(&samples, |content, link| plan.ways(content, link).1);
    let measured =
        Measured { cells: &cells, codecs: &codecs, hot: &hot, plan: (plan.contents, plan.links) };
    let ratios = measured.ratios()?;
    let mut yardsticks = BTreeMap::from([("memory_copy_mb_per_s".to_owned(), copy_mb_per_s)]);
    for content in plan.contents {
        let best = yardsticks::best_ratio(&codecs, *content);
        yardsticks.insert(format!("best_ratio_{}", content.key()), best);
    }
    let table = |rows: Vec<_>| rows.into_iter().collect::<anyhow::Result<Vec<_>>>();
    let mut results = Results::new(
        "compression",
        table(cells.values().map(row).collect())?,
        yardsticks,
        ratios.values,
    );
    results.more = BTreeMap::from([
        ("aims", table(ratios.aims.iter().map(row).collect())?),
        ("codecs", table(codecs.iter().map(row).collect())?),
        ("converge", table(converge.iter().map(row).collect())?),
        ("hot", table(hot.iter().map(row).collect())?),
        ("profile", table(cells.values().map(|cell| row(&cell.profile)).collect())?),
    ]);
    results.plots = plots::plots(&results.rows, plan.contents);
    Ok(results)
}

type Samples = BTreeMap<Key, Vec<Sample>>;

/// Measures every case in turn. Also returns the throughput of one copy of the guest's memory.
fn grid(
    plan: &Plan,
    pools: Vec<(Content, Pool)>,
    directory: &Path,
) -> anyhow::Result<(Samples, f64)> {
    let (here, there) = (memory(plan.pages)?, memory(plan.pages)?);
    let copy_mb_per_s = copy_bandwidth(&here, &there)?;
    let pools: Vec<(Content, Arc<Pool>)> =
        pools.into_iter().map(|(content, pool)| (content, Arc::new(pool))).collect();
    let mut samples = Samples::new();
    for repetition in 1..=plan.repetitions {
        for (content, pool) in &pools {
            guest::fill(&here, pool)?;
            let writers = guest::Writers::start(&here, pool)?;
            let hosts = Hosts { here: &here, there: &there, writers: &writers, directory };
            for link in plan.links {
                let (ways, window) = plan.ways(*content, *link);
                for way in ways {
                    let sample = measure(&hosts, *way, link.cap(), window).with_context(|| {
                        format!("{}, {}, {}", content.name(), link.name(), way.name())
                    })?;
                    samples.entry((*content, *link, *way)).or_default().push(sample);
                }
            }
            let of = plan.repetitions;
            eprintln!("compression: pass {repetition} of {of}, {} done", content.name());
        }
    }
    Ok((samples, copy_mb_per_s))
}

fn copy_bandwidth(here: &GuestMemory, there: &GuestMemory) -> anyhow::Result<f64> {
    // Copying more than 512 MiB does not change the result.
    let pages = here.total_pages().min((512 << 20) / 4096);
    crate::engine::copy_bandwidth(here, there, PageRun { slot: SlotId(0), first: 0, pages })
}
