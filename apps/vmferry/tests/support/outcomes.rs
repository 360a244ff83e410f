//! The outcome of each fault, for the tables of `docs/reliability.md`.
//!
//! A test that injects a fault checks the outcome and then notes it here. The tables must have it,
//! exit statuses included. In a sample on a machine that may be slow, the destination's exit status
//! is not compared. With `VMFERRY_OUTCOMES=FILE` the outcome is appended to that file instead, as
//! one JSON object per line, and `scripts/reliability` renders the tables from the file.

use std::fs::OpenOptions;
use std::io::Write;

use serde::Serialize;

use super::{Ended, all};

/// Which host has the guest after a fault, when all processes have settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Owner {
    #[serde(rename = "runs on at the source")]
    Source,
    #[serde(rename = "runs at the destination")]
    Destination,
    /// The process with the guest was killed, so the guest has crashed.
    #[serde(rename = "died with the process that had it")]
    Crashed,
}

/// How a command ended, or what it continues to do, in the tables' words.
pub struct End(pub String);

impl From<&Ended> for End {
    fn from(ended: &Ended) -> Self {
        Self(ended.in_words())
    }
}

impl From<&str> for End {
    fn from(words: &str) -> Self {
        Self(words.to_owned())
    }
}

/// One row: a fault in one phase of one kind of migration.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome<'a> {
    /// `microvm`, `qemu attached` or `qemu carried`.
    pub guest: &'a str,
    /// The fault, for example `source: SIGSTOP`.
    pub fault: &'a str,
    /// The phase, by the source's events.
    pub phase: &'a str,
    /// The end of the source's command, such as `exit 12`, or what it continues to do.
    pub source: String,
    /// The same for the destination's command.
    pub destination: String,
    /// Checked before it is noted, by `vmferry status` on both hosts and by the guest's self-check.
    pub owner: Owner,
}

impl Outcome<'_> {
    /// Appends the outcome to the file, or looks it up in the tables.
    pub fn note(&self) {
        println!("{self:?}");
        let Some(path) = std::env::var_os("VMFERRY_OUTCOMES") else { return self.look_up() };
        let mut line = serde_json::to_string(self).unwrap();
        line.push('\n');
        // One write of a short line: parallel tests do not mix their lines.
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }

    fn look_up(&self) {
        const TABLES: &str = include_str!("../../../../docs/reliability.md");
        let table = TABLES.split("\n### ").find_map(|part| part.strip_prefix(self.guest));
        let rows = table.unwrap_or_default().lines().filter_map(|line| {
            let cells: Vec<&str> =
                line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect();
            let [fault, phases, owner, source, destination] = cells[..] else { return None };
            let is_it = fault == self.fault && phases.split(", ").any(|phase| phase == self.phase);
            is_it.then_some([owner, source, destination])
        });
        let known: Vec<[&str; 3]> = rows.collect();
        let owner = serde_json::to_value(self.owner).unwrap();
        let found = [owner.as_str().unwrap(), &self.source, &self.destination];
        // Which of two equally long waits ends first changes the destination's exit status, but not
        // which host has the guest.
        let compared = if all() { 3 } else { 2 };
        assert!(
            known.iter().any(|row| row[..compared] == found[..compared]),
            "docs/reliability.md knows {known:?} of this, and not {self:?}; `make reliability` \
             renders its tables again"
        );
    }
}
