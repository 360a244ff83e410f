//! Renders the outcomes that the tests of faults have noted into the tables of a document.
//!
//! `reliability OUTCOMES [DOCUMENT]`: OUTCOMES has one JSON object per line, as the tests write
//! them with VMFERRY_OUTCOMES. The text between the two markers of DOCUMENT is replaced by the
//! rendered tables; without a document they are printed.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

const BEGIN: &str = "<!-- outcomes: by `make reliability` -->\n";
const END: &str = "<!-- end of outcomes -->\n";

/// The phases in the order of a migration; those that are not here come behind, by name.
const PHASES: [&str; 14] = [
    "announced",
    "OPEN",
    "connected",
    "first round",
    "second round",
    "paused",
    "state on its way",
    "READY on its way",
    "COMMIT",
    "COMMIT on its way",
    "in doubt",
    "RUN-INTENT",
    "running at the destination",
    "GIVEN",
];

#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Outcome {
    guest: String,
    fault: String,
    phase: String,
    source: String,
    destination: String,
    owner: String,
}

/// What came of a fault, in whichever phases.
type Result = (String, String, String);

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (outcomes, document) = match &arguments[..] {
        [outcomes] => (outcomes, None),
        [outcomes, document] => (outcomes, Some(document)),
        _ => bail!("usage: reliability OUTCOMES [DOCUMENT]"),
    };
    let lines = std::fs::read_to_string(outcomes).with_context(|| outcomes.clone())?;
    let found = lines
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("{outcomes}: {line}")))
        .collect::<anyhow::Result<Vec<Outcome>>>()?;
    ensure!(!found.is_empty(), "{outcomes} is empty: no test has noted anything");
    let Some(document) = document else {
        println!("{}", render(found));
        return Ok(());
    };
    let text = std::fs::read_to_string(document).with_context(|| document.clone())?;
    let new = replace(&text, &render(found)).with_context(|| document.clone())?;
    std::fs::write(document, new).with_context(|| document.clone())?;
    Ok(())
}

fn replace(text: &str, tables: &str) -> anyhow::Result<String> {
    let begin = text.find(BEGIN).context("the first marker is missing")? + BEGIN.len();
    let end = text.find(END).context("the last marker is missing")?;
    ensure!(begin <= end, "the markers are in the wrong order");
    Ok(format!("{}{tables}{}", &text[..begin], &text[end..]))
}

/// A table for each kind of guest; a row for each fault and what came of it.
fn render(mut outcomes: Vec<Outcome>) -> String {
    outcomes.sort();
    outcomes.dedup();
    let count = outcomes.len();
    let mut guests: BTreeMap<String, BTreeMap<String, Vec<Outcome>>> = BTreeMap::new();
    for outcome in outcomes {
        let faults = guests.entry(outcome.guest.clone()).or_default();
        faults.entry(outcome.fault.clone()).or_default().push(outcome);
    }
    let mut text = format!("\n{count} combinations of fault, phase and outcome.\n");
    for (guest, faults) in guests {
        let _ = write!(text, "\n### {guest}\n\n");
        text.push_str("| fault | when | the guest | source | destination |\n");
        text.push_str("| --- | --- | --- | --- | --- |\n");
        for (fault, outcomes) in faults {
            for ((owner, source, destination), phases) in group(outcomes) {
                let phases = phases.join(", ");
                let _ =
                    writeln!(text, "| {fault} | {phases} | {owner} | {source} | {destination} |");
            }
        }
    }
    text.push('\n');
    text
}

/// Phases with the same outcome, each in the order of a migration.
fn group(mut outcomes: Vec<Outcome>) -> Vec<(Result, Vec<String>)> {
    let place =
        |phase: &str| PHASES.iter().position(|known| *known == phase).unwrap_or(PHASES.len());
    outcomes.sort_by_key(|outcome| (place(&outcome.phase), outcome.phase.clone()));
    let mut groups: Vec<(Result, Vec<String>)> = Vec::new();
    for Outcome { phase, owner, source, destination, .. } in outcomes {
        let result = (owner, source, destination);
        match groups.iter_mut().find(|(known, _)| *known == result) {
            Some((_, phases)) => phases.push(phase),
            None => groups.push((result, vec![phase])),
        }
    }
    groups
}
