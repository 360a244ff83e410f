//! `vmferry-model`: checks the handover and libvirt's Finish exhaustively, then with broken rules.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use serde_json::json;
use vmferry_model::finish::{self, BrokenFinish};
use vmferry_model::{BrokenRule, Finding, Outcome, check, check_with_witness};

/// Checks the handover of a guest between two hosts exhaustively, by vmferry itself and by libvirt
/// through vmferry's daemons: two hosts never run the guest, the guest never continues from an
/// outdated state, and in the end exactly one host has the guest.
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
    let handover = Checked::new(check(None), begun, || {
        BrokenRule::ALL.iter().map(|&rule| (rule.name(), check(Some(rule)))).collect()
    });
    let begun = Instant::now();
    let witnessed = Checked::new(check_with_witness(None), begun, Vec::new);
    let begun = Instant::now();
    let finish = Checked::new(finish::check(None), begun, || {
        let rules = BrokenFinish::all().into_iter();
        rules.map(|rule| (rule.name(), finish::check(Some(rule)))).collect()
    });
    let ok = handover.is_ok() && witnessed.is_ok() && finish.is_ok();
    if options.json {
        let mut result = handover.json();
        result["with_witness"] = witnessed.json();
        result["finish"] = finish.json();
        result["ok"] = ok.into();
        println!("{result}");
    } else {
        print_whole("the handover", &handover);
        print_whole("the handover with a witness", &witnessed);
        print_whole("libvirt's Finish", &finish);
        for (name, outcome) in handover.broken.iter().chain(&finish.broken) {
            print_broken(name, outcome);
        }
    }
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A model that was checked without and with each broken rule.
struct Checked {
    whole: Outcome,
    seconds: f64,
    broken: Vec<(&'static str, Outcome)>,
}

impl Checked {
    fn new(
        whole: Outcome,
        begun: Instant,
        broken: impl FnOnce() -> Vec<(&'static str, Outcome)>,
    ) -> Self {
        let seconds = begun.elapsed().as_secs_f64();
        Self { whole, seconds, broken: broken() }
    }

    fn is_ok(&self) -> bool {
        self.whole.holds() && self.broken.iter().all(|(_, outcome)| !outcome.violations.is_empty())
    }

    fn json(&self) -> serde_json::Value {
        let broken: Vec<_> = self
            .broken
            .iter()
            .map(|(name, outcome)| json!({ "rule": name, "outcome": outcome }))
            .collect();
        let Self { whole, seconds, .. } = self;
        json!({ "ok": self.is_ok(), "seconds": seconds, "whole": whole, "broken": broken })
    }
}

fn print_whole(name: &str, checked: &Checked) {
    let Checked { whole: outcome, seconds, .. } = checked;
    println!(
        "{name}: {} states and {} transitions, at most {} steps from the start, all explored in \
        {seconds:.2} s",
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

fn print_broken(name: &str, outcome: &Outcome) {
    println!("\nbroken on purpose: {name} ({} states)", outcome.states);
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
