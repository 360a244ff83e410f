//! `vmferry-model`: checks the handover exhaustively, then with each rule broken.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use serde_json::json;
use vmferry_model::{Broken, Finding, Outcome, check};

/// Checks the handover of a guest between two hosts exhaustively: never two hosts that run it,
/// never a guest that goes on from a past, and in the end exactly one host that has it. Then breaks
/// one rule after the other, and shows the shortest way to the damage.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit status: 0 if the rules hold and each broken one is found out."
)]
struct Options {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let begun = Instant::now();
    let whole = check(None);
    let whole_s = begun.elapsed().as_secs_f64();
    let broken: Vec<(Broken, Outcome)> =
        Broken::ALL.into_iter().map(|rule| (rule, check(Some(rule)))).collect();
    let found_out = broken.iter().all(|(_, outcome)| !outcome.violations.is_empty());
    let ok = whole.holds() && found_out;
    if options.json {
        let broken: Vec<_> = broken
            .iter()
            .map(|(rule, outcome)| json!({ "rule": rule.name(), "outcome": outcome }))
            .collect();
        let result = json!({ "ok": ok, "seconds": whole_s, "whole": whole, "broken": broken });
        println!("{result}");
    } else {
        print_whole(&whole, whole_s);
        for (rule, outcome) in &broken {
            print_broken(*rule, outcome);
        }
    }
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print_whole(outcome: &Outcome, seconds: f64) {
    println!(
        "the handover: {} states and {} transitions, the farthest {} steps from the start, all \
         explored in {seconds:.2} s",
        outcome.states, outcome.transitions, outcome.depth
    );
    if outcome.holds() {
        println!("no violation");
    }
    for missing in &outcome.missing {
        println!("NEVER HAPPENS: {missing}");
    }
    for finding in &outcome.violations {
        print_trace(finding);
    }
}

fn print_broken(rule: Broken, outcome: &Outcome) {
    println!("\nbroken on purpose: {} ({} states)", rule.name(), outcome.states);
    if outcome.violations.is_empty() {
        println!("NOT FOUND OUT");
    }
    let Some((worst, others)) = outcome.violations.split_first() else { return };
    print_trace(worst);
    for finding in others {
        println!("  violated too, in {} steps: {}", finding.steps.len(), finding.property);
    }
}

fn print_trace(finding: &Finding) {
    println!("  VIOLATED in {} steps: {}", finding.steps.len(), finding.property);
    for (number, step) in finding.steps.iter().enumerate() {
        println!("    {:>2}. {step}", number + 1);
    }
    println!("        {}", finding.end);
}
