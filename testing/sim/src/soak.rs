//! Runs many schedules and summarizes them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde::Serialize;

use crate::plan::{Plan, Seed};
use crate::source_host::SourceEnd;
use crate::world::{Outcome, run};

/// A schedule that violated a promise.
#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// The seed that replays it.
    pub seed: String,
    /// The violations.
    pub violations: Vec<String>,
}

/// The summary of many schedules.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Schedules that were run.
    pub schedules: u64,
    /// Schedules in which a fault happened.
    pub struck: u64,
    /// How often each end was reached.
    pub ends: BTreeMap<&'static str, u64>,
    /// Messages that were sent in all schedules.
    pub messages: u64,
    /// Cuts that happened.
    pub cuts: u64,
    /// Channels that were reconnected.
    pub restored: u64,
    /// Schedules in which a channel was reconnected and the guest was handed over.
    pub survived: u64,
    /// Schedules in which a paused guest was resumed and handed over later.
    pub recalled: u64,
    /// Frames that were sent again.
    pub resent: u64,
    /// Schedules in which cuts happened and the guest still had to be handed over.
    pub must_be_given: u64,
    /// Schedules in which the guest ran at the destination and lacked pages.
    pub fetching: u64,
    /// Those of them in which a channel was cut then.
    pub cut_while_fetching: u64,
    /// Those of them after which the guest had all its pages.
    pub fetched: u64,
    /// How often a restarted destination took over a guest that lacked pages.
    pub taken_over: u64,
    /// How often a restarted source had to serve pages.
    pub served_again: u64,
    /// Schedules in which an operator gave up a guest that had died while it lacked pages.
    pub given_up: u64,
    /// Missing pages that have arrived in all schedules.
    pub fetched_pages: u64,
    /// Pages that were requested because a vCPU waited.
    pub faults: u64,
    /// Pages that arrived although they were there already.
    pub again_pages: u64,
    /// The longest simulated time to a decision, in seconds.
    pub longest_s: f64,
    /// Schedules that violated a promise.
    pub failures: Vec<Failure>,
}

impl Summary {
    fn add(&mut self, seed: Seed, outcome: Outcome) {
        self.schedules += 1;
        self.struck += u64::from(outcome.struck > 0);
        self.messages += outcome.messages;
        let given = outcome.end == SourceEnd::Given;
        self.cuts += outcome.cuts;
        self.restored += outcome.restored;
        self.survived += u64::from(given && outcome.restored > 0);
        self.recalled += u64::from(given && outcome.recalls > 0);
        self.resent += outcome.resent;
        self.must_be_given += u64::from(outcome.must_be_given && outcome.cuts > 0);
        let fetching = u64::from(outcome.fetching);
        self.fetching += fetching;
        self.cut_while_fetching += u64::from(outcome.fetching_cuts > 0);
        self.fetched += if given { fetching } else { 0 };
        self.taken_over += outcome.taken_over;
        self.served_again += outcome.served_again;
        self.given_up += u64::from(outcome.given_up);
        self.fetched_pages += outcome.fetched.pages;
        self.faults += outcome.fetched.faults;
        self.again_pages += outcome.fetched.again;
        self.longest_s = self.longest_s.max(outcome.took.as_secs_f64());
        let end = match (outcome.end, outcome.was_in_doubt, outcome.crashed_there) {
            _ if outcome.given_up => "handed over, died while it lacked pages, given up",
            (SourceEnd::Given, _, true) => "handed over, then crashed",
            (SourceEnd::Given, false, false) => "handed over",
            (SourceEnd::Given, true, false) => "handed over, after doubt",
            (SourceEnd::Kept, false, _) => "kept",
            (SourceEnd::Kept, true, _) => "kept, after doubt",
        };
        *self.ends.entry(end).or_default() += 1;
        if !outcome.violations.is_empty() {
            let violations = outcome.violations;
            self.failures.push(Failure { seed: seed.to_string(), violations });
        }
    }

    /// Adds the summary of other schedules.
    pub fn merge(&mut self, other: Self) {
        self.schedules += other.schedules;
        self.struck += other.struck;
        self.messages += other.messages;
        self.cuts += other.cuts;
        self.restored += other.restored;
        self.survived += other.survived;
        self.recalled += other.recalled;
        self.resent += other.resent;
        self.must_be_given += other.must_be_given;
        self.fetching += other.fetching;
        self.cut_while_fetching += other.cut_while_fetching;
        self.fetched += other.fetched;
        self.taken_over += other.taken_over;
        self.served_again += other.served_again;
        self.given_up += other.given_up;
        self.fetched_pages += other.fetched_pages;
        self.faults += other.faults;
        self.again_pages += other.again_pages;
        self.longest_s = self.longest_s.max(other.longest_s);
        for (end, count) in other.ends {
            *self.ends.entry(end).or_default() += count;
        }
        self.failures.extend(other.failures);
    }
}

/// Runs the schedules on every core, until `stop` is set.
#[must_use]
pub fn run_all(seeds: &[Seed], stop: &AtomicBool) -> Summary {
    let next = AtomicUsize::new(0);
    let whole = Mutex::new(Summary::default());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut part = Summary::default();
                while !stop.load(Ordering::Relaxed)
                    && let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    part.add(seed, run(&Plan::new(seed), false));
                }
                whole.lock().merge(part);
            });
        }
    });
    let mut whole = whole.into_inner();
    whole.failures.sort_by(|a, b| a.seed.cmp(&b.seed));
    whole
}
