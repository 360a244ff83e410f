//! Whether a world without faults settles with the guest on exactly one host.

use stateright::Model;

use crate::action::Action;
use crate::explorer::{DeadEnd, Explorable, Explored, path_to_dead_end, settles};
use crate::model::{Handover, ONE_OWNER_IN_THE_END};
use crate::world::World;

impl Explored for World {
    fn in_words(&self) -> String {
        self.who_has_the_guest()
    }
}

impl Explorable for Handover {
    fn dead_end(&self, property: &str, from: &World) -> Option<DeadEnd<Self>> {
        (property == ONE_OWNER_IN_THE_END).then(|| {
            let (path, at) = path_to_dead_end(self, from, World::is_settled);
            self.rest(at, path)
        })
    }
}

impl Handover {
    /// Whether every fair schedule reaches a settled world.
    pub(crate) fn settles(&self, world: &World) -> bool {
        settles(self, world, &self.settling, World::is_settled)
    }

    /// Appends the pending steps, so that a trace ends in a state at rest.
    fn rest(&self, mut world: World, mut path: Vec<Action>) -> DeadEnd<Self> {
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
}
