//! `transport`: a guest's memory over each transport, next to the published comparison of plain
//! TCP, TLS and two kinds of RPC, and next to a copy over a raw socket and raw rustls.
//!
//! The guest is idle and has 3 GiB of incompressible memory. Source and destination are separate
//! processes, so their CPU times are separate. They keep their memory for all runs: it is
//! populated, the destination's memory is zeroed before each run, and the received content is
//! compared afterwards. Nothing is compressed. The methods take turns, over loopback and between
//! two network namespaces, with 1, 2 and 4 channels, with the published cap and without.
//! `docs/transports.md` explains the numbers.

mod attack;
mod attacker;
mod case;
pub mod certificates;
mod hosts;
mod idle;
mod orders;
mod published;
mod ratios;
mod rows;
mod run;
mod side;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use clap::ValueEnum;
use serde::Serialize;
use vmferry_memory::PAGE_SIZE;

use crate::results::{Results, Row, row};
use case::{Case, Link, Place, Way};
use run::{Bench, Run};

/// The command's default. Ratios without a number in the name are for it.
const DEFAULT_CHANNELS: u8 = 2;

/// The role of a benchmark process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Runs the source.
    Source,
    /// Runs the destination.
    Destination,
    /// Attacks the destination.
    Attacker,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Attacker => "attacker",
        })
    }
}

/// Runs a process of the benchmark until its standard input ends.
///
/// # Errors
/// The process cannot work. Errors of a run are sent as replies.
pub fn run_role(role: Role, directory: &Path) -> anyhow::Result<()> {
    side::run(role, directory)
}

/// The cases and sizes to measure.
pub struct Plan {
    pages: u64,
    /// The cap of the capped cases, in bytes per second.
    cap: u64,
    channels: &'static [u8],
    /// Repetitions without a cap, with the default number of channels.
    uncapped: usize,
    /// Repetitions without a cap, with other numbers of channels.
    uncapped_others: usize,
    /// Repetitions with a cap, with the default number of channels. Each takes 9 s.
    capped: usize,
    /// Repetitions with a cap, with other numbers of channels, which make little difference there.
    capped_others: usize,
    /// Whether to run the uncapped cases once without counting them.
    warm_up: bool,
    /// The links on which an attack is measured, and the repetitions.
    attack: &'static [(Link, usize)],
    idle_connections: usize,
}

impl Plan {
    fn new(quick: bool) -> Self {
        let usual = Self {
            pages: (3 << 30) / PAGE_SIZE as u64,
            cap: 350_000_000,
            channels: &[1, DEFAULT_CHANNELS, 4],
            uncapped: 5,
            uncapped_others: 3,
            capped: 3,
            capped_others: 1,
            warm_up: true,
            attack: &[(Link::Capped, 3), (Link::Uncapped, 5)],
            idle_connections: 1000,
        };
        if !quick {
            return usual;
        }
        Self {
            pages: (32 << 20) / PAGE_SIZE as u64,
            cap: 100_000_000,
            channels: &[DEFAULT_CHANNELS],
            uncapped: 1,
            capped: 1,
            warm_up: false,
            // Without a cap, the migration would end before the attack has begun.
            attack: &[(Link::Capped, 1)],
            idle_connections: 100,
            ..usual
        }
    }

    /// Repetitions of a case. The yardsticks do not support a cap, and a Unix socket stays on one
    /// host.
    fn runs(&self, case: Case) -> usize {
        match (case.way, case.link) {
            (Way::RawSocket | Way::RawRustls | Way::Unix, Link::Capped) => 0,
            (Way::Unix, _) if case.place == Place::Namespaces => 0,
            (_, Link::Uncapped) if case.channels == DEFAULT_CHANNELS => self.uncapped,
            (_, Link::Uncapped) => self.uncapped_others,
            (_, Link::Capped) if case.channels == DEFAULT_CHANNELS => self.capped,
            (_, Link::Capped) => self.capped_others,
        }
    }

