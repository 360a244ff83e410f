//! The target of the received data.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use vmferry_codec::PageHashes;
use vmferry_memory::{GuestMemory, PageRun, Slot};
use vmferry_wire::MAX_LANES;

use super::place::PlacedCounters;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::{ControlSlot, DataChannel};
use crate::machine::destination::io::Input;

/// State shared by all lanes of a session.
#[derive(Clone)]
pub struct LaneContext {
    /// Channel for acknowledgements.
    pub control: Arc<ControlSlot>,
    /// Queue for results.
    pub results: Sender<Input>,
    /// Ends of rounds. At most one for each lane is in the results queue.
    pub ends: Arc<LaneEnds>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// Counters of what was placed.
    pub placed: Arc<PlacedCounters>,
    /// Number of lanes.
    pub lanes: u8,
}

/// The progress of each lane: the end of the last round that it has placed completely. A source may
/// end any number of rounds while the session's thread is busy, so these ends must not be queued.
#[derive(Debug, Default)]
pub struct LaneEnds([LaneEnd; MAX_LANES as usize]);

#[derive(Debug, Default)]
struct LaneEnd {
    sequence: AtomicU64,
    told: AtomicBool,
}

impl LaneEnds {
    /// Records the end of a lane's round. Returns whether to notify the session.
    #[must_use]
    pub fn reach(&self, lane: u8, sequence: u64) -> bool {
        self.0.get(usize::from(lane)).is_some_and(|end| {
            end.sequence.fetch_max(sequence, Ordering::AcqRel);
            !end.told.swap(true, Ordering::AcqRel)
        })
    }

    /// The progress of a lane. From now on the session is notified again.
    pub fn take(&self, lane: u8) -> u64 {
        self.0.get(usize::from(lane)).map_or(0, |end| {
            end.told.store(false, Ordering::Release);
            end.sequence.load(Ordering::Acquire)
        })
    }
}

impl LaneContext {
    /// Notifies the session that a lane has placed everything up to the end of a round.
    pub fn end_of_round(&self, lane: u8, sequence: u64) {
        if self.ends.reach(lane, sequence) {
            let _ = self.results.send(Input::LaneEnded { lane, sequence });
        }
    }
}

/// All running lanes of a session. After a drop, none of its threads is left.
pub trait LaneSet {
    /// Prepares a lane for a channel that was dialed `attempt` times before, and returns the last
    /// frame after which the source must continue. `None` if this attempt is not newer than the
    /// present channel's; it may be a replay.
    ///
    /// A lane that has a channel loses it.
    fn expect(&mut self, lane: u8, attempt: u64) -> Option<u64>;

    /// Starts receiving on a lane's greeted channel, which was [expected](Self::expect).
    ///
    /// # Errors
    /// The system can't create a thread.
    fn join(&mut self, lane: u8, channel: DataChannel) -> std::io::Result<()>;

    /// Whether a lane's present channel is the one that was dialed this number of times before.
    fn is_at(&self, lane: u8, attempt: u64) -> bool;

    /// Acknowledges the progress of every lane.
    fn acknowledge(&self);
}

/// The memory that pages are placed in.
#[derive(Clone)]
pub struct MemoryTarget {
    /// The guest's memory.
    pub memory: GuestMemory,
    /// Hashes of the pages as last placed.
    pub hashes: Arc<PageHashes>,
}

impl MemoryTarget {
    /// Frees pages that are outdated. They read as zeros then, as all pages do whose hashes are not
    /// known. Those on hugetlbfs are zeroed in place: a huge page can only be freed as a whole, and
    /// another process might take it.
    ///
    /// # Errors
    /// Pages that the guest has not, or an error from the system.
    pub fn free_outdated(&self, runs: &[PageRun]) -> Result<(), MigrateError> {
        let huge: Vec<bool> = self.memory.slots().iter().map(Slot::has_huge_pages).collect();
        for &run in runs {
            if huge.get(usize::from(run.slot.0)) == Some(&true) {
                self.memory.zero(run)?;
            } else {
                self.memory.discard(run)?;
            }
            self.hashes.forget(run);
        }
        Ok(())
    }
}

