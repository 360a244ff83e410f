//! The rules hold, and each rule is needed.

use vmferry_handover::SessionKind;
use vmferry_model::{BrokenRule, Handover, check, check_with_witness, first_violation};

#[test]
fn rules_hold_in_every_state() {
    let outcome = check(None);
    assert!(outcome.holds(), "{outcome:#?}");
    assert!(outcome.states > 100_000, "{} states are not all of them", outcome.states);
}

/// `make test` explores pre-copy, and `make test-all` post-copy too.
#[test]
fn rules_hold_in_every_state_with_a_witness() {
    let all = std::env::var_os("VMFERRY_TEST_ALL").is_some();
    let outcome = check_with_witness((!all).then_some(SessionKind::PreCopy));
    assert!(outcome.holds(), "{outcome:#?}");
    let least = if all { 2_000_000 } else { 300_000 };
    assert!(outcome.states > least, "{} states are not all of them", outcome.states);
}

const TWO: &str = "two hosts never run the guest";
const PAST: &str = "the guest never goes on from a past";
const FREED: &str = "no page that the guest lacks is freed";
const REMAINS: &str = "what a crashed guest lacked is freed by an operator only";
const END: &str = "in the end exactly one host has the guest";

/// `make model` finds all damage of each; here the worst is enough.
#[test]
fn each_broken_rule_of_the_witness_is_detected() {
    for (rule, damage) in [
        (BrokenRule::RunsUnclaimed, TWO),
        (BrokenRule::UnansweredIsGranted, TWO),
        (BrokenRule::UnansweredIsTakenBack, TWO),
        (BrokenRule::LeaseEndTakesBack, TWO),
        (BrokenRule::ClaimedIsOwns, END),
        (BrokenRule::ClaimIsNotCompared, TWO),
        (BrokenRule::ReportedBeforeWritten, END),
        (BrokenRule::RestoredIsTrusted, TWO),
        (BrokenRule::NotOpened, TWO),
        (BrokenRule::FreedWithoutFencing, TWO),
    ] {
        let Some(found) = first_violation(rule, damage) else { panic!("{rule:?} is not detected") };
        assert!(found.steps.len() > 2, "{rule:?}: {found:#?}");
    }
}

#[test]
fn each_broken_rule_is_detected() {
    for (rule, damage) in [
        (BrokenRule::NoCommitInJournal, &[TWO, PAST, END][..]),
        (BrokenRule::ResumeAfterCommit, &[TWO, PAST, END]),
        (BrokenRule::UnknownIsAborted, &[TWO, PAST, END]),
        (BrokenRule::NoRunIntent, &[TWO, PAST, END]),
        (BrokenRule::FailedWriteIsWritten, &[TWO, PAST, END]),
        (BrokenRule::RestartedSendsCommit, &[TWO, PAST]),
        (BrokenRule::EndOfLinkIsSuccess, &[END]),
        (BrokenRule::NotFinishedAfterRestart, &[END]),
        (BrokenRule::RunsWithoutLooking, &[TWO, PAST]),
        (BrokenRule::RunsWhatMovedOn, &[PAST]),
        (BrokenRule::StuckDiscards, &[END]),
        (BrokenRule::KeptBeforeResumed, &[END]),
        (BrokenRule::RunningWithoutAllPages, &[FREED, REMAINS, END]),
        (BrokenRule::OperatorFreesPages, &[FREED, REMAINS, END]),
        (BrokenRule::ServingResumes, &[TWO, PAST, END]),
        (BrokenRule::ServingForgotten, &[FREED, REMAINS, END]),
        (BrokenRule::CrashedIsFetched, &[REMAINS]),
        (BrokenRule::EndedFreesPages, &[REMAINS]),
        (BrokenRule::FetchingForgotten, &[FREED, REMAINS]),
    ] {
        let outcome = check(Some(rule));
        let mut found: Vec<&str> =
            outcome.violations.iter().map(|finding| finding.property).collect();
        found.sort_unstable();
        let mut damage = damage.to_vec();
        damage.sort_unstable();
        assert_eq!(found, damage, "{rule:?}");
        assert!(outcome.violations.iter().all(|finding| finding.steps.len() > 2), "{rule:?}");
    }
}

#[test]
fn initial_state_runs_the_guest_at_the_source() {
    use stateright::Model;
    let model = Handover::default();
    let start = &model.init_states()[0];
    assert_eq!(
        start.who_has_the_guest(),
        "the source runs the guest, the destination does not have it"
    );
}
