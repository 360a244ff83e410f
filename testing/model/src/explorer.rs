//! What both models have in common: exploring a whole state space, and whether a world without
//! faults reaches its goal.

use std::collections::VecDeque;
use std::fmt::Display;
use std::hash::Hash;

use ahash::{HashSet, HashSetExt, RandomState};
use indexmap::IndexSet;
use parking_lot::Mutex;
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};

use crate::report::{Finding, Outcome};

/// The worlds of a model.
pub(crate) trait Explored:
    Clone + Eq + Hash + std::fmt::Debug + Send + Sync + 'static
{
    /// Who has the guest, in words.
    fn in_words(&self) -> String;
}

/// A model that is explored whole.
pub(crate) trait Explorable:
    Model<State: Explored, Action: Display + Clone + PartialEq + std::fmt::Debug + Send + Sync>
    + Send
    + Sync
    + Sized
    + 'static
{
    /// Continues the path to a violation of a property about the end, up to a world that never
    /// reaches its goal. `None` for the other properties.
    fn dead_end(&self, property: &str, from: &Self::State) -> Option<DeadEnd<Self>>;
}

/// A path and the world at its end.
pub(crate) type DeadEnd<M> = (Vec<<M as Model>::Action>, <M as Model>::State);

/// Explores a model, whole or until the first violation.
pub(crate) fn explore<M: Explorable>(model: M, until: HasDiscoveries) -> Outcome {
    let properties = model.properties();
    let checker = model.checker().threads(1).finish_when(until).spawn_bfs().join();
    let found = checker.discoveries();
    let missing = |property: &&Property<M>| {
        property.expectation == Expectation::Sometimes && !found.contains_key(property.name)
    };
    Outcome {
        states: checker.unique_state_count(),
        transitions: checker.state_count(),
        depth: checker.max_depth(),
        violations: properties
            .iter()
            .filter(|property| property.expectation == Expectation::Always)
            .filter_map(|property| finding(&checker, property.name))
            .collect(),
        missing: properties.iter().filter(missing).map(|property| property.name).collect(),
    }
}

/// The path to a violation of one property. It is the shortest if the model has no other property.
fn finding<M: Explorable>(checker: &impl Checker<M>, property: &'static str) -> Option<Finding> {
    let path = checker.discovery(property)?;
    let last = path.last_state().clone();
    let mut steps: Vec<String> = path.into_actions().iter().map(ToString::to_string).collect();
    let end = match checker.model().dead_end(property, &last) {
        Some((rest, end)) => {
            steps.extend(rest.iter().map(ToString::to_string));
            format!("permanently: {}", end.in_words())
        }
        None => last.in_words(),
    };
    Some(Finding { property, steps, end })
}

/// The worlds from which a goal is known to be reached.
pub(crate) type Known<W> = Mutex<HashSet<W>>;

/// The worlds without faults after one of them.
struct Future<W> {
    /// All, up to those that are known to settle.
    reached: IndexSet<W, RandomState>,
    /// For each of them, whether the goal is reachable from it.
    settles: Vec<bool>,
}

/// Whether the goal is reachable from this world and from all of its successors. Then every fair
/// schedule reaches it.
pub(crate) fn settles<M: Explorable>(
    model: &M,
    world: &M::State,
    known: &Known<M::State>,
    goal: impl Fn(&M::State) -> bool,
) -> bool {
    let mut known = known.lock();
    if known.contains(world) {
        return true;
    }
    let Future { reached, settles } = future(model, world, &known, goal);
    let all = settles.iter().all(|settles| *settles);
    if all {
        known.extend(reached);
    }
    all
}

/// The shortest path from a world that may not reach the goal to one that never will.
pub(crate) fn path_to_dead_end<M: Explorable>(
    model: &M,
    from: &M::State,
    goal: impl Fn(&M::State) -> bool,
) -> DeadEnd<M> {
    let Future { reached, settles } = future(model, from, &HashSet::new(), goal);
    let mut seen: HashSet<_> = [from.clone()].into_iter().collect();
    let mut queue = VecDeque::from([(from.clone(), Vec::new())]);
    while let Some((at, path)) = queue.pop_front() {
        if reached.get_index_of(&at).is_some_and(|index| !settles[index]) {
            return (path, at);
        }
        for (action, next) in model.next_steps(&at) {
            if seen.insert(next.clone()) {
                let mut longer = path.clone();
                longer.push(action);
                queue.push_back((next, longer));
            }
        }
    }
    (Vec::new(), from.clone())
}

fn future<M: Explorable>(
    model: &M,
    from: &M::State,
    known: &HashSet<M::State>,
    goal: impl Fn(&M::State) -> bool,
) -> Future<M::State> {
    let mut reached = IndexSet::with_hasher(RandomState::default());
    reached.insert(from.clone());
    let mut came_from = vec![Vec::new()];
    let mut good = Vec::new();
    let mut at = 0;
    while let Some(world) = reached.get_index(at) {
        let is_known = known.contains(world);
        if is_known || goal(world) {
            good.push(at);
        }
        let next = if is_known { Vec::new() } else { model.next_states(world) };
        for world in next {
            let (index, is_new) = reached.insert_full(world);
            if is_new {
                came_from.push(Vec::new());
            }
            came_from[index].push(at);
        }
        at += 1;
    }
    let mut settles = vec![false; reached.len()];
    while let Some(at) = good.pop() {
        if !std::mem::replace(&mut settles[at], true) {
            good.extend(&came_from[at]);
        }
    }
    Future { reached, settles }
}
