//! Whether a world without faults settles with the guest on exactly one host.

use std::collections::{HashMap, HashSet, VecDeque};

use stateright::Model;

use crate::action::Action;
use crate::model::Handover;
use crate::world::World;

impl Handover {
    /// Whether a settled world is reachable from this world and from all of its successors. Then
    /// every fair schedule reaches one.
    pub(crate) fn settles(&self, world: &World) -> bool {
        let mut known = self.settling.lock();
        if known.contains(world) {
            return true;
        }
        let (reached, settling) = self.future(world, &known);
        let all = reached.iter().all(|world| settling.contains(world));
        if all {
            known.extend(settling);
        }
        all
    }

    /// The shortest path from a world that may not settle to one that never will.
    pub(crate) fn path_to_dead_end(&self, from: &World) -> (Vec<Action>, World) {
        let (_, settling) = self.future(from, &HashSet::new());
        let mut seen = HashSet::from([from.clone()]);
        let mut queue = VecDeque::from([(from.clone(), Vec::new())]);
        while let Some((at, path)) = queue.pop_front() {
            if !settling.contains(&at) {
                return self.rest(at, path);
            }
            for (action, next) in self.next_steps(&at) {
                if seen.insert(next.clone()) {
                    let mut longer = path.clone();
                    longer.push(action);
                    queue.push_back((next, longer));
                }
            }
        }
        (Vec::new(), from.clone())
    }

    /// Appends the pending steps, so that a trace ends in a state at rest.
    fn rest(&self, mut world: World, mut path: Vec<Action>) -> (Vec<Action>, World) {
        let forced = |action: &Action| {
            matches!(
                action,
                Action::SourceDoes { .. }
                    | Action::DestinationDoes(_)
                    | Action::SourceWrote { .. }
                    | Action::DestinationWrote { .. }
            )
        };
        while let Some((action, next)) =
            self.next_steps(&world).into_iter().find(|(action, _)| forced(action))
        {
            path.push(action);
            world = next;
        }
        (path, world)
    }

    /// All reachable worlds, up to those that are known to settle, and the subset of them from
    /// which a settled world is reachable.
    fn future(&self, from: &World, known: &HashSet<World>) -> (HashSet<World>, HashSet<World>) {
        let mut came_from: HashMap<World, Vec<World>> = HashMap::from([(from.clone(), vec![])]);
        let mut queue = VecDeque::from([from.clone()]);
        let mut good = Vec::new();
        while let Some(at) = queue.pop_front() {
            if known.contains(&at) {
                good.push(at);
                continue;
            }
            if at.is_settled() {
                good.push(at.clone());
            }
            for next in self.next_states(&at) {
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
