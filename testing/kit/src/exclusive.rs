//! Resources of the machine that only one test may use at a time, whichever program it is in.

use std::fs::{File, OpenOptions};
use std::path::Path;

/// The right to use a resource, until drop.
#[derive(Debug)]
pub struct Exclusive(File);

impl Exclusive {
    /// Waits until no other test, of this program or another one, uses the resource.
    ///
    /// # Panics
    /// If the lock's file in `target/` can't be created.
    #[must_use]
    pub fn lock(resource: &str) -> Self {
        let locks = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/test-locks");
        std::fs::create_dir_all(&locks).expect("a directory in target/ can be created");
        let path = locks.join(resource);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = file.expect("a file in target/ can be created");
        file.lock().expect("a file can be locked");
        Self(file)
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        // Not left to the close: a child process that has not executed its program yet has a
        // duplicate of the descriptor.
        let _ = self.0.unlock();
    }
}
