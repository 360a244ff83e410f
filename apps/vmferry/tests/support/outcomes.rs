//! What came of each fault, for the table of `docs/reliability.md`.
//!
//! A test that injects a fault checks what came of it, and then notes it here: it must be in the table, exit statuses and
//! all; but in the sample of a machine that may be slow, the destination's may be another one. With `VMFERRY_OUTCOMES=FILE` it is appended to that file instead, as one JSON object in a line, which
//! `scripts/reliability` makes the table of.

use std::fs::OpenOptions;
use std::io::Write;

use serde::Serialize;

use super::all;

/// Who has the guest after a fault, when everything has come to rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Owner {
    #[serde(rename = "runs on at the source")]
    Source,
    #[serde(rename = "runs at the destination")]
    Destination,
    /// The process that it lived in was killed: the guest has crashed.
    #[serde(rename = "died with the process that had it")]
    Crashed,
}

/// One row: a fault at one moment of one kind of migration.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome<'a> {
    /// `microvm`, `qemu attached` or `qemu carried`.
    pub guest: &'a str,
    /// What happened, for example `source: SIGSTOP`.
    pub fault: &'a str,
    /// When, by the source's events.
    pub phase: &'a str,
    /// What the source's command ended with, as `exit 12`; or what it goes on doing.
    pub source: String,
    /// The same of the destination's.
    pub destination: String,
    /// Checked before it is noted, by `vmferry status` on either host and by the guest's own check.
    pub owner: Owner,
}

impl Outcome<'_> {
    /// Notes it, or looks it up.
    pub fn note(&self) {
        println!("{self:?}");
        let Some(path) = std::env::var_os("VMFERRY_OUTCOMES") else { return self.look_up() };
        let mut line = serde_json::to_string(self).unwrap();
        line.push('\n');
        // One write of a short line: tests that run side by side do not mix theirs.
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
        // Which of two waits of one length ends first is told by a word of the destination's, and not by where the guest is.
        let compared = if all() { 3 } else { 2 };
        assert!(
            known.iter().any(|row| row[..compared] == found[..compared]),
            "docs/reliability.md knows {known:?} of this, and not {self:?}; `make reliability` makes its tables anew"
        );
    }
}
