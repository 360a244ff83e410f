//! The traits that a VMM implements to use this engine.
//!
//! A source VMM gives access to its guest's memory and dirty log, and can be paused, saved and
//! resumed. A destination VMM allocates memory of the announced layout, loads the state and runs
//! the guest. The engine never interprets the device state and does not depend on the hypervisor.

mod causes;
pub mod free_pages;
pub mod left;
pub mod newer;
pub mod storage;
pub mod streamed;
pub mod told;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vmferry_dirty::DirtyLog;
use vmferry_faults::FaultRanges;
use vmferry_handover::{GuestIdentity, Resume, SessionId, VmError};
use vmferry_memory::{GuestBytes, GuestMemory, SlotLayout};

pub use self::causes::{PostCopyFailed, PoweredOff};
use self::free_pages::FreePages;
use self::storage::{DestinationStorage, SourceStorage};
use self::streamed::{LateEnd, LateStreams};

/// What the destination must know to create a machine of the same kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestDescription {
    /// The guest's identity, which is the same on every host.
    pub identity: GuestIdentity,
    /// The VMM and machine type, such as `microvm/kvm`. A destination of another kind refuses.
    pub vmm: String,
    /// The machine's configuration in the VMM's own format, at most 16 KiB.
    pub config: Vec<u8>,
    /// The memory slots, in the order of their numbers.
    pub layout: Vec<SlotLayout>,
}

/// The cost of the pause besides the pages. Leaving `KVM_RUN`, saving and loading some hundred
/// kilobytes of state and syncing two journal records took 1 to 5 ms on the machines measured (see
/// `vmferry demo`). Round trips come on top and are measured.
pub(crate) const FIXED_COST: Duration = Duration::from_millis(4);

/// The cost of the vCPU and device state, as far as the VMM knows it before the guest stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateEstimate {
    /// Size of the state in bytes. It is transferred during the downtime.
    pub bytes: u64,
    /// Time to stop, save, load and start on fast hardware, without the transfer.
    pub handling: Duration,
}

impl Default for StateEstimate {
    /// The estimate for a small VMM.
    fn default() -> Self {
        Self { bytes: 0, handling: FIXED_COST }
    }
}

/// A running guest at the source, as the engine uses it.
///
/// The engine owns the value while it migrates. Dropping it without a call to
/// `resume` leaves the guest in its present state.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// use vmferry::{GuestDescription, Resume, SourceVm, VmError};
/// use vmferry_dirty::DirtyLog;
/// use vmferry_memory::{GuestBytes, GuestMemory};
/// use vmferry_wire::GuestIdentity;
///
/// /// A guest that is on its way; `Vcpus` is the VMM's own.
/// struct Leaving {
///     identity: GuestIdentity,
///     memory: GuestMemory,
///     log: Arc<dyn DirtyLog>,
///     vcpus: Vcpus,
/// }
///
/// impl Resume for Leaving {
///     fn resume(&mut self) -> Result<(), VmError> {
///         self.vcpus.run()
///     }
/// }
///
/// impl SourceVm for Leaving {
///     fn describe(&self) -> GuestDescription {
///         GuestDescription {
///             identity: self.identity.clone(),
///             vmm: "firebird/3".into(),
///             config: self.vcpus.count().to_le_bytes().into(),
///             layout: self.memory.layout(),
///         }
///     }
///     fn memory(&self) -> GuestMemory {
///         self.memory.clone()
///     }
///     fn dirty_log(&self) -> Arc<dyn DirtyLog> {
///         Arc::clone(&self.log)
///     }
///     fn pause(&mut self) -> Result<Duration, VmError> {
///         self.vcpus.pause() // Nothing writes memory any more, and has not for so long.
///     }
///     fn save(&mut self) -> Result<GuestBytes, VmError> {
///         self.vcpus.state()
///     }
/// }
/// # struct Vcpus;
/// # impl Vcpus {
/// #     fn run(&mut self) -> Result<(), VmError> { Ok(()) }
/// #     fn pause(&mut self) -> Result<Duration, VmError> { Ok(Duration::ZERO) }
/// #     fn state(&self) -> Result<GuestBytes, VmError> { Ok(GuestBytes::new()) }
/// #     fn count(&self) -> u32 { 1 }
/// # }
/// ```
pub trait SourceVm: Resume {
    /// Describes the guest. Called once, before anything is sent.
    fn describe(&self) -> GuestDescription;

