//! Warm memory for the destination's QEMU.
//!
//! A virtual machine gives memory that has been free for 2 s back to its host, and touching it
//! again is slow. Without this module some migrations would take a second longer than others, and
//! the slower a way is, the more of its memory would be cold.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::anyhow;
use vmferry_memory::{
    GuestMemory, MemoryError, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout,
};

/// How much more than it has used so far QEMU finds free and warm.
const AHEAD_PAGES: u64 = (128 << 20) / PAGE_SIZE as u64;

/// Pages that are freed together.
const STEP_PAGES: u64 = (16 << 20) / PAGE_SIZE as u64;

/// Time between two looks at QEMU. QEMU uses 16 MiB in it at 4 GB/s.
const PERIOD: Duration = Duration::from_millis(4);

/// Memory that is freed as a QEMU uses memory, and the rest at the end.
pub struct WarmMemory {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<(), MemoryError>>,
}

impl WarmMemory {
    /// Populates this number of MiB for the QEMU whose PID will be in this file.
    pub fn allocate(mib: u64, pid_file: PathBuf) -> anyhow::Result<Self> {
        let pages = mib << 8;
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
        let memory = GuestMemory::allocate(&layout, MemoryKind::Thp)?;
        memory.populate(PageRun { slot: SlotId(0), first: 0, pages })?;
        let stop = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("warm memory".into()).spawn(move || {
            let mut freed = 0;
            while !of_thread.load(Ordering::Acquire) {
                let used = resident_pages(&pid_file);
                while freed < pages && used.is_some_and(|used| freed < used + AHEAD_PAGES) {
                    let run = PageRun {
                        slot: SlotId(0),
                        first: freed,
                        pages: STEP_PAGES.min(pages - freed),
                    };
                    memory.discard(run)?;
                    freed += run.pages;
                }
                std::thread::sleep(PERIOD);
            }
            Ok(())
        })?;
        Ok(Self { stop, thread })
    }

    /// Frees what is left.
    pub fn free(self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Release);
        Ok(self.thread.join().map_err(|_| anyhow!("a thread panicked"))??)
    }
}

/// The pages that the process in the file has in memory; none before there is one.
fn resident_pages(pid_file: &Path) -> Option<u64> {
    let pid = std::fs::read_to_string(pid_file).ok()?;
    let memory = std::fs::read_to_string(format!("/proc/{}/statm", pid.trim())).ok()?;
    memory.split(' ').nth(1)?.parse().ok()
}
