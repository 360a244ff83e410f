//! The host's pool of huge pages, which the tests enlarge and put back.

use std::sync::{Mutex, MutexGuard, PoisonError};

use vmferry_memory::{GuestMemory, MemoryError, MemoryKind, SlotId, SlotLayout};

const POOL: &str = "/proc/sys/vm/nr_hugepages";

static POOL_USER: Mutex<()> = Mutex::new(());

/// Huge pages for one test at a time.
pub struct Pool {
    enlarged_by: u64,
    _alone: MutexGuard<'static, ()>,
}

/// At least so many free huge pages, or `None`, loudly.
pub fn huge_pages(test: &str, pages: u64) -> Option<Pool> {
    let alone = POOL_USER.lock().unwrap_or_else(PoisonError::into_inner);
    let before = size();
    // Whatever there is may be somebody else's.
    let refused = std::fs::write(POOL, (before + pages).to_string()).err();
    let pool = Pool { enlarged_by: size().saturating_sub(before), _alone: alone };
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: pages * 512 }];
    match GuestMemory::allocate(&layout, MemoryKind::Hugetlb) {
        Ok(_) => Some(pool),
        Err(error @ (MemoryError::HugePages { .. } | MemoryError::Map { .. })) => {
            eprintln!("SKIPPED: {test}: {error} ({refused:?})");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn size() -> u64 {
    let text = std::fs::read_to_string(POOL).unwrap_or_default();
    text.trim().parse().unwrap_or_default()
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.enlarged_by > 0 {
            // As much is taken away as was added: somebody else may have changed it meanwhile.
            let _ = std::fs::write(POOL, size().saturating_sub(self.enlarged_by).to_string());
        }
    }
}
