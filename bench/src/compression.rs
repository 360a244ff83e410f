//! `compression`: guest pages per second with each way to compress, by content and link, beside the published
//! old way (a context allocated for each page, in the one thread that migrates).
//!
//! The guest of the published test had 6 GB that eight threads rewrote again and again, over a link capped at
//! 350: here that is 350 Mbit/s and 350 MB/s, and no cap. The guest is this process's own memory, which
//! `--full` makes as large; each way is given a window of time, by turns. Its threads run at the lowest priority,
//! and a harvest waits, outside of the time that is measured, until they have rewritten everything: see
//! [`guest::RewrittenLog`].

mod allocations;
mod content;
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
use window::{Hosts, Sample, Window, look};

/// How much of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// To see that it works.
    Quick,
    /// Some minutes.
    Usual,
    /// With memory and windows as published.
    Full,
}

/// A cap on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// 350 Mbit/s.
    Mbit350,
    /// 350 MB/s.
    Mb350,
    /// Loopback, as it is.
    Uncapped,
}

impl Link {
    /// In tables, and in the names of ratios.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mbit350 => "350mbit",
            Self::Mb350 => "350mb",
            Self::Uncapped => "uncapped",
        }
    }

    /// In bytes per second.
    pub fn cap(self) -> Option<u64> {
        match self {
            Self::Mbit350 => Some(350_000_000 / 8),
            Self::Mb350 => Some(350_000_000),
            Self::Uncapped => None,
        }
    }
}

/// Content, link and way.
pub type Key = (Content, Link, Way);

/// What is measured.
struct Plan {
    pages: u64,
    pool_bytes: usize,
    contents: &'static [Content],
    links: &'static [Link],
    /// For every case under a cap, and for those without, where a round is over soon: what the first and
    /// the second one cost once should not be all that is seen.
    capped: Window,
    uncapped: Window,
    /// For the published comparison: program-like pages at 350 Mbit/s and without a cap.
    published: Window,
    repetitions: usize,
    /// Pages that change a little, and the cap on the link in bytes per second.
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

    /// The ways of a case, and for how long each.
    fn ways(&self, content: Content, link: Link) -> (&'static [Way], Window) {
        if content == Content::Program && link != Link::Mb350 {
            (&Way::PUBLISHED, self.published)
        } else {
            (&Way::GRID, if link == Link::Uncapped { self.uncapped } else { self.capped })
        }
    }
}

/// Runs it.
///
/// # Errors
/// A case that could not be measured: none is left out.
pub fn run(size: Size) -> anyhow::Result<Results> {
    ensure!(allocations::SEEN, "allocations can't be counted with this C library");
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
    eprintln!("compression: the guest that changes a little done");
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

/// Every case, by turns; and what copying the guest's memory once yields.
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
                    let sample = look(&hosts, *way, link.cap(), window).with_context(|| {
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
    // More tells no more.
    let pages = here.total_pages().min((512 << 20) / 4096);
    crate::engine::copy_bandwidth(here, there, PageRun { slot: SlotId(0), first: 0, pages })
}
