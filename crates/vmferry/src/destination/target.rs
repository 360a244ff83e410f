//! Where what the lanes bring goes.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::Sender;
use vmferry_codec::PageHashes;
use vmferry_memory::GuestMemory;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::MAX_LANES;

use super::io::Input;
use super::lanes::Lanes;
use super::place::PlacedCounters;
use super::streams::StreamLanes;
use crate::config::DestinationConfig;
use crate::cpu::CpuMeter;
use crate::error::MigrateError;
use crate::link::ControlSlot;

/// What all lanes of a session share.
#[derive(Clone)]
pub struct LaneContext {
    /// Where acknowledgements go.
    pub control: Arc<ControlSlot>,
    /// Where results go.
    pub results: Sender<Input>,
    /// Ends of rounds, of which one for each lane is among the results.
    pub ends: Arc<LaneEnds>,
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// What was placed.
    pub placed: Arc<PlacedCounters>,
    /// Number of lanes.
    pub lanes: u8,
}

/// How far each lane is: the end of the last round that it has placed whole. A source may end any
/// number of rounds while the session's thread is busy, and waits in no queue with them.
#[derive(Debug, Default)]
pub struct LaneEnds([LaneEnd; MAX_LANES as usize]);

#[derive(Debug, Default)]
struct LaneEnd {
    sequence: AtomicU64,
    told: AtomicBool,
}

impl LaneEnds {
    /// The end of a round of a lane; whether to tell the session.
    #[must_use]
    pub fn reach(&self, lane: u8, sequence: u64) -> bool {
        self.0.get(usize::from(lane)).is_some_and(|end| {
            end.sequence.fetch_max(sequence, Ordering::AcqRel);
            !end.told.swap(true, Ordering::AcqRel)
        })
    }

    /// How far a lane is. From now on the session is told again.
    pub fn take(&self, lane: u8) -> u64 {
        self.0.get(usize::from(lane)).map_or(0, |end| {
            end.told.store(false, Ordering::Release);
            end.sequence.load(Ordering::Acquire)
        })
    }
}

impl LaneContext {
    /// Tells the session that a lane has placed everything up to the end of a round.
    pub fn end_of_round(&self, lane: u8, sequence: u64) {
        if self.ends.reach(lane, sequence) {
            let _ = self.results.send(Input::LaneEnded { lane, sequence });
        }
    }
}

/// All lanes of a session at work. Dropped, none of its threads is left.
pub trait LaneSet {
    /// Makes a lane ready for a channel that was dialled `attempt` times before, and returns the last frame behind
    /// which the source goes on. `None` if that is no newer attempt than the one that is there: a recording, perhaps.
    ///
    /// A lane that has a channel loses it.
    fn expect(&mut self, lane: u8, attempt: u64) -> Option<u64>;

    /// Starts to receive on a lane's greeted channel, which was [expected](Self::expect).
    ///
    /// # Errors
    /// If the system has no thread left.
    fn join(
        &mut self,
        lane: u8,
        reader: ChannelReader,
        writer: ChannelWriter,
        closer: ChannelCloser,
    ) -> std::io::Result<()>;

    /// Whether a lane's present channel is the one that was dialled so often before.
    fn is_at(&self, lane: u8, attempt: u64) -> bool;

    /// Says of every lane how far it is.
    fn acknowledge(&self);
}

/// Memory that pages are placed in.
#[derive(Clone)]
pub struct MemoryTarget {
    /// The guest's memory.
    pub memory: GuestMemory,
    /// Hashes of the pages as last placed.
    pub hashes: Arc<PageHashes>,
}

/// A VMM's sockets that streams are written into.
#[derive(Clone)]
pub struct StreamTarget {
    /// By lane; each is taken once.
    pub sockets: Arc<Mutex<Vec<Option<UnixStream>>>>,
    /// Wrapping sum of the hashes of all pieces.
    pub digest: Arc<AtomicU64>,
}

/// Where a session's guest arrives.
pub enum Target {
    /// In memory.
    Memory(MemoryTarget),
    /// In a VMM.
    Streams(StreamTarget),
}

impl Target {
    /// Memory that nothing was placed in yet.
    pub fn memory(memory: GuestMemory) -> Self {
        let hashes = Arc::new(PageHashes::for_memory(&memory));
        Self::Memory(MemoryTarget { memory, hashes })
    }

    /// A VMM that waits for its streams.
    pub fn streams(sockets: Vec<UnixStream>) -> Self {
        let sockets = sockets.into_iter().map(Some).collect();
        Self::Streams(StreamTarget {
            sockets: Arc::new(Mutex::new(sockets)),
            digest: Arc::default(),
        })
    }

    /// The memory, where the engine places pages itself.
    pub fn guest_memory(&self) -> Option<&GuestMemory> {
        match self {
            Self::Memory(target) => Some(&target.memory),
            Self::Streams(_) => None,
        }
    }

    /// The digest of everything that has arrived.
    pub fn digest(&self) -> u64 {
        match self {
            Self::Memory(target) => target.hashes.sum(),
            Self::Streams(target) => target.digest.load(Ordering::Relaxed),
        }
    }

    /// Starts the lanes.
    ///
    /// # Errors
    /// If the system has no thread left, or the VMM takes another number of streams than there are lanes.
    pub fn lanes(
        &self,
        context: LaneContext,
        config: &DestinationConfig,
    ) -> Result<Box<dyn LaneSet>, MigrateError> {
        let no_thread = |source| MigrateError::Local { action: "start a thread", source };
        Ok(match self {
            Self::Memory(target) => {
                Box::new(Lanes::start(context, target.clone(), config).map_err(no_thread)?)
            }
            Self::Streams(target) => {
                let streams = lock(&target.sockets).len();
                if streams != usize::from(context.lanes) {
                    let lanes = context.lanes;
                    let reason = format!("{lanes} lanes for the {streams} streams of a VMM");
                    let channel = "control".into();
                    return Err(MigrateError::Protocol { channel, offset: 0, reason });
                }
                Box::new(StreamLanes::new(context, target.clone()))
            }
        })
    }
}

/// After a panic too: what is guarded is changed by single assignments.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_rounds_are_told_once_until_they_are_taken() {
        let ends = LaneEnds::default();
        let told = (1..100_000).filter(|sequence| ends.reach(3, *sequence)).count();
        assert_eq!((told, ends.take(3)), (1, 99_999));
        // An older one that is told late changes nothing, and is heard.
        assert!(ends.reach(3, 5));
        assert_eq!(ends.take(3), 99_999);
        assert!(!ends.reach(MAX_LANES, 1), "there is no such lane");
    }
}
