//! What came of each fault, for the table of `docs/reliability.md`.
//!
//! A test that injects a fault checks what came of it, and then notes it here. With `VMFERRY_OUTCOMES=FILE` each is
//! appended to that file as one JSON object in a line, which `scripts/reliability` makes the table of.

use std::fs::OpenOptions;
use std::io::Write;

use serde::Serialize;

/// Who has the guest after a fault, when everything has come to rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Owner {
    Source,
    Destination,
    /// It stands still at the source until the other host gives its word, or an operator.
    InDoubt,
    /// The process that it lived in was killed: the guest has crashed.
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
    /// Notes it.
    pub fn note(&self) {
        println!("{self:?}");
        let Some(path) = std::env::var_os("VMFERRY_OUTCOMES") else { return };
        let mut line = serde_json::to_string(self).unwrap();
        line.push('\n');
        // One write of a short line: tests that run side by side do not mix theirs.
        let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
}
