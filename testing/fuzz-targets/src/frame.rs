//! Any bytes, taken for frames.

use super::world::World;

/// Reads and places frames until there is none, or one is refused.
pub fn run(mut data: &[u8]) {
    World::with_fresh(|world| while let Ok(Some(_)) = world.place(&mut data) {});
}
