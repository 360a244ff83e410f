//! The rules of libvirt's Finish hold, and each is needed.

use vmferry_model::finish::{BrokenFinish, check};

#[test]
fn finish_rules_hold_in_every_state() {
    let outcome = check(None);
    assert!(outcome.holds(), "{outcome:#?}");
    assert!(outcome.states > 100_000, "{} states are not all of them", outcome.states);
}

#[test]
fn each_broken_finish_rule_is_detected() {
    const TWO: &str = "two hosts never run the guest";
    const END: &str = "in the end exactly one host has the guest or an operator is needed";
    for rule in BrokenFinish::all() {
        let damage = match rule {
            BrokenFinish::DestinationGivesUp | BrokenFinish::ForwardsEnd => END,
            _ => TWO,
        };
        let outcome = check(Some(rule));
        let [finding] = &outcome.violations[..] else { panic!("{rule:?}: {outcome:#?}") };
        assert_eq!(finding.property, damage, "{rule:?}");
        assert!(finding.steps.len() > 3, "{rule:?}: {finding:#?}");
    }
}

#[test]
fn answered_of_the_source_is_needed_only_by_people() {
    let outcome = check(Some(BrokenFinish::UnsyncedAnsweredAtSource));
    assert!(outcome.violations.is_empty(), "{outcome:#?}");
}