/// The sockets of a VMM that streams are written into.
#[derive(Clone)]
pub struct StreamTarget {
    /// Indexed by lane. Each is taken once.
    pub sockets: Arc<Mutex<Vec<Option<UnixStream>>>>,
    /// Wrapping sum of the hashes of all pieces.
    pub digest: Arc<AtomicU64>,
    /// With post-copy a stream may go on after the end of its lane: its socket is kept here, by
    /// lane, and not shut down. `None` without post-copy.
    pub kept: Option<Arc<Mutex<BTreeMap<u8, UnixStream>>>>,
}

impl StreamTarget {
    /// No stream goes on after the end of its lane.
    pub fn end_kept(&self) {
        for socket in self.kept.iter().flat_map(|kept| std::mem::take(&mut *kept.lock())) {
            // The VMM may have closed it already.
            let _ = socket.1.shutdown(Shutdown::Write);
        }
    }
}

/// Where a session's guest arrives.
pub enum Target {
    /// Memory of this process.
    Memory(MemoryTarget),
    /// A VMM's own migration streams.
    Streams(StreamTarget),
}

impl Target {
    /// Memory in which nothing was placed yet.
    pub fn memory(memory: GuestMemory) -> Self {
        let hashes = Arc::new(PageHashes::for_memory(&memory));
        Self::Memory(MemoryTarget { memory, hashes })
    }

    /// A VMM that waits for its streams, which may go on with post-copy.
    pub fn streams(sockets: Vec<UnixStream>, post_copy: bool) -> Self {
        let sockets = sockets.into_iter().map(Some).collect();
        Self::Streams(StreamTarget {
            sockets: Arc::new(Mutex::new(sockets)),
            digest: Arc::default(),
            kept: post_copy.then(Arc::default),
        })
    }

    /// The memory, if the engine places pages itself.
    pub fn guest_memory(&self) -> Option<&GuestMemory> {
        match self {
            Self::Memory(target) => Some(&target.memory),
            Self::Streams(_) => None,
        }
    }

    /// The digest of everything that was received.
    pub fn digest(&self) -> u64 {
        match self {
            Self::Memory(target) => target.hashes.sum(),
            Self::Streams(target) => target.digest.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use vmferry_kit::HugePages;
    use vmferry_memory::{MemoryKind, PAGE_SIZE, SlotId, SlotLayout};

    use super::*;

    #[test]
    fn lane_ends_notify_once_until_they_are_taken() {
        let ends = LaneEnds::default();
        let told = (1..100_000).filter(|sequence| ends.reach(3, *sequence)).count();
        assert_eq!((told, ends.take(3)), (1, 99_999));
        // An older sequence reported late changes nothing, but notifies.
        assert!(ends.reach(3, 5));
        assert_eq!(ends.take(3), 99_999);
        assert!(!ends.reach(MAX_LANES, 1), "there is no such lane");
    }

    /// A source that continues with pre-copy may say of such a page only that it is zero, which
    /// places nothing if no hash of the page is known.
    #[test]
    fn outdated_pages_read_as_zeros_in_every_kind_of_memory() {
        let _pool = HugePages::reserve(2);
        let slot = SlotId(0);
        for kind in [MemoryKind::Private, MemoryKind::Memfd, MemoryKind::Thp, MemoryKind::Hugetlb] {
            let layout = [SlotLayout { slot, gpa: 0, pages: 1024 }];
            let memory = GuestMemory::allocate(&layout, kind).unwrap();
            let hashes = Arc::new(PageHashes::for_memory(&memory));
            let target = MemoryTarget { memory, hashes };
            let page = |first: u64| PageRun { slot, first, pages: 1 };
            for first in 0..1024 {
                target.memory.copy_in(page(first), &[7; PAGE_SIZE]).unwrap();
            }
            let whole = PageRun { slot, first: 512, pages: 512 };
            target.free_outdated(&[page(3), page(700), whole]).unwrap();
            let content = |first| {
                let mut content = [1; PAGE_SIZE];
                target.memory.copy_out(page(first), &mut content).unwrap();
                content
            };
            for (first, byte) in [(2, 7), (3, 0), (4, 7), (700, 0), (1023, 0)] {
                assert_eq!(content(first), [byte; PAGE_SIZE], "page {first} of {kind}");
            }
        }
    }
}
