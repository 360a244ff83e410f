//! Guests that consist only of memory, for benchmarks of the engine.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use fastrand::Rng;
use vmferry::destination::{Owned, Received, Stop, receive};
use vmferry::source::{Orders, SourceOutcome, migrate};
use vmferry::stats::SourceStats;
use vmferry::{
    DestinationConfig, DestinationVm, GuestDescription, HarvestGuard, Landing, PrepareError,
    Resume, SourceConfig, SourceVm, StateEstimate, VmError,
};
use vmferry_dirty::{DirtyLog, UffdLog};
use vmferry_memory::{
    GuestBytes, GuestMemory, MemoryError, MemoryKind, PAGE_SIZE, PageRun, SlotId, SlotLayout,
};
use vmferry_transport::{Dialer, Listener};
use vmferry_wire::GuestIdentity;

/// Allocates and populates `pages` pages, so that no measurement includes page faults.
pub fn memory(pages: u64) -> anyhow::Result<GuestMemory> {
    let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages }];
    let memory = GuestMemory::allocate(&layout, MemoryKind::Private)?;
    memory.populate(whole(&memory))?;
    Ok(memory)
}

/// All pages of a memory that has one slot.
pub fn whole(memory: &GuestMemory) -> PageRun {
    PageRun { slot: SlotId(0), first: 0, pages: memory.total_pages() }
}

/// Fills memory with incompressible pages.
pub fn fill_incompressible(memory: &GuestMemory) -> anyhow::Result<()> {
    let mut page = vec![0; PAGE_SIZE];
    let mut random = Rng::with_seed(1);
    for first in 0..memory.total_pages() {
        random.fill(&mut page);
        memory.copy_in(PageRun { slot: SlotId(0), first, pages: 1 }, &page)?;
    }
    Ok(())
}

/// Zeroes the memory with one thread per processor.
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
                thread.join().map_err(|_| anyhow!("a thread panicked"))?;
            cleared?;
        }
        Ok(())
    })
}

/// Migrates a guest between two threads of this process. Returns what both sides report.
///
/// # Errors
/// The migration failed.
pub fn migrate_here<S: SourceVm, D: DestinationVm + Send>(
    (vm, dialer, source): (S, &Dialer, SourceConfig),
    (incoming, listener, destination): (D, Listener, &DestinationConfig),
) -> anyhow::Result<(Box<SourceStats>, Box<Owned<D>>)> {
    let (outcome, received) = std::thread::scope(|scope| {
        let receiving = scope
            .spawn(move || receive(listener, incoming, destination, &Stop::default(), &mut |_| {}));
        (migrate(vm, dialer, source, &Orders::new(), &mut |_| {}), receiving.join())
    });
    let stats = match outcome {
        SourceOutcome::Given { stats, .. } => stats,
        SourceOutcome::Kept { error, .. } | SourceOutcome::Lost { error, .. } => {
            return Err(error).context("the migration failed");
        }
    };
    match received {
        Ok(Received::Owns(owned)) => Ok((stats, owned)),
        _ => bail!("the destination does not own the guest"),
    }
}

/// A source guest that consists only of its memory. `B` says what the guest does.
pub struct MemoryGuest<B = ()> {
    memory: GuestMemory,
    log: Arc<dyn DirtyLog>,
    behavior: B,
}

/// What a [`MemoryGuest`] does while it migrates. The guest `()` does nothing.
pub trait Behavior: Send + 'static {
    /// Pauses the guest. After this it does not write its memory.
    ///
    /// # Errors
    /// The guest cannot be paused.
    fn pause(&mut self) -> Result<(), VmError> {
        Ok(())
    }

    /// Resumes the guest.
    fn resume(&mut self) {}

    /// Does the guest's work between two rounds.
    ///
    /// # Errors
    /// The memory cannot be written.
    fn between_rounds(&mut self, _memory: &GuestMemory) -> Result<(), VmError> {
        Ok(())
    }

    /// Estimates the state besides the memory.
    fn state_estimate(&self) -> StateEstimate {
        StateEstimate::default()
    }
}

impl Behavior for () {}

/// State estimate of guests that are never handed over. Their downtime limits are so low that their
/// pages never fit. The engine would refuse a limit below the cost of a handover without pages, so
/// this estimate leaves only the round trips.
pub const NO_STATE: StateEstimate = StateEstimate { bytes: 0, handling: Duration::ZERO };

/// The error when the engine pauses a guest that must never be handed over.
pub fn never_paused() -> VmError {
    "this guest must not be handed over".into()
}

impl MemoryGuest {
    /// An idle guest. If userfaultfd is missing it has no dirty log; nothing writes its memory
    /// anyway.
    pub fn idle(memory: &GuestMemory) -> Self {
        let log: Arc<dyn DirtyLog> = match UffdLog::new(memory) {
            Ok(log) => Arc::new(log),
            Err(_) => Arc::new(()),
        };
        Self::new(memory, log, ())
    }
}

impl<B: Behavior> MemoryGuest<B> {
    /// A guest with this memory, dirty log and behavior.
    pub fn new(memory: &GuestMemory, log: Arc<dyn DirtyLog>, behavior: B) -> Self {
        Self { memory: memory.clone(), log, behavior }
    }
}

impl<B: Behavior> Resume for MemoryGuest<B> {
    fn resume(&mut self) -> Result<(), VmError> {
        self.behavior.resume();
        Ok(())
    }
}

impl<B: Behavior> SourceVm for MemoryGuest<B> {
    fn describe(&self) -> GuestDescription {
        GuestDescription {
            identity: GuestIdentity { uuid: uuid::Uuid::nil(), name: "bench".into() },
            vmm: "bench".into(),
            config: Vec::new(),
            layout: self.memory.layout(),
        }
    }

    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        Arc::clone(&self.log)
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        self.behavior.pause()?;
        Ok(Duration::ZERO)
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        Ok(GuestBytes::new())
    }

    fn state_estimate(&self) -> StateEstimate {
        self.behavior.state_estimate()
    }

    fn begin_harvest(&mut self) -> Result<Box<dyn HarvestGuard + '_>, VmError> {
        self.behavior.between_rounds(&self.memory)?;
        Ok(Box::new(()))
    }
}

/// A destination whose memory is already populated.
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