    /// The guest's memory, mapped in this process.
    fn memory(&self) -> GuestMemory;

    /// The log of all writes to that memory, by the guest and by the VMM itself.
    fn dirty_log(&self) -> Arc<dyn DirtyLog>;

    /// Stops the guest. On return every vCPU has left `KVM_RUN` with its pending exit completed
    /// (`immediate_exit`), the devices are quiesced, and nothing writes guest memory.
    ///
    /// Returns for how long the guest has been paused by then: a VMM may have work to do first
    /// while the guest still runs. The downtime is counted from the moment of the pause.
    ///
    /// # Errors
    /// The guest must then still run, or be resumable by [`resume`](Resume::resume).
    fn pause(&mut self) -> Result<Duration, VmError>;

    /// Saves the state of vCPUs, interrupt controllers, clocks and devices of the paused guest,
    /// without memory. Core dumps exclude the returned bytes, on their whole way to
    /// [`DestinationVm::load`]. Buffers in which the VMM assembles the state are for the VMM to
    /// protect.
    ///
    /// # Errors
    /// The guest stays paused and unchanged.
    fn save(&mut self) -> Result<GuestBytes, VmError>;

    /// The same for a destination that speaks this version of the protocol: the state in a format
    /// that a release of that version can read. A VMM whose format has not changed since version 1
    /// can use the default.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    fn save_for(&mut self, _protocol: u16) -> Result<GuestBytes, VmError> {
        self.save()
    }

    /// The VMM and its release, such as `QEMU 10.0.2`, for messages about incompatible releases.
    /// Empty by default.
    fn release(&self) -> String {
        String::new()
    }

    /// The size and cost of what [`save`](Self::save) will return.
    fn state_estimate(&self) -> StateEstimate {
        StateEstimate::default()
    }

    /// Called before the dirty log is started or harvested while the guest runs. The VMM may pause
    /// the guest until the guard is finished or dropped.
    ///
    /// The default is for a VMM without devices that pin guest pages: see
    /// [`HarvestGuard::finish`].
    ///
    /// # Errors
    /// The guest can't be harvested now. It runs.
    fn begin_harvest(&mut self) -> Result<Box<dyn HarvestGuard + '_>, VmError> {
        Ok(Box::new(()))
    }

    /// Limits the guest's vCPUs to `100 - percent` percent of their time, so that the guest writes
    /// less. 0 removes every limit.
    ///
    /// # Errors
    /// This VMM can't throttle, or is not permitted to.
    fn throttle(&mut self, percent: u8) -> Result<(), VmError> {
        if percent == 0 { Ok(()) } else { Err("this VMM can't throttle its vCPUs".into()) }
    }

    /// Bytes that the guest uses in each memory slot, as far as they are known. A destination with
    /// less memory refuses the guest before anything is sent. By default this is the number of
    /// populated pages with non-zero content, estimated from a sample.
    fn used_bytes(&self) -> Vec<Option<u64>> {
        self.memory().used_bytes()
    }

    /// All sources of information about pages that need not be sent, other than pages that were
    /// never populated: a balloon whose guest hints its free pages, a back end from which pages are
    /// punched out. Called once.
    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        Vec::new()
    }

    /// The guest's storage, if this VMM can read it.
    fn storage(&mut self) -> Option<&mut dyn SourceStorage> {
        None
    }
}

/// A harvest of the dirty log of a running guest. Dropped without a call to
/// [`finish`](Self::finish), it continues the guest that the VMM has paused for it.
pub trait HarvestGuard {
    /// Returns once every device request that was in flight at the end of the harvest has
    /// completed, and the guest runs again. The result is for how long the guest may have been
    /// paused. No page of this harvest is copied before this returns.
    ///
    /// A device that pins guest pages for a request (`O_DIRECT`) writes them later without a fault,
    /// so write protection does not see it. However, pinning a page for writing counts as a write:
    /// the page is in this harvest or an earlier one, and a copy made after the request has
    /// completed contains the data it wrote. Without such devices there is nothing to wait for.
    /// This does not cover a device that writes pages which it has pinned permanently: its guest
    /// can't be migrated in this way.
    ///
    /// # Errors
    /// The requests could not be waited for. The guest runs.
    fn finish(self: Box<Self>) -> Result<Duration, VmError>;
}

/// Nothing to wait for.
impl HarvestGuard for () {
    fn finish(self: Box<Self>) -> Result<Duration, VmError> {
        Ok(Duration::ZERO)
    }
}

