//! Runs the seeds of the engine's fuzz targets.

mod seeds;

use super::replay;
use vmferry_fuzz_targets::{Target, conversation, journal, policy};

use vmferry_handover::{DestinationState, SourceState};

const TARGETS: [(&str, Target); 3] =
    [("conversation", conversation::run), ("journal", journal::run), ("policy", policy::run)];

#[test]
fn seeds_are_handled() {
    for (name, run) in TARGETS {
        replay::every_seed(name, run);
    }
}

#[test]
fn cut_and_damaged_seeds_are_handled() {
    for (name, run) in TARGETS {
        replay::every_seed_cut_and_damaged(name, run, 200);
    }
}

/// The seeds take the fuzzer past the negotiation: some conversations end with a handover, some in
/// doubt, some with the guest at the source.
#[test]
fn seeds_of_conversations_reach_each_end() {
    let ends: Vec<_> =
        seeds::conversations().iter().map(|(_, seed)| conversation::outcome(seed)).collect();
    for wanted in [
        (SourceState::Given, Some(DestinationState::Owns)),
        (SourceState::Kept, Some(DestinationState::Aborted)),
        (SourceState::InDoubt { recovered: true }, Some(DestinationState::Owns)),
        (SourceState::InDoubt { recovered: false }, Some(DestinationState::Owns)),
    ] {
        assert!(ends.contains(&wanted), "{wanted:?} is not among {ends:?}");
    }
}

#[test]
fn seeds_are_in_the_tree() {
    replay::are_in_the_tree("conversation", seeds::conversations(), |_| false);
    replay::are_in_the_tree("journal", seeds::journals(), |_| false);
    replay::are_in_the_tree("policy", seeds::policies(), |_| false);
}

/// Run `cargo test -p vmferry-fuzz-targets -- --ignored` after a change of the input format.
#[test]
#[ignore = "writes the seeds"]
fn write_the_seeds() {
    replay::write("conversation", seeds::conversations());
    replay::write("journal", seeds::journals());
    replay::write("policy", seeds::policies());
}
