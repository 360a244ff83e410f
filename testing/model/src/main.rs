//! `vmferry-model`: checks the handover exhaustively, then with each rule broken.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use serde_json::json;
use vmferry_model::{BrokenRule, Finding, Outcome, check};

/// Checks the handover of a guest between two hosts exhaustively: two hosts never run the guest,
/// the guest never continues from an outdated state, and in the end exactly one host has the guest.
/// Then breaks one rule after another and prints the shortest path to the damage.
#[derive(Parser)]
#[command(
    version,
    after_help = "Exit status: 0 if the rules hold and each broken rule is detected."
)]
struct Options {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let begun = Instant::now();
    let unbroken = check(None);
    let unbroken_s = begun.elapsed().as_secs_f64();
    let broken: Vec<(BrokenRule, Outcome)> =
        BrokenRule::ALL.iter().map(|&rule| (rule, check(Some(rule)))).collect();
    let all_detected = broken.iter().all(|(_, outcome)| !outcome.violations.is_empty());
    let ok = unbroken.holds() && all_detected;
    if options.json {
        let broken: Vec<_> = broken
            .iter()
            .map(|(rule, outcome)| json!({ "rule": rule.name(), "outcome": outcome }))
            .collect();
        let result =
            json!({ "ok": ok, "seconds": unbroken_s, "whole": unbroken, "broken": broken });
        println!("{result}");
    } else {
        print_whole(&unbroken, unbroken_s);
        for (rule, outcome) in &broken {
            print_broken(*rule, outcome);
        }
    }
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print_whole(outcome: &Outcome, seconds: f64) {
    println!(
        "the handover: {} states and {} transitions, at most {} steps from the start, all \
        explored in {seconds:.2} s",
        outcome.states, outcome.transitions, outcome.depth
    );
    if outcome.holds() {
        println!("no violation");
    }
    for missing in &outcome.missing {
        println!("UNREACHABLE: {missing}");
    }
    for finding in &outcome.violations {
        print_trace(finding);
    }
}

fn print_broken(rule: BrokenRule, outcome: &Outcome) {
    println!("\nbroken on purpose: {} ({} states)", rule.name(), outcome.states);
    if outcome.violations.is_empty() {
        println!("NOT DETECTED");
    }
    let Some((worst, others)) = outcome.violations.split_first() else { return };
    print_trace(worst);
    for finding in others {
        println!("  also violated, in {} steps: {}", finding.steps.len(), finding.property);
    }
}

fn print_trace(finding: &Finding) {
    println!("  VIOLATED in {} steps: {}", finding.steps.len(), finding.property);
    for (number, step) in finding.steps.iter().enumerate() {
        println!("    {:>2}. {step}", number + 1);
    }
    println!("        {}", finding.end);
}
