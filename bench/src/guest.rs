//! Guests without a machine, for benchmarks of the engine: memory, and nothing that runs.

use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, Resume, SourceVm, VmError};
use vmferry_dirty::{DirtyLog, UffdLog};
use vmferry_memory::{
    GuestBytes, GuestMemory, MemoryError, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout,
};
use vmferry_wire::GuestIdentity;

/// Memory of so many pages, populated, so that no measurement is of the kernel making pages.
pub fn memory(pages: u64) -> anyhow::Result<GuestMemory> {
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Private)?;
    memory.populate(whole(&memory))?;
    Ok(memory)
}

/// All pages of a memory with one slot.
pub fn whole(memory: &GuestMemory) -> PageRun {
    PageRun { slot: SlotId(0), first: 0, pages: memory.total_pages() }
}

/// Fills memory with pages that no codec shortens.
pub fn fill_incompressible(memory: &GuestMemory) -> anyhow::Result<()> {
    let mut page = vec![0_u8; PAGE_SIZE];
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for first in 0..memory.total_pages() {
        for word in page.chunks_exact_mut(8) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            word.copy_from_slice(&random.to_le_bytes());
        }
        memory.copy_in(PageRun { slot: SlotId(0), first, pages: 1 }, &page)?;
    }
    Ok(())
}

/// Writes zeros over all of a memory, with a thread for each processor.
pub fn clear(memory: &GuestMemory) -> anyhow::Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    let pages = memory.total_pages();
    std::thread::scope(|scope| {
        let clearing: Vec<_> = (0..threads)
            .map(|thread| {
                let first = pages * thread / threads;
                let pages = pages * (thread + 1) / threads - first;
                scope.spawn(move || memory.zero(PageRun { slot: SlotId(0), first, pages }))
            })
            .collect();
        for thread in clearing {
            let cleared: Result<(), MemoryError> =
                thread.join().map_err(|_| anyhow!("a thread has failed"))?;
            cleared?;
        }
        Ok(())
    })
}

/// A guest with this memory.
pub fn describe(memory: &GuestMemory) -> GuestDescription {
    GuestDescription {
        identity: GuestIdentity { uuid: uuid::Uuid::nil(), name: "bench".into() },
        vmm: "bench".into(),
        config: Vec::new(),
        layout: memory.layout(),
    }
}

/// A guest that stands still.
pub struct StillGuest {
    memory: GuestMemory,
    log: Arc<dyn DirtyLog>,
}

impl StillGuest {
    /// With userfaultfd's log; where there is none, nothing writes the memory all the same.
    pub fn new(memory: &GuestMemory) -> Self {
        let log: Arc<dyn DirtyLog> = match UffdLog::new(memory) {
            Ok(log) => Arc::new(log),
            Err(_) => Arc::new(()),
        };
        Self { memory: memory.clone(), log }
    }
}

impl Resume for StillGuest {
    fn resume(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}

impl SourceVm for StillGuest {
    fn describe(&self) -> GuestDescription {
        describe(&self.memory)
    }

    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        Arc::clone(&self.log)
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        Ok(Duration::ZERO)
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        Ok(GuestBytes::new())
    }
}

/// The destination's side: memory that is populated already.
pub struct Incoming(pub GuestMemory);

impl DestinationVm for Incoming {
    fn prepare(&mut self, _guest: &GuestDescription) -> Result<Landing, PrepareError> {
        Ok(Landing::Memory(self.0.clone()))
    }

    fn load(&mut self, _state: &[u8]) -> Result<(), VmError> {
        Ok(())
    }

    fn discard(&mut self) {}

    fn run(&mut self) -> Result<(), VmError> {
        Ok(())
    }
}