    /// All cases with these places and methods, in the order in which they run.
    fn cases(&self, places: &[Place], ways: &[Way]) -> Vec<Case> {
        let mut cases = Vec::new();
        for place in places.iter().copied() {
            for channels in self.channels.iter().copied() {
                for link in [Link::Uncapped, Link::Capped] {
                    cases.extend(ways.iter().map(|way| Case { place, link, channels, way: *way }));
                }
            }
        }
        cases.retain(|case| self.runs(*case) > 0);
        cases
    }

    fn cap_of(&self, link: Link) -> Option<u64> {
        (link == Link::Capped).then_some(self.cap)
    }

    /// Bytes of the guest's memory.
    fn bytes(&self) -> f64 {
        self.pages as f64 * PAGE_SIZE as f64
    }
}

/// Runs the benchmark. `quick` moves 32 MiB once with each method, with 2 channels only.
///
/// # Errors
/// A case could not be measured. Only transports that were not compiled in, and namespaces that the
/// process may not create, are skipped, with a message.
pub fn run(quick: bool) -> anyhow::Result<Results> {
    let plan = Plan::new(quick);
    let mut bench = Bench::start(plan.pages)?;
    let (places, ways) = (bench.places(), bench.ways()?);
    let samples = grid(&plan, &mut bench, &places, &ways)?;
    let attacked = attack::measure(&plan, &mut bench, places[0])?;
    drop(bench);

    let cells = rows::cells(&samples, plan.bytes());
    let mut ratios = ratios::ratios(&cells, &places, plan.channels)?;
    attack::add_ratios(&attacked, &mut ratios)?;
    let rows = table(cells.values())?;
    let yardsticks = rows::yardsticks(&cells, plan.cap);
    let mut results = Results::new("transport", rows, yardsticks, ratios.values);
    results.more = BTreeMap::from([
        ("aims", table(&ratios.aims)?),
        ("published", table(published::compare(&cells, places[0]))?),
        ("under_attack", table(&attacked)?),
    ]);
    Ok(results)
}

fn table<T: Serialize>(rows: impl IntoIterator<Item = T>) -> anyhow::Result<Vec<Row>> {
    rows.into_iter().map(|fields| row(&fields)).collect()
}

type Samples = BTreeMap<Case, Vec<Run>>;

/// Measures every case in turn.
fn grid(plan: &Plan, bench: &mut Bench, places: &[Place], ways: &[Way]) -> anyhow::Result<Samples> {
    let cases = plan.cases(places, ways);
    if plan.warm_up {
        let is_warm_up =
            |case: &&Case| case.link == Link::Uncapped && case.channels == DEFAULT_CHANNELS;
        for case in cases.iter().filter(is_warm_up) {
            bench.run(*case, None, 0)?;
        }
        eprintln!("transport: warmed up");
    }
    let passes = cases.iter().map(|case| plan.runs(*case)).max().unwrap_or(0);
    let mut samples = Samples::new();
    for pass in 1..=passes {
        for case in cases.iter().filter(|case| plan.runs(**case) >= pass) {
            let run = bench.run(*case, plan.cap_of(case.link), 0)?;
            let seconds = run.total_s;
            eprintln!("transport: pass {pass} of {passes}: {case}: {seconds:.2} s");
            samples.entry(*case).or_default().push(run);
        }
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_covers_every_possible_case() {
        let plan = Plan::new(false);
        let both = [Place::Namespaces, Place::Loopback];
        let cases = plan.cases(&both, &Way::ALL);
        let count =
            |wanted: &dyn Fn(&Case) -> bool| cases.iter().filter(|case| wanted(case)).count();
        assert_eq!(count(&|case| case.way == Way::Unix), 3, "over loopback, without a cap");
        assert_eq!(count(&|case| case.way == Way::RawRustls), 6, "without a cap");
        for way in [Way::Plain, Way::Tls, Way::GrpcAcknowledged, Way::GrpcStreamed] {
            assert_eq!(count(&|case| case.way == way), 12, "{way:?}");
        }
    }
}
