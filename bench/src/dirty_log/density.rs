//! A single slot, from clean to fully dirty.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};

use super::samples::Samples;
use super::subject::Subject;
use super::{KIB_32, guest_logs, software_logs};
use crate::bitmap::pattern::{Pattern, bitmap};
use crate::results::{Row, row};

/// Number of harvests of a guest's log at a density. The guest needs seconds to write the large
/// slot.
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

/// Number of harvests of a software log.
const SOFTWARE_REPETITIONS: usize = 25;

/// Samples by slot name with density, and by log.
type SamplesByCase = BTreeMap<(String, &'static str), Samples>;

/// Measures a single slot at each density.
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
    let mut by_case = SamplesByCase::new();
    for pattern in PATTERNS {
        // All lengths run interleaved, so that only the slot's length differs.
        let mut runs: Vec<Run> = Vec::new();
        for &(name, bytes) in slots {
            let repetitions = if quick { 1 } else { SOFTWARE_REPETITIONS };
            runs.extend(
                software_logs(&[bytes])
                    .into_iter()
                    .map(|s| Run::new(s, name, pattern, repetitions)),
            );
        }
        harvest(&mut runs, &mut rows, &mut by_case)?;
    }
    for &(name, bytes) in slots {
        let mut subjects = guest_logs(&[bytes])?;
        for pattern in PATTERNS {
            let repetitions = repetitions(pattern, bytes > KIB_32, quick);
            let mut runs: Vec<Run> = subjects
                .drain(..)
                .map(|subject| Run::new(subject, name, pattern, repetitions))
                .collect();
            harvest(&mut runs, &mut rows, &mut by_case)?;
            subjects.extend(runs.into_iter().map(|run| run.subject));
            eprintln!("dirty-log: density of {name}, {:.0} %, done", pattern.percent());
        }
    }
    add_ratios(ratios, &by_case)?;
    Ok(rows)
}

/// A log that is measured at one density.
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

/// Harvests the logs in turn. The first harvest of each log warms up and is not counted, unless it
/// is the only one.
fn harvest(
    runs: &mut [Run],
    rows: &mut Vec<Row>,
    by_case: &mut SamplesByCase,
) -> anyhow::Result<()> {
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
                "{} found {} of {} pages",
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
        by_case.insert((format!("{} {}", run.name, run.dirty), log), samples);
    }
    Ok(())
}

/// Adds the ratios. The whole harvest is compared with `vm-memory`'s, and the call alone with the
/// published calls. The dirty pages are in runs, as a writing loop leaves them, unless the name
/// says `scattered`.
fn add_ratios(ratios: &mut BTreeMap<String, f64>, samples: &SamplesByCase) -> anyhow::Result<()> {
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
