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
