//! Any bytes, read as frames.

use super::world::World;

/// Reads and places frames until the end or an error.
pub fn run(mut data: &[u8]) {
    World::with_fresh(|world| while let Ok(Some(_)) = world.place(&mut data) {});
}
