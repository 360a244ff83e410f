//! Whether a world without faults reaches its goal.

use std::collections::{HashMap, HashSet, VecDeque};

use stateright::Model;

use super::action::Action;
use super::model::{Finish, Goal};
use super::world::World;

impl Finish {
    /// Whether the goal is reachable from this world and from all of its successors. Then every
    /// fair schedule reaches it.
    pub(super) fn settles(&self, world: &World, goal: Goal) -> bool {
        let mut known = self.settling[goal as usize].lock();
        if known.contains(world) {
            return true;
        }
        let (reached, settling) = self.future(world, goal, &known);
        let all = reached.iter().all(|world| settling.contains(world));
        if all {
            known.extend(settling);
        }
        all
    }

    /// The shortest path from a world that may not reach the goal to one that never will.
    pub(super) fn path_to_dead_end(&self, from: &World, goal: Goal) -> (Vec<Action>, World) {
        let (_, settling) = self.future(from, goal, &HashSet::new());
        let mut seen = HashSet::from([from.clone()]);
        let mut queue = VecDeque::from([(from.clone(), Vec::new())]);
        while let Some((at, path)) = queue.pop_front() {
            if !settling.contains(&at) {
                return (path, at);
            }
            for (action, next) in self.acting(goal).next_steps(&at) {
                if seen.insert(next.clone()) {
                    let mut longer = path.clone();
                    longer.push(action);
                    queue.push_back((next, longer));
                }
            }
        }
        (Vec::new(), from.clone())
    }

    fn acting(&self, goal: Goal) -> Self {
        Self { broken: self.broken, operators: goal == Goal::One, ..Self::default() }
    }

    /// All reachable worlds, up to those that are known to settle, and the subset of them from
    /// which the goal is reachable.
    fn future(
        &self,
        from: &World,
        goal: Goal,
        known: &HashSet<World>,
    ) -> (HashSet<World>, HashSet<World>) {
        let model = self.acting(goal);
        let mut came_from: HashMap<World, Vec<World>> = HashMap::from([(from.clone(), vec![])]);
        let mut queue = VecDeque::from([from.clone()]);
        let mut good = Vec::new();
        while let Some(at) = queue.pop_front() {
            if known.contains(&at) {
                good.push(at);
                continue;
            }
            if at.is_settled() || (goal == Goal::OneOrOperator && at.waits_for_operator()) {
                good.push(at.clone());
            }
            for next in model.next_states(&at) {
                let before = came_from.entry(next.clone()).or_insert_with(|| {
                    queue.push_back(next);
                    Vec::new()
                });
                before.push(at.clone());
            }
        }
        let mut settling = HashSet::new();
        while let Some(at) = good.pop() {
            if settling.insert(at.clone()) {
                good.extend(came_from[&at].iter().cloned());
            }
        }
        (came_from.into_keys().collect(), settling)
    }
}
