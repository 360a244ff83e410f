//! Whether a world without faults reaches its goal.

use super::model::{ENDS, Finish, OPERATOR};
use super::world::World;
use crate::explorer::{DeadEnd, Explorable, Explored, path_to_dead_end, settles};

/// What must be reached after faults end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    /// Exactly one host has the guest, or an operator is needed. No operator acts.
    OneOrOperator,
    /// Exactly one host has the guest, and no other host has a paused copy of it. Operators act.
    One,
}

impl Goal {
    fn is_reached(self, world: &World) -> bool {
        match self {
            Self::OneOrOperator => world.is_settled() || world.waits_for_operator(),
            Self::One => world.is_settled() && !world.has_copy_left(),
        }
    }
}

impl Explored for World {
    fn in_words(&self) -> String {
        self.who_has_the_guest()
    }
}

impl Explorable for Finish {
    fn dead_end(&self, property: &str, from: &World) -> Option<DeadEnd<Self>> {
        let goal = match property {
            ENDS => Goal::OneOrOperator,
            OPERATOR => Goal::One,
            _ => return None,
        };
        Some(path_to_dead_end(&self.acting(goal), from, |world| goal.is_reached(world)))
    }
}

impl Finish {
    /// Whether every fair schedule reaches the goal.
    pub(super) fn settles(&self, world: &World, goal: Goal) -> bool {
        let known = &self.settling[goal as usize];
        settles(&self.acting(goal), world, known, |world| goal.is_reached(world))
    }

    fn acting(&self, goal: Goal) -> Self {
        Self { broken: self.broken, operators: goal == Goal::One, ..Self::default() }
    }
}
