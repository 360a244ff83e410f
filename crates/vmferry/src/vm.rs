//! The traits that a VMM implements to be migrated by this engine.
//!
//! A source VMM lends its guest memory and dirty log and can be paused, saved and resumed; a
//! destination VMM makes memory of the announced layout, loads the state and runs. The engine
//! never looks into the device state and never knows what hypervisor is below.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestBytes, GuestMemory, SlotLayout};
use vmferry_wire::{GuestIdentity, SessionId};

use crate::free_pages::FreePages;

/// An error that a VMM reports to the engine: the chain is kept for the local user, the peer
/// gets its text only.
pub type VmError = Box<dyn std::error::Error + Send + Sync>;

/// What the destination must know to make a machine of the same kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestDescription {
    /// Who the guest is, on every host that it visits.
    pub identity: GuestIdentity,
    /// The VMM and machine type, such as `microvm/kvm`. A destination of another kind refuses.
    pub vmm: String,
    /// The machine's configuration in the VMM's own format, at most 16 KiB.
    pub config: Vec<u8>,
    /// The memory slots, in the order of their numbers.
    pub layout: Vec<SlotLayout>,
}

/// A guest that can be let run on: all that is done with it where the process that migrated it has
/// died and another one takes over.
pub trait Resume: Send + 'static {
    /// Lets the paused guest run on. Idempotent on a guest that runs.
    ///
    /// # Errors
    /// Whatever keeps a vCPU or a device from starting.
    fn resume(&mut self) -> Result<(), VmError>;

    /// Whether somebody else than the engine has paused the guest, such as an operator.
    /// [`resume`](Self::resume) leaves such a guest paused, and it arrives paused. Asked once its
    /// state is saved.
    fn is_paused_by_others(&self) -> bool {
        false
    }
}

/// The guest has powered off by itself: there is nothing to move. An error of a VMM with this one
/// in its chain ends the migration with these words on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest has powered off")]
pub struct PoweredOff;

impl PoweredOff {
    /// Whether a VMM says that.
    pub(crate) fn is_in(error: &VmError) -> bool {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&**error);
        while let Some(error) = cause {
            if error.is::<Self>() {
                return true;
            }
            cause = error.source();
        }
        false
    }
}

/// What the state of vCPUs and devices will cost, as far as the VMM knows before the guest stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateEstimate {
    /// Its size in bytes, which travel while the guest stands still.
    pub bytes: u64,
    /// Stopping, saving, loading and starting, on fast hardware and without the transfer.
    pub handling: Duration,
}

impl Default for StateEstimate {
    /// A small VMM's.
    fn default() -> Self {
        Self { bytes: 0, handling: crate::convergence::FIXED_COST }
    }
}

/// A running guest, as the engine needs it at the source.
///
/// The engine owns the value while it migrates. Whoever drops it without resuming it leaves
/// the guest in the state that it was in.
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

    /// The log of every write to that memory: the guest's and the VMM's own.
    fn dirty_log(&self) -> Arc<dyn DirtyLog>;

    /// Stops the guest. On return every vCPU has left `KVM_RUN` with its pending exit completed
    /// (`immediate_exit`), the devices are quiet, and nothing writes guest memory any more.
    ///
    /// Returns for how long the guest has stood still by then: a VMM may have things to do first,
    /// while it still runs. The downtime is counted from there.
    ///
    /// # Errors
    /// The guest must then still run, or be resumable by [`resume`](Resume::resume).
    fn pause(&mut self) -> Result<Duration, VmError>;

    /// Saves the state of vCPUs, interrupt controllers, clocks and devices of the paused guest,
    /// without memory. Core dumps leave the returned bytes out, on their whole way to
    /// [`DestinationVm::load`]; what a VMM collects them in is its own to protect.
    ///
    /// # Errors
    /// The guest stays paused and unchanged.
    fn save(&mut self) -> Result<GuestBytes, VmError>;

    /// The same, for a destination that speaks this version of the protocol: what a release of that version reads. A VMM
    /// whose state has not changed since version 1 need not care.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    fn save_for(&mut self, _protocol: u16) -> Result<GuestBytes, VmError> {
        self.save()
    }

    /// The VMM and its release, such as `QEMU 10.0.2`: for people, where two releases do not fit. Empty by default.
    fn release(&self) -> String {
        String::new()
    }

    /// What [`save`](Self::save) will return and cost.
    fn state_estimate(&self) -> StateEstimate {
        StateEstimate::default()
    }

    /// Runs `harvest`, and returns when every request of a device that was under way at its end is
    /// over: for how long the guest may have stood still for it. No page of this harvest is copied
    /// before.
    ///
    /// A device that pins guest pages for a request (`O_DIRECT`) writes them later without a fault,
    /// so that no write protection sees it. To pin a page for writing is a write, though: the page
    /// is in this harvest or in an earlier one, and what is copied once the request is over has
    /// what it brought. Without such devices `harvest` does everything. A device that
    /// writes pages which it has pinned for good is not made safe by this: its guest can't be
    /// migrated so.
    ///
    /// # Errors
    /// Requests that could not be waited for; the guest runs. `harvest` was run or not.
    fn quiesced(&mut self, harvest: &mut dyn FnMut()) -> Result<Duration, VmError> {
        harvest();
        Ok(Duration::ZERO)
    }

    /// Leaves the guest's vCPUs `100 - percent` hundredths of their time, so that it writes less; 0 takes
    /// every limit back.
    ///
    /// # Errors
    /// If this VMM can't, or is not allowed to.
    fn throttle(&mut self, percent: u8) -> Result<(), VmError> {
        if percent == 0 { Ok(()) } else { Err("this VMM can't throttle its vCPUs".into()) }
    }

    /// Bytes that the guest uses of each slot of its memory, as far as they are known: a
    /// destination that has less refuses it before anything is sent. By default, the populated
    /// pages that hold anything, by a sample.
    fn used_bytes(&self) -> Vec<Option<u64>> {
        self.memory().used_bytes()
    }

    /// All who know which pages need not be sent, beside those that were never populated: a balloon whose guest hints its
    /// free pages, a back end that pages are punched out of. Called once.
    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        Vec::new()
    }
}

