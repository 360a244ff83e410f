//! The source's guest, in types: what may be done with it depends on what was promised.
//!
//! ```text
//! Running --pause--> Paused --commit(CommitWritten)--> Committed --release--> (gone)
//!    ^                 |  ^                                |
//!    +-----resume------+  +------take_back(Returned)-------+
//! ```
//! A [`Committed`] guest has no method that resumes it. `Returned`, the proof that it is this host's
//! again, is made of nothing but the state of the handover.
//!
//! Whoever moves a guest has it as [`Held`], in one of these types at a time.

use std::time::Duration;

use vmferry_memory::GuestBytes;

use crate::handover::SourceState;
use crate::journal::{Journal, JournalError, Record};
use crate::streamed::{OutgoingStream, StreamEvents, StreamedVm};
use crate::vm::{Resume, SourceVm, VmError};

/// Attempts to resume a guest before its VMM is believed to be broken.
const RESUME_ATTEMPTS: u32 = 3;

/// A guest in the hands of whoever moves it.
#[derive(Debug)]
pub enum Held<V: Resume> {
    /// It runs.
    Running(Running<V>),
    /// It stands still, and is this host's.
    Paused(Paused<V>),
    /// It is promised away.
    Committed(Committed<V>),
    /// It is given up: its VMM remains to be torn down.
    Released(V),
    /// Within a change from one to the other.
    Moving,
}

/// A guest that runs on this host.
#[derive(Debug)]
pub struct Running<V>(V);

/// A guest that is paused on this host, and is this host's.
///
/// Dropped without a decision, as in a panic, it is resumed: the guest must not stay paused
/// because a migration broke.
#[derive(Debug)]
pub struct Paused<V: Resume>(Option<V>);

/// A guest that this host has promised never to run again.
#[derive(Debug)]
pub struct Committed<V>(V);

/// Proof that COMMIT is on disk.
#[derive(Debug)]
pub struct CommitWritten(());

/// Proof that a committed guest is this host's again.
struct Returned(());

impl<V: Resume> Held<V> {
    /// A guest that stands still, as a process finds it that was started again after another one has died: it
    /// may be resumed only where the handover says so.
    pub fn found(vm: V, state: SourceState) -> Self {
        if state.may_run() {
            Self::Paused(Paused(Some(vm)))
        } else {
            Self::Committed(Committed(vm))
        }
    }

    /// Promises the guest away, if it stands still and is this host's.
    pub fn commit(&mut self, proof: CommitWritten) {
        *self = match self.take() {
            Self::Paused(paused) => paused.commit(proof).map_or(Self::Moving, Self::Committed),
            other => other,
        };
    }

    /// Lets the guest run, if it stands still here and is this host's. One that was promised away is this host's
    /// only if the handover says so.
    ///
    /// # Errors
    /// What the VMM said last; the guest stands still.
    pub fn resume(&mut self, state: SourceState) -> Result<(), VmError> {
        let paused = match (self.take(), returned(state)) {
            (Self::Paused(paused), _) => paused,
            (Self::Committed(committed), Some(proof)) => committed.take_back(proof),
            (other, _) => {
                *self = other;
                return Ok(());
            }
        };
        let (held, resumed) = match paused.resume() {
            Ok(running) => (Self::Running(running), Ok(())),
            Err((paused, error)) => (paused.map_or(Self::Moving, Self::Paused), Err(error)),
        };
        *self = held;
        resumed
    }

    /// Gives up the guest, if it is promised away.
    pub fn release(&mut self) {
        *self = match self.take() {
            Self::Committed(committed) => Self::Released(committed.release()),
            other => other,
        };
    }

    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Moving)
    }
}

impl<V: SourceVm> Held<V> {
    /// Pauses the guest, if it runs, and says for how long it has stood still; see [`Running::pause`].
    pub fn pause(&mut self) -> Option<Result<Duration, VmError>> {
        let (held, paused) = match self.take() {
            Self::Running(running) => match running.pause() {
                Ok((paused, stood_still)) => (Self::Paused(paused), Some(Ok(stood_still))),
                Err((running, error)) => (Self::Running(running), Some(Err(error))),
            },
            other => (other, None),
        };
        *self = held;
        paused
    }
}

impl<V: StreamedVm> Held<V> {
    /// Its VMM has stopped the guest, if it ran.
    pub fn stopped(&mut self) {
        *self = match self.take() {
            Self::Running(running) => Self::Paused(running.stopped()),
            other => other,
        };
    }
}

impl<V: SourceVm> Running<V> {
    /// Pauses the guest; with it comes for how long it has stood still.
    ///
    /// # Errors
    /// The guest, which the VMM could not pause, is resumed and returned with the error.
    pub fn pause(mut self) -> Result<(Paused<V>, Duration), (Self, VmError)> {
        match self.0.pause() {
            Ok(stood_still) => Ok((Paused(Some(self.0)), stood_still)),
            Err(error) => match self.0.resume() {
                Ok(()) => Err((self, error)),
                Err(second) => {
                    let both = format!("{error}; and it could not be resumed: {second}");
                    Err((self, both.into()))
                }
            },
        }
    }

