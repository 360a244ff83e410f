//! Runs the seeds of the engine's fuzz targets.

mod seeds;

use vmferry_fuzz_targets::conversation::outcome;
use vmferry_handover::{DestinationState, SourceState};

seed_tests!(
    places: 200,
    differs: |_| false,
    conversation: seeds::conversations(),
    journal: seeds::journals(),
    policy: seeds::policies()
);

/// The seeds take the fuzzer past the negotiation: some conversations end with a handover, some in
/// doubt, some with the guest at the source.
#[test]
fn seeds_of_conversations_reach_each_end() {
    let ends: Vec<_> = seeds::conversations().iter().map(|(_, seed)| outcome(seed)).collect();
    for wanted in [
        (SourceState::Given, Some(DestinationState::Owns)),
        (SourceState::Kept, Some(DestinationState::Aborted)),
        (SourceState::InDoubt { recovered: true }, Some(DestinationState::Owns)),
        (SourceState::InDoubt { recovered: false }, Some(DestinationState::Owns)),
    ] {
        assert!(ends.contains(&wanted), "{wanted:?} is not among {ends:?}");
    }
}

/// Seeds of post-copy end with all pages at the destination, with a source that serves pages, and
/// with one whose guest was given up.
#[test]
fn seeds_of_post_copy_reach_each_end() {
    let seeds = seeds::conversations();
    let ends: Vec<_> = seeds
        .iter()
        .filter(|(name, _)| name.starts_with("post-copy"))
        .map(|(_, seed)| outcome(seed))
        .collect();
    for wanted in [
        (SourceState::Given, Some(DestinationState::Owns)),
        (SourceState::Kept, Some(DestinationState::Aborted)),
        (SourceState::Serving, Some(DestinationState::Fetching)),
        (SourceState::Given, Some(DestinationState::Fetching)),
    ] {
        assert!(ends.contains(&wanted), "{wanted:?} is not among {ends:?}");
    }
}
