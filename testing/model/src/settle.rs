//! Whether a world without faults comes to rest with the guest on exactly one host.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::PoisonError;

use stateright::Model;

use crate::action::Action;
use crate::model::Handover;
use crate::world::World;

impl Handover {
    /// Whether from each world that can follow, and from this one, a settled one can be reached: then
    /// every schedule that is fair reaches it.
    pub(crate) fn settles(&self, world: &World) -> bool {
        let mut known = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// The shortest way from a world that may not settle to one that never will.
    pub(crate) fn way_to_doom(&self, from: &World) -> (Vec<Action>, World) {
        let (_, settling) = self.future(from, &HashSet::new());
        let mut seen = HashSet::from([from.clone()]);
        let mut queue = VecDeque::from([(from.clone(), Vec::new())]);
        while let Some((at, way)) = queue.pop_front() {
            if !settling.contains(&at) {
                return self.rest(at, way);
            }
            for (action, next) in self.next_steps(&at) {
                if seen.insert(next.clone()) {
                    let mut longer = way.clone();
                    longer.push(action);
                    queue.push_back((next, longer));
                }
            }
        }
        (Vec::new(), from.clone())
    }

    /// Follows what still must be done, so that the end of a trace is a state at rest.
    fn rest(&self, mut world: World, mut way: Vec<Action>) -> (Vec<Action>, World) {
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
            way.push(action);
            world = next;
        }
        (way, world)
    }

    /// All worlds that can follow, up to those that are known to settle, and those among them from
    /// which a settled one can be reached.
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