    /// Harvests; see [`SourceVm::quiesced`].
    ///
    /// # Errors
    /// What the VMM says.
    pub fn quiesced(&mut self, harvest: &mut dyn FnMut()) -> Result<Duration, VmError> {
        self.0.quiesced(harvest)
    }

    /// Takes time from the vCPUs, or gives it back; see [`SourceVm::throttle`].
    ///
    /// # Errors
    /// What the VMM says.
    pub fn throttle(&mut self, percent: u8) -> Result<(), VmError> {
        self.0.throttle(percent)
    }
}

impl<V: StreamedVm> Running<V> {
    /// Lets the VMM stream the guest; see [`StreamedVm::begin`].
    ///
    /// # Errors
    /// What the VMM says.
    pub fn begin(
        &mut self,
        downtime: Duration,
        events: StreamEvents,
    ) -> Result<Vec<OutgoingStream>, VmError> {
        self.0.begin(downtime, events)
    }

    /// See [`StreamedVm::set_downtime`].
    ///
    /// # Errors
    /// What the VMM says.
    pub fn set_downtime(&mut self, downtime: Duration) -> Result<(), VmError> {
        self.0.set_downtime(downtime)
    }

    /// Its VMM has stopped the guest.
    pub fn stopped(self) -> Paused<V> {
        Paused(Some(self.0))
    }

    /// Ends the VMM's own migration; the guest runs on.
    ///
    /// # Errors
    /// What the VMM says.
    pub fn end_streams(&mut self) -> Result<(), VmError> {
        self.0.resume()
    }
}

impl<V> Running<V> {
    /// Takes charge of a guest.
    pub fn new(vm: V) -> Self {
        Self(vm)
    }

    /// Gives the VMM back.
    pub fn into_vm(self) -> V {
        self.0
    }
}

impl<V: SourceVm> Paused<V> {
    /// Saves the state of vCPUs and devices, for a destination that speaks this version of the protocol.
    ///
    /// # Errors
    /// What the VMM says; the guest stays paused.
    pub fn save(&mut self, protocol: u16) -> Result<GuestBytes, VmError> {
        self.0.as_mut().map_or_else(|| Err("the guest is gone".into()), |vm| vm.save_for(protocol))
    }
}

impl<V: StreamedVm> Paused<V> {
    /// Lets the VMM send what is left; see [`StreamedVm::finish`].
    ///
    /// # Errors
    /// What the VMM says; the guest stays paused.
    pub fn finish(&mut self) -> Result<(), VmError> {
        self.0.as_mut().map_or_else(|| Err("the guest is gone".into()), StreamedVm::finish)
    }
}

impl<V: Resume> Paused<V> {
    /// See [`Resume::is_paused_by_others`].
    pub fn is_paused_by_others(&self) -> bool {
        self.0.as_ref().is_some_and(Resume::is_paused_by_others)
    }

    /// Lets the guest run on. A VMM that can't do it once may do it when asked again: the guest's life
    /// hangs on it.
    ///
    /// # Errors
    /// The paused guest and what the VMM said last.
    pub fn resume(mut self) -> Result<Running<V>, (Option<Self>, VmError)> {
        let Some(mut vm) = self.0.take() else {
            return Err((None, "the guest is gone".into()));
        };
        let mut resumed = vm.resume();
        for _ in 1..RESUME_ATTEMPTS {
            if resumed.is_err() {
                resumed = vm.resume();
            }
        }
        match resumed {
            Ok(()) => Ok(Running(vm)),
            Err(error) => Err((Some(Self(Some(vm))), error)),
        }
    }

    /// Gives the VMM back with its guest paused, for when it can't be resumed.
    #[must_use]
    pub fn into_vm(mut self) -> Option<V> {
        self.0.take()
    }

    /// Promises the guest away.
    #[must_use]
    pub fn commit(mut self, _proof: CommitWritten) -> Option<Committed<V>> {
        self.0.take().map(Committed)
    }
}

impl<V: Resume> Drop for Paused<V> {
    fn drop(&mut self) {
        if let Some(mut vm) = self.0.take() {
            // Nobody is left to tell: the guest runs, or its VMM has died with this process.
            let _ = vm.resume();
        }
    }
}

impl<V: Resume> Committed<V> {
    /// Takes the guest back.
    fn take_back(self, _proof: Returned) -> Paused<V> {
        Paused(Some(self.0))
    }

    /// Gives up the guest; the VMM remains to be torn down.
    pub fn release(self) -> V {
        self.0
    }
}

/// Appends COMMIT.
///
/// # Errors
/// The journal's; the guest is still this host's then.
pub fn write_commit(journal: &mut dyn Journal) -> Result<CommitWritten, JournalError> {
    journal.append(&Record::Commit)?;
    Ok(CommitWritten(()))
}

/// The proof that the guest is this host's, if the handover says so.
fn returned(state: SourceState) -> Option<Returned> {
    (state == SourceState::Kept).then_some(Returned(()))
}
