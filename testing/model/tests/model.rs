//! The rules hold, and each of them is needed.

use vmferry_model::{Broken, Handover, check};

#[test]
fn the_rules_hold_in_every_state() {
    let outcome = check(None);
    assert!(outcome.holds(), "{outcome:#?}");
    assert!(outcome.states > 10_000, "{} states are not all of them", outcome.states);
}

#[test]
fn each_broken_rule_does_damage() {
    const TWO: &str = "two hosts never run the guest";
    const PAST: &str = "the guest never goes on from a past";
    const END: &str = "in the end exactly one host has the guest";
    for (rule, damage) in [
        (Broken::NoCommitInJournal, &[TWO, PAST, END][..]),
        (Broken::ResumeAfterCommit, &[TWO, PAST, END]),
        (Broken::UnknownIsAborted, &[TWO, PAST, END]),
        (Broken::NoRunIntent, &[TWO, PAST, END]),
        (Broken::FailedWriteIsWritten, &[TWO, PAST, END]),
        (Broken::RestartedSendsCommit, &[TWO, PAST]),
        (Broken::EndOfLinkIsSuccess, &[END]),
        (Broken::NotFinishedAfterRestart, &[END]),
        (Broken::RunsWithoutLooking, &[TWO, PAST]),
        (Broken::RunsWhatMovedOn, &[PAST]),
        (Broken::StuckDiscards, &[END]),
        (Broken::KeptBeforeResumed, &[END]),
    ] {
        let outcome = check(Some(rule));
        let mut found: Vec<&str> =
            outcome.violations.iter().map(|finding| finding.property).collect();
        found.sort_unstable();
        let mut damage = damage.to_vec();
        damage.sort_unstable();
        assert_eq!(found, damage, "{rule:?}");
        assert!(outcome.violations.iter().all(|finding| finding.steps.len() > 3), "{rule:?}");
    }
}

#[test]
fn the_guest_runs_at_the_start() {
    use stateright::Model;
    let model = Handover::default();
    let start = &model.init_states()[0];
    assert_eq!(
        start.who_has_the_guest(),
        "the source runs the guest, the destination does not have it"
    );
}