/// Where a guest arrives.
#[derive(Debug)]
pub enum Landing {
    /// In memory, zeroed and unpopulated, of the announced layout.
    Memory(GuestMemory),
    /// In a VMM that takes the [streams](crate::streamed) of the VMM at the source: the sockets that these are written
    /// into, one for each lane.
    Streams(Vec<UnixStream>),
}

/// A machine to be, as the engine needs it at the destination.
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
///             return Err(PrepareError::Incompatible(format!("this is firebird/3, not {}", guest.vmm)));
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
    /// Checks that this host can run the described guest, and makes what it is to be put into.
    ///
    /// # Errors
    /// A description that does not fit: the text goes to the source and to the operator.
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError>;

    /// The guest comes by this session, whose journal is in this directory. A VMM that outlives
    /// this process leaves a note there by which the next process finds it: a restarted host runs a
    /// guest that it was given, and ends one that it was not. The default does nothing, for a guest
    /// that dies with the process.
    ///
    /// # Errors
    /// If the note can't be left: the guest is refused.
    fn opened(&mut self, _session: SessionId, _journals: &Path) -> Result<(), VmError> {
        Ok(())
    }

    /// The guest was paused at the source, by somebody else than the engine: [`run`](Self::run)
    /// takes it over and leaves it paused. Called before [`load`](Self::load).
    ///
    /// # Errors
    /// A VMM that takes no paused guest, which the default is: the migration ends and the guest
    /// stays at the source.
    fn stay_paused(&mut self) -> Result<(), VmError> {
        Err("the guest is paused, and this VMM takes running guests only".into())
    }

    /// Loads the state that [`SourceVm::save`] wrote. All memory is placed by then. With streams there is none, and
    /// the VMM has been given every byte: on return it has taken them. The guest must not run yet.
    ///
    /// # Errors
    /// State that cannot be loaded: the migration ends and the source runs on.
    fn load(&mut self, state: &[u8]) -> Result<(), VmError>;

    /// The VMM and its release, such as `QEMU 10.0.2`: for people, where two releases do not fit. Empty by default.
    fn release(&self) -> String {
        String::new()
    }

    /// Throws everything away that was made since [`prepare`](Self::prepare), which may then be
    /// called again for another attempt. The guest never ran.
    fn discard(&mut self);

    /// Whether no further guest can be taken, after one that was [discarded](Self::discard): listening
    /// ends then.
    fn is_spent(&self) -> bool {
        false
    }

    /// Runs the guest. Called at most once, and only after the handover is journalled.
    ///
    /// # Errors
    /// The guest is this host's from now on, so an error here is a crash of the guest and not a
    /// failed migration.
    fn run(&mut self) -> Result<(), VmError>;
}

/// Why a destination can't take a guest.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The guest is not the one that this destination was told to expect.
    #[error("this destination expects guest {expected}, not {offered}")]
    Identity {
        /// Name or UUID that the destination was started for.
        expected: String,
        /// Name or UUID that the source offered.
        offered: String,
    },
    /// The guest's memory slots are not those that this destination was told to expect.
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
    /// What the guest was to be put into is in use, or may be.
    #[error("in use: {0}")]
    InUse(String),
    /// This host failed.
    #[error("the destination machine could not be made")]
    Vm(#[source] VmError),
}