/// Shares of the memory for which a thread handles faults, with the default way of registering it.
/// More than two did not raise the rate of faults on two cores.
pub const FAULT_SHARES: usize = 2;

/// Where an arriving guest is written.
#[derive(Debug)]
pub enum Landing {
    /// Zeroed and unpopulated memory of the announced layout.
    Memory(GuestMemory),
    /// A VMM that accepts the [streams](crate::vmm::streamed) of the VMM at the source: the sockets
    /// that they are written into, one for each lane.
    Streams(Vec<UnixStream>),
}

/// A machine at the destination that a guest arrives in, as the engine uses it.
///
/// ```
/// use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
/// use vmferry_memory::{GuestMemory, MemoryKind};
///
/// /// A machine that a guest may come to; `Machine` is the VMM's own.
/// #[derive(Default)]
/// struct Arriving(Option<Machine>);
///
/// impl DestinationVm for Arriving {
///     fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
///         if guest.vmm != "firebird/3" {
///             let reason = format!("this is firebird/3, not {}", guest.vmm);
///             return Err(PrepareError::Incompatible(reason));
///         }
///         let memory = GuestMemory::allocate(&guest.layout, MemoryKind::Private)
///             .map_err(|error| PrepareError::Vm(error.into()))?;
///         self.0 = Some(Machine::new(&memory));
///         Ok(Landing::Memory(memory))
///     }
///     fn load(&mut self, state: &[u8]) -> Result<(), VmError> {
///         self.0.as_mut().ok_or("no guest was announced")?.load(state)
///     }
///     fn discard(&mut self) {
///         self.0 = None;
///     }
///     fn run(&mut self) -> Result<(), VmError> {
///         self.0.as_mut().ok_or("no guest was announced")?.run()
///     }
/// }
/// # struct Machine;
/// # impl Machine {
/// #     fn new(_: &GuestMemory) -> Self { Self }
/// #     fn load(&mut self, _: &[u8]) -> Result<(), VmError> { Ok(()) }
/// #     fn run(&mut self) -> Result<(), VmError> { Ok(()) }
/// # }
/// ```
pub trait DestinationVm: Send + 'static {
    /// Checks that this host can run the described guest, and allocates what it arrives in.
    ///
    /// # Errors
    /// The description does not match this host. The text is shown at both hosts.
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError>;

    /// Compares a guest with this VMM as [`prepare`](Self::prepare) does, and changes nothing. A
    /// [probe](crate::probe) asks this while no guest is arriving.
    ///
    /// `None` if the VMM can't compare them beforehand, as in the default.
    fn would_take(&mut self, _guest: &GuestDescription) -> Option<Result<(), PrepareError>> {
        None
    }

    /// Announces the session of the guest, whose journal is in this directory. A VMM that outlives
    /// this process writes a note there, by which the next process finds it: after a restart, a
    /// guest that this host owns is run and any other is ended. The default does nothing, for a
    /// guest that dies with the process.
    ///
    /// # Errors
    /// The note can't be written. The guest is refused.
    fn opened(&mut self, _session: SessionId, _journals: &Path) -> Result<(), VmError> {
        Ok(())
    }

    /// The guest was paused at the source before the migration, not by the engine.
    /// [`run`](Self::run) must take it over and leave it paused. Called before
    /// [`load`](Self::load).
    ///
    /// # Errors
    /// The VMM does not support paused guests, as in the default. The migration ends and the guest
    /// stays at the source.
    fn stay_paused(&mut self) -> Result<(), VmError> {
        Err("the guest is paused, and this VMM takes running guests only".into())
    }

    /// Permits that the guest runs before all its pages have arrived, with post-copy. Asked after
    /// [`prepare`](Self::prepare). Its memory is then registered with userfaultfd, and each access
    /// to a missing page waits until it has arrived. So every access to guest memory must be one by
    /// which the kernel sees a fault: not those of devices of the host (VFIO), and not those of
    /// other processes that have the memory mapped (vhost-user). Nothing may free pages meanwhile,
    /// such as a balloon: a freed page would be missing again.
    ///
    /// # Errors
    /// Why it may not. The source is told. The default is that the VMM does not support it.
    fn takes_post_copy(&self) -> Result<(), VmError> {
        Err("this VMM does not support post-copy".into())
    }

    /// Registers the prepared memory for [missing pages](vmferry_faults::FaultRanges). The default
    /// is for memory whose only mapping is in this process.
    ///
    /// # Errors
    /// The system lacks userfaultfd, or does not permit it. The guest stays at the source.
    fn register_faults(&mut self, memory: &GuestMemory) -> Result<FaultRanges, VmError> {
        Ok(FaultRanges::register(memory, FAULT_SHARES)?)
    }

    /// The streams that begin when a carried guest has been stopped with post-copy. Called once,
    /// before [`load`](Self::load), which then returns as soon as the guest can run: its VMM
    /// requests the rest itself.
    ///
    /// # Errors
    /// The VMM's error, or it takes no streams, as in the default.
    fn late_streams(&mut self) -> Result<LateStreams, VmError> {
        Err("this VMM takes no streams".into())
    }

    /// Ends the streams of a carried guest's VMM, as far as they have not ended, and connects it to
    /// new ones: the guest runs, and one of the processes that carried them has died. Called in
    /// post-copy only.
    ///
    /// # Errors
    /// The VMM's error, as in the default. It can be tried again.
    fn reconnect(&mut self) -> Result<LateStreams, VmError> {
        Err("this VMM takes no streams".into())
    }

    /// Whether a carried guest has all its pages. Called when its VMM has closed the stream of its
    /// requests, and again each second while it [awaits](LateEnd::Awaited) some.
    ///
    /// # Errors
    /// The VMM could not receive all pages. The guest is damaged.
    fn late_end(&mut self) -> Result<LateEnd, VmError> {
        Err("this VMM takes no streams".into())
    }

    /// The storage of the prepared guest, if it must be compared: see
    /// [`storage`]. Asked after [`prepare`](Self::prepare).
    fn storage(&mut self) -> Option<&mut dyn DestinationStorage> {
        None
    }

    /// Loads the state that [`SourceVm::save`] returned. All memory is placed by then, or with
    /// post-copy fetched when it is touched. A carried
    /// guest has no memory to place: every byte of its streams has been written to the VMM, and on
    /// return the VMM has loaded them. The guest must not run yet.
    ///
    /// # Errors
    /// The state can't be loaded. The migration ends and the source's guest runs on.
    fn load(&mut self, state: &[u8]) -> Result<(), VmError>;

    /// The VMM and its release, such as `QEMU 10.0.2`, for messages about incompatible releases.
    /// Empty by default.
    fn release(&self) -> String {
        String::new()
    }

    /// Discards everything that was allocated since [`prepare`](Self::prepare), which may then be
    /// called again for another attempt. The guest never ran.
    fn discard(&mut self);

    /// Whether no further guest can be accepted after one that was [discarded](Self::discard).
    /// Listening ends then.
    fn is_spent(&self) -> bool {
        false
    }

    /// Runs the guest. Called at most once, and only after the handover is journaled.
    ///
    /// # Errors
    /// This host owns the guest from now on, so an error here is a crash of the guest and not a
    /// failed migration.
    fn run(&mut self) -> Result<(), VmError>;

    /// Whether the VMM, a process of its own that has ended, was told to end: its guest was powered
    /// off, or an operator has quit it. Called once while the guest lacks pages. By default it has
    /// crashed.
    fn ended_in_order(&mut self) -> bool {
        false
    }

    /// The guest runs and lacks pages. A VMM that shows how they arrive keeps `fetch`. The default
    /// does nothing.
    fn fetch_begins(&mut self, _fetch: crate::destination::FetchHandle) {}

    /// No page is missing any more, by the journal too. The default does nothing.
    fn fetch_ends(&mut self) {}
}

/// Why a destination can't take a guest.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The guest is not the one that this destination was started for.
    #[error("this destination expects guest {expected}, not {offered}")]
    Identity {
        /// Name or UUID that the destination was started for.
        expected: String,
        /// Name or UUID that the source offered.
        offered: String,
    },
    /// The guest's memory slots are not those that this destination was started for.
    #[error("memory layout differs: this destination expects {expected}, the source has {offered}")]
    Layout {
        /// The layout that the destination was started for, in words.
        expected: String,
        /// The layout that the source offered, in words.
        offered: String,
    },
    /// Another VMM, another machine type, or a configuration that this build does not know.
    #[error("incompatible machine: {0}")]
    Incompatible(String),
    /// This host has too little memory for the guest.
    #[error("too little memory at the destination: {0}")]
    NoRoom(String),
    /// The target of the guest is in use, or may be.
    #[error("in use: {0}")]
    InUse(String),
    /// This host failed.
    #[error("the destination machine could not be made")]
    Vm(#[source] VmError),
}
