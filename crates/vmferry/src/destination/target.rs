//! Where what the lanes bring goes.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_channel::Sender;
use vmferry_codec::PageHashes;
use vmferry_memory::GuestMemory;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};

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
    /// CPU time of the threads.
    pub cpu: CpuMeter,
    /// What was placed.
    pub placed: Arc<PlacedCounters>,
    /// Number of lanes.
    pub lanes: u8,
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
