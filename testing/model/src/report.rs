//! Runs the checker and reports the result.

use serde::Serialize;
use stateright::HasDiscoveries;

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

/// Explores the whole state space, optionally with a broken rule.
#[must_use]
pub fn check(broken: Option<BrokenRule>) -> Outcome {
    let handover = |only| Handover { broken, only, ..Handover::default() };
    let whole = explore(handover(None), HasDiscoveries::All);
    // That run finds the violated properties. One more for each of them stops at its first
    // violation, whose path is the shortest.
    let shortest = |finding: &Finding| {
        explore(handover(Some(finding.property)), HasDiscoveries::AnyFailures).violations.pop()
    };
    Outcome { violations: whole.violations.iter().filter_map(shortest).collect(), ..whole }
}
