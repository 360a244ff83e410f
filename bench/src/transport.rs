//! `transport`: a guest's memory over each transport, beside the published comparison of plain, TLS and two kinds of
//! RPC, and beside a copy over a bare socket and over bare rustls.
//!
//! The guest has 3 GiB, all of it incompressible, and stands still. Source and destination are processes of their
//! own, so that CPU time is theirs, and keep their memory over all runs: it is populated, the destination's is
//! overwritten with zeros before each run, and what has come is compared after it. Nothing is compressed. All ways take turns, over
//! loopback and between two network namespaces, with 1, 2 and 4 channels, under the published cap and without.
//! `docs/transports.md` says what each number means.

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

/// The command's default, which the ratios without a number are for.
const DEFAULT_CHANNELS: u8 = 2;

/// What a process of the benchmark is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Has the guest.
    Source,
    /// Gets it.
    Destination,
    /// Wants to disturb.
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

/// Is such a process, until its standard input ends.
///
/// # Errors
/// What keeps it from its work; what happens in a run is an answer.
pub fn be(role: Role, directory: &Path) -> anyhow::Result<()> {
    side::run(role, directory)
}

/// What is measured.
pub struct Plan {
    pages: u64,
    /// In bytes per second, where there is a cap.
    cap: u64,
    channels: &'static [u8],
    /// Runs without a cap, with the default number of channels.
    uncapped: usize,
    /// The same with other numbers.
    uncapped_others: usize,
    /// Runs under it, with the default number: each takes 9 s.
    capped: usize,
    /// The same with other numbers, which change little there.
    capped_others: usize,
    /// Runs without a cap that are not counted, for all that is slower the first time.
    warm_up: bool,
    /// Each with and without an attack, and how often.
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
            // Without a cap it would be over before the attack has begun.
            attack: &[(Link::Capped, 1)],
            idle_connections: 100,
            ..usual
        }
    }

    /// How often a case runs. The yardsticks know no cap, and a Unix socket leaves no host.
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

    /// All cases at these places and in these ways, in the order in which they run.
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

    /// The guest's memory.
    fn bytes(&self) -> f64 {
        self.pages as f64 * PAGE_SIZE as f64
    }
}

/// Runs it. `quick` moves 32 MiB once in each way, with 2 channels only.
///
/// # Errors
/// A case that could not be measured: none is left out but for ways that were not compiled in, and namespaces where
/// they are not allowed, which is said.
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
        ("published", table(published::beside(&cells, places[0]))?),
        ("under_attack", table(&attacked)?),
    ]);
    Ok(results)
}

fn table<T: Serialize>(rows: impl IntoIterator<Item = T>) -> anyhow::Result<Vec<Row>> {
    rows.into_iter().map(|fields| row(&fields)).collect()
}

type Samples = BTreeMap<Case, Vec<Run>>;

/// Every case, by turns.
fn grid(plan: &Plan, bench: &mut Bench, places: &[Place], ways: &[Way]) -> anyhow::Result<Samples> {
    let cases = plan.cases(places, ways);
    if plan.warm_up {
        let is_warm_up =
            |case: &&Case| case.link == Link::Uncapped && case.channels == DEFAULT_CHANNELS;
        for case in cases.iter().filter(is_warm_up) {
            bench.once(*case, None, 0)?;
        }
        eprintln!("transport: warmed up");
    }
    let passes = cases.iter().map(|case| plan.runs(*case)).max().unwrap_or(0);
    let mut samples = Samples::new();
    for pass in 1..=passes {
        for case in cases.iter().filter(|case| plan.runs(**case) >= pass) {
            let run = bench.once(*case, plan.cap_of(case.link), 0)?;
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
    fn every_way_runs_everywhere_it_can() {
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
