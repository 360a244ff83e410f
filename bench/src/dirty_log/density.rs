//! One slot alone, from clean to wholly dirty.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};

use super::samples::Samples;
use super::subject::Subject;
use super::{KIB_32, guests, marked};
use crate::bitmap::pattern::{Pattern, bitmap};
use crate::results::{Row, row};

/// How often a guest's log is harvested at a density: writing it takes a guest seconds.
fn repetitions(pattern: Pattern, large: bool, quick: bool) -> usize {
    match pattern {
        _ if quick => 1,
        _ if !large => 15,
        Pattern::Clean => 7,
        Pattern::Full => 1,
        _ if pattern.percent() > 5.0 => 2,
        _ => 5,
    }
}

/// So many harvests of a marked log.
const MARKED_REPETITIONS: usize = 25;

/// Samples by the slot's name and density, and the log.
type Kept = BTreeMap<(String, &'static str), Samples>;

/// One slot alone, at each density.
pub fn measure(
    slots: &[(&str, u64)],
    quick: bool,
    ratios: &mut BTreeMap<String, f64>,
) -> anyhow::Result<Vec<Row>> {
    const PATTERNS: [Pattern; 6] = [
        Pattern::Clean,
        Pattern::Clustered(0.01),
        Pattern::Scattered(0.01),
        Pattern::Clustered(0.1),
        Pattern::Scattered(0.1),
        Pattern::Full,
    ];
    let mut rows = Vec::new();
    let mut kept = Kept::new();
    for pattern in PATTERNS {
        // All lengths together, so that a slot's length is all that differs.
        let mut runs: Vec<Run> = Vec::new();
        for &(name, bytes) in slots {
            let repetitions = if quick { 1 } else { MARKED_REPETITIONS };
            runs.extend(
                marked(&[bytes]).into_iter().map(|s| Run::new(s, name, pattern, repetitions)),
            );
        }
        harvest(&mut runs, &mut rows, &mut kept)?;
    }
    for &(name, bytes) in slots {
        let mut subjects = guests(&[bytes])?;
        for pattern in PATTERNS {
            let repetitions = repetitions(pattern, bytes > KIB_32, quick);
            let mut runs: Vec<Run> = subjects
                .drain(..)
                .map(|subject| Run::new(subject, name, pattern, repetitions))
                .collect();
            harvest(&mut runs, &mut rows, &mut kept)?;
            subjects.extend(runs.into_iter().map(|run| run.subject));
            eprintln!("dirty-log: density of {name}, {:.0} %, done", pattern.percent());
        }
    }
    add_ratios(ratios, &kept)?;
    Ok(rows)
}

/// A log at one density.
struct Run {
    subject: Box<dyn Subject>,
    name: String,
    pages: Vec<u64>,
    dirty: String,
    repetitions: usize,
    samples: Samples,
}

impl Run {
    fn new(subject: Box<dyn Subject>, name: &str, pattern: Pattern, repetitions: usize) -> Self {
        let dirty = format!("{:.0} % {}", pattern.percent(), pattern.name()).trim_end().to_owned();
        let pages = bitmap(subject.units()[0].bytes / 4096, pattern, 1);
        let pages = pages.runs().flat_map(|(first, count)| first..first + count).collect();
        Self { subject, name: name.into(), pages, dirty, repetitions, samples: Samples::default() }
    }
}

/// Interleaved: one harvest of each, then the next of each. The first one of each warms up and does not
/// count, unless it is the only one.
fn harvest(runs: &mut [Run], rows: &mut Vec<Row>, kept: &mut Kept) -> anyhow::Result<()> {
    runs.iter_mut().try_for_each(|run| run.subject.start())?;
    let passes = runs.iter().map(|run| run.repetitions).max().unwrap_or(0) + 1;
    for pass in 0..passes {
        for run in &mut *runs {
            let warm_up = usize::from(run.repetitions > 1);
            if pass >= run.repetitions + warm_up {
                continue;
            }
            run.subject.write(0, &run.pages)?;
            let sample = run.subject.harvest(0)?;
            ensure!(
                sample.pages >= run.pages.len() as u64,
                "{} has found {} of {} pages",
                run.subject.name(),
                sample.pages,
                run.pages.len()
            );
            if pass >= warm_up {
                run.samples.0.push(sample);
            }
        }
    }
    for run in runs {
        run.subject.stop()?;
        let log = run.subject.name();
        rows.push(row(&run.samples.row("density", &run.subject.units()[0], &run.dirty, log))?);
        let samples = std::mem::take(&mut run.samples);
        kept.insert((format!("{} {}", run.name, run.dirty), log), samples);
    }
    Ok(())
}

/// A harvest is compared whole where `vm-memory`'s is, and the published call alone where the published
/// ones are. Where nothing is said of how the dirty pages lie they lie in runs, as a loop that writes leaves
/// them.
fn add_ratios(ratios: &mut BTreeMap<String, f64>, samples: &Kept) -> anyhow::Result<()> {
    let of = |case: &str, log: &'static str| {
        samples.get(&(case.to_owned(), log)).with_context(|| format!("no `{case}` of {log}"))
    };
    let call = |case: &str, log| of(case, log).map(Samples::call);
    let whole = |case: &str, log| of(case, log).map(Samples::whole);
    let (clean, one, scattered) = ("4g 0 %", "4g 1 % clustered", "4g 1 % scattered");
    let org = |case| Ok::<_, anyhow::Error>(call(case, "get.org")? / call(case, "switch")?);
    let opt = |case| Ok::<_, anyhow::Error>(call(case, "get.opt")? / call(case, "switch")?);
    let atomic =
        |case| Ok::<_, anyhow::Error>(whole(case, "AtomicBitmap")? / whole(case, "switch")?);
    for (name, ratio) in [
        ("get_org_over_switch_clean_4g", org(clean)?),
        ("get_opt_over_switch_1pct_4g", opt(one)?),
        ("atomic_bitmap_over_switch_clean_4g", atomic(clean)?),
        ("atomic_bitmap_over_switch_1pct_4g", atomic(one)?),
        ("atomic_bitmap_over_switch_1pct_scattered_4g", atomic(scattered)?),
    ] {
        ratios.insert(name.to_owned(), ratio);
    }
    Ok(())
}
