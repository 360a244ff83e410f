//! The host's pool of huge pages of 2 MiB, which tests enlarge and restore.

use crate::Exclusive;

const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// Makes the kernel move pages together.
const COMPACT: &str = "/proc/sys/vm/compact_memory";

const COMPACTIONS: u32 = 5;

/// Huge pages for one test at a time; the pool shrinks again on drop.
#[derive(Debug)]
pub struct HugePages {
    enlarged_by: u64,
    _alone: Exclusive,
}

impl HugePages {
    /// Enlarges the pool by this number of pages.
    ///
    /// # Panics
    /// If fewer are free afterward.
    #[must_use]
    pub fn reserve(pages: u64) -> Self {
        let alone = Exclusive::lock("huge-pages");
        let before = size();
        // Free huge pages may belong to another process.
        let mut written = std::fs::write(POOL, (before + pages).to_string());
        for _ in 0..COMPACTIONS {
            if Self::free() >= pages {
                break;
            }
            // Memory is in pieces while other tests run.
            let _ = std::fs::write(COMPACT, "1");
            written = std::fs::write(POOL, (before + pages).to_string());
        }
        let pool = Self { enlarged_by: size().saturating_sub(before), _alone: alone };
        let free = Self::free();
        assert!(free >= pages, "this test needs {pages} huge pages, {free} are free: {written:?}");
        pool
    }

    /// The free huge pages of the host. Other tests change their number at any time.
    #[must_use]
    pub fn free() -> u64 {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
        line.and_then(|number| number.trim().parse().ok()).unwrap_or_default()
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if self.enlarged_by > 0 {
            // Removes as many pages as were added: another process may have changed the pool
            // meanwhile.
            let _ = std::fs::write(POOL, size().saturating_sub(self.enlarged_by).to_string());
        }
    }
}

fn size() -> u64 {
    let text = std::fs::read_to_string(POOL).unwrap_or_default();
    text.trim().parse().unwrap_or_default()
}
