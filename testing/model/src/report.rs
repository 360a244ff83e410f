//! Runs the checker and reports the result.

use serde::Serialize;
use stateright::{Checker, Expectation, HasDiscoveries, Model};

use crate::model::{BrokenRule, Handover, ONE_OWNER_IN_THE_END};

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
    let model = Handover { broken, ..Handover::default() };
    let properties = model.properties();
    // The first run finds the violated properties. One more breadth-first run per violated property
    // stops at its first violation, whose path is the shortest.
    let checker = model.checker().threads(1).finish_when(HasDiscoveries::All).spawn_bfs().join();
    let found = checker.discoveries();
    let of = |expectation: Expectation| {
        properties
            .iter()
            .filter(move |property| property.expectation == expectation)
            .map(|property| property.name)
    };
    Outcome {
        states: checker.unique_state_count(),
        transitions: checker.state_count(),
        depth: checker.max_depth(),
        violations: of(Expectation::Always)
            .filter(|name| found.contains_key(name))
            .filter_map(|property| shortest(broken, property))
            .collect(),
        missing: of(Expectation::Sometimes).filter(|name| !found.contains_key(name)).collect(),
    }
}

/// The shortest path to a violation of one property.
fn shortest(broken: Option<BrokenRule>, property: &'static str) -> Option<Finding> {
    let model = Handover { broken, only: Some(property), ..Handover::default() };
    let checker =
        model.checker().threads(1).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let path = checker.discovery(property)?;
    let last = path.last_state().clone();
    let mut steps: Vec<String> = path.into_actions().iter().map(ToString::to_string).collect();
    let end = if property == ONE_OWNER_IN_THE_END {
        let (rest, end) = checker.model().path_to_dead_end(&last);
        steps.extend(rest.iter().map(ToString::to_string));
        format!("permanently: {}", end.who_has_the_guest())
    } else {
        last.who_has_the_guest()
    };
    Some(Finding { property, steps, end })
}
