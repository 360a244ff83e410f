//! Seeded faults that strike while a guest fetches its pages, one after the other.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;

use super::all;

/// A fault, and when it strikes: when this share of the missing pages has arrived.
#[derive(Clone, Copy, Debug)]
pub struct Strike<F> {
    pub arrived: f64,
    pub fault: F,
    /// For how long the link is cut, if it is.
    pub lasts: Duration,
}

/// The faults of a migration. The same seed gives the same ones.
#[derive(Clone, Debug)]
pub struct Plan<F> {
    pub seed: u64,
    pub strikes: Vec<Strike<F>>,
}

impl<F: Copy> Plan<F> {
    /// Three faults of these kinds. Most cuts last for 1 to 3 s, and one in eight for up to 30 s.
    pub fn of(seed: u64, faults: &[F]) -> Self {
        let mut random = Rng::with_seed(seed);
        let mut strike = |early: f64| {
            let longest = if random.u8(..8) == 0 { 30_000 } else { 3000 };
            Strike {
                arrived: early + 0.2 * random.f64(),
                fault: faults[random.usize(..faults.len())],
                lasts: Duration::from_millis(random.u64(1000..=longest)),
            }
        };
        let strikes = [0.02, 0.25, 0.5].map(&mut strike).into();
        Self { seed, strikes }
    }

    /// The plans of a test: a few, or many with VMFERRY_TEST_ALL, or the seeds FIRST..END that the
    /// variable VMFERRY_SEEDS names.
    pub fn all(few: u64, many: u64, faults: &[F]) -> Vec<Self> {
        let chosen = std::env::var("VMFERRY_SEEDS").ok().map(|range| {
            let (first, end) = range.split_once("..").expect("VMFERRY_SEEDS=FIRST..END");
            first.parse().unwrap()..end.parse().unwrap()
        });
        let seeds = chosen.unwrap_or(0..if all() { many } else { few });
        seeds.map(|seed| Self::of(seed, faults)).collect()
    }
}

/// Counts what has struck, and shows it as rows of a table.
#[derive(Debug, Default)]
pub struct Tally(BTreeMap<(String, String), u32>);

impl Tally {
    pub fn add(&mut self, guest: &str, fault: &str) {
        *self.0.entry((guest.to_owned(), fault.to_owned())).or_default() += 1;
    }

    /// Prints the table after all guests have been checked.
    pub fn print(&self, migrations: usize) {
        let total: u32 = self.0.values().sum();
        println!("{total} faults in {migrations} migrations: 0 guests lost, 0 wrong pages");
        for ((guest, fault), count) in &self.0 {
            println!("| {guest} | {fault} | {count} |");
        }
    }
}
