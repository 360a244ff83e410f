//! Runs the checker and reports the result.

use serde::Serialize;
use stateright::HasDiscoveries;
use vmferry_handover::SessionKind;

use crate::explorer::explore;
use crate::model::{BrokenRule, Handover};

/// A violated property, and the shortest path to the violation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The property.
    pub property: &'static str,
    /// The steps of the path.
    pub steps: Vec<String>,
    /// The final state in words.
    pub end: String,
}

/// The result of one check.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Number of distinct states.
    pub states: usize,
    /// Number of transitions.
    pub transitions: usize,
    /// Number of steps to the most distant state.
    pub depth: usize,
    /// The violated properties, each with its shortest path, the most serious first.
    pub violations: Vec<Finding>,
    /// Properties that some state must have, but no state has.
    pub missing: Vec<&'static str>,
}

impl Outcome {
    /// Whether every property holds and the model is not vacuous.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.violations.is_empty() && self.missing.is_empty()
    }
}

/// Explores the whole state space of a handover without a witness, or with a broken rule.
#[must_use]
pub fn check(broken: Option<BrokenRule>) -> Outcome {
    let witnessed = broken.is_some_and(BrokenRule::has_witness);
    let handover = |only| Handover { broken, witnessed, only, ..Handover::default() };
    let whole = explore(handover(None), HasDiscoveries::All);
    // That run finds the violated properties. One more for each of them stops at its first
    // violation, whose path is the shortest.
    let shortest = |finding: &Finding| {
        explore(handover(Some(finding.property)), HasDiscoveries::AnyFailures).violations.pop()
    };
    Outcome { violations: whole.violations.iter().filter_map(shortest).collect(), ..whole }
}

/// Explores the whole state space of a handover with a witness, of one kind of session or of both.
#[must_use]
pub fn check_with_witness(kind: Option<SessionKind>) -> Outcome {
    let handover = Handover { witnessed: true, kind, ..Handover::default() };
    explore(handover, HasDiscoveries::All)
}

/// Explores with a broken rule until this property is violated, and looks for no other damage.
#[must_use]
pub fn first_violation(rule: BrokenRule, property: &'static str) -> Option<Finding> {
    let (broken, only, witnessed) = (Some(rule), Some(property), rule.has_witness());
    let handover = Handover { broken, only, witnessed, ..Handover::default() };
    explore(handover, HasDiscoveries::AnyFailures).violations.into_iter().next()
}
