//! Runs the checker and says what it found.

use serde::Serialize;
use stateright::{Checker, Expectation, HasDiscoveries, Model};

use crate::model::{Broken, Handover, IN_THE_END};

/// A property that does not hold, and the shortest way there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The property.
    pub property: &'static str,
    /// What happened, step by step.
    pub steps: Vec<String>,
    /// How it ended.
    pub end: String,
}

/// What the checker found.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Different states that were looked at.
    pub states: usize,
    /// Transitions that were followed.
    pub transitions: usize,
    /// Steps to the state that is farthest from the start.
    pub depth: usize,
    /// The properties that fail, each with its shortest trace; the worst first.
    pub violations: Vec<Finding>,
    /// Things that must be possible and were not found.
    pub missing: Vec<&'static str>,
}

impl Outcome {
    /// Whether every property holds, and the model is not an empty one.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.violations.is_empty() && self.missing.is_empty()
    }
}

/// Explores everything that can happen, with a rule broken or with none.
#[must_use]
pub fn check(broken: Option<Broken>) -> Outcome {
    let model = Handover { broken, ..Handover::default() };
    let properties = model.properties();
    // Once to see which hold, then once for each that does not: the first trace that a search in the
    // order of distance finds is the shortest, and it stops there.
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

/// The shortest way to a violation of one property.
fn shortest(broken: Option<Broken>, property: &'static str) -> Option<Finding> {
    let model = Handover { broken, only: Some(property), ..Handover::default() };
    let checker =
        model.checker().threads(1).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let path = checker.discovery(property)?;
    let last = path.last_state().clone();
    let mut steps: Vec<String> = path.into_actions().iter().map(ToString::to_string).collect();
    let end = if property == IN_THE_END {
        let (rest, end) = checker.model().way_to_doom(&last);
        steps.extend(rest.iter().map(ToString::to_string));
        format!("for good: {}", end.who_has_the_guest())
    } else {
        last.who_has_the_guest()
    };
    Some(Finding { property, steps, end })
}
