//! Schedules with a witness.

use vmferry_sim::{Fault, Plan, Sabotage, Seed, SourceEnd, run};

use crate::assert_detected;

/// Every schedule with a witness at a message boundary.
fn plans() -> impl Iterator<Item = Plan> {
    let all = (0..Plan::boundaries()).map(|number| Plan::new(Seed::Boundary(number)));
    all.filter(|plan| plan.witness)
}

/// No operator and no link is needed: the guest comes back, or the source learns where it is.
#[test]
fn witness_decides_while_the_link_is_cut_for_good() {
    let (mut given, mut kept) = (0, 0);
    for plan in plans().filter(|plan| matches!(plan.faults[..], [Fault::Cut { .. }])) {
        let outcome = run(&plan, false);
        assert!(outcome.violations.is_empty(), "{}: {:?}", plan.seed, outcome.violations);
        // A guest that lacks pages waits for the link.
        if outcome.was_in_doubt && !outcome.fetching {
            // The destination waits 60 s for COMMIT; the source's doubt is shorter.
            assert!(outcome.took.as_secs() < 65, "{} took {:?}", plan.seed, outcome.took);
            match outcome.end {
                SourceEnd::Given => given += 1,
                SourceEnd::Kept => kept += 1,
            }
        }
    }
    assert!(given > 0 && kept > 0, "{given} handed over and {kept} kept after a doubt");
}

#[test]
fn schedules_with_a_witness_have_every_fault_of_it() {
    let all: Vec<Plan> =
        plans().chain((0..400).map(|number| Plan::new(Seed::Random(number)))).collect();
    let has = |wanted: fn(&Fault) -> bool| all.iter().any(|plan| plan.faults.iter().any(wanted));
    assert!(has(|fault| matches!(fault, Fault::WitnessCut { .. })));
    assert!(has(|fault| matches!(fault, Fault::WitnessSlow { .. })));
    assert!(has(|fault| matches!(fault, Fault::WitnessLost { .. })));
    assert!(all.iter().any(|plan| plan.witness && plan.post_copy && plan.outlives));
}

#[test]
fn sabotage_of_the_witness_is_detected() {
    const TWO: &str = "two hosts run the guest";
    for (sabotage, violation, pinned) in [
        (Sabotage::RunUnclaimed, TWO, 30_467),
        (Sabotage::TakeBackUnanswered, TWO, 30_879),
        (Sabotage::ClaimedIsOwns, "in the end no host has the guest", 32_367),
        (Sabotage::TrustRestored, TWO, 30_879),
    ] {
        assert_detected(sabotage, violation, Seed::Boundary(pinned), |_| {});
    }
}
