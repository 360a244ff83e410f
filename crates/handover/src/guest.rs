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
//! The driver of a migration has its guest as a [`SourceGuest`], in one of these types at a time.

use std::time::Duration;

use crate::SourceState;
use crate::journal::{Journal, JournalError, Record};

/// An error that a VMM reports: the chain is kept for the local user, the peer gets its text only.
pub type VmError = Box<dyn std::error::Error + Send + Sync>;

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

/// Attempts to resume a guest before its VMM is believed to be broken.
const RESUME_ATTEMPTS: u32 = 3;

/// The guest at the source, in the hands of the driver that migrates it.
#[derive(Debug)]
pub enum SourceGuest<V: Resume> {
    /// It runs.
    Running(Running<V>),
    /// It is paused, and this host's.
    Paused(Paused<V>),
    /// COMMIT is journaled: it never runs here again unless the destination aborts.
    Committed(Committed<V>),
    /// The destination has it: its VMM remains to be torn down.
    Released(V),
    /// Between two of these, within one call.
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

impl<V: Resume> SourceGuest<V> {
    /// A paused guest that a process finds in place of one that has died. It may be resumed only
    /// where the handover says so.
    pub fn recovered(vm: V, state: SourceState) -> Self {
        if state.may_run() {
            Self::Paused(Paused(Some(vm)))
        } else {
            Self::Committed(Committed(vm))
        }
    }

    /// Promises the guest away, if it is paused and this host's.
    pub fn commit(&mut self, proof: CommitWritten) {
        *self = match self.take() {
            Self::Paused(paused) => paused.commit(proof).map_or(Self::Moving, Self::Committed),
            other => other,
        };
    }

    /// Resumes the guest, if it is paused and this host's. A guest that was promised away is this
    /// host's only if the handover says so.
    ///
    /// # Errors
    /// What the VMM said last; the guest stays paused.
    pub fn resume(&mut self, state: SourceState) -> Result<(), VmError> {
        let paused = match (self.take(), returned(state)) {
            (Self::Paused(paused), _) => paused,
            (Self::Committed(committed), Some(proof)) => committed.take_back(proof),
            (other, _) => {
                *self = other;
                return Ok(());
            }
        };
        let (guest, resumed) = match paused.resume() {
            Ok(running) => (Self::Running(running), Ok(())),
            Err((paused, error)) => (paused.map_or(Self::Moving, Self::Paused), Err(error)),
        };
        *self = guest;
        resumed
    }

    /// Gives up the guest, if it is promised away.
    pub fn release(&mut self) {
        *self = match self.take() {
            Self::Committed(committed) => Self::Released(committed.release()),
            other => other,
        };
    }

    /// Pauses the guest, if it runs, and says for how long it has been paused; see
    /// [`Running::pause`].
    pub fn pause(
        &mut self,
        pause: impl FnOnce(&mut V) -> Result<Duration, VmError>,
    ) -> Option<Result<Duration, VmError>> {
        let (guest, paused) = match self.take() {
            Self::Running(running) => match running.pause(pause) {
                Ok((guest, paused_for)) => (Self::Paused(guest), Some(Ok(paused_for))),
                Err((guest, error)) => (Self::Running(guest), Some(Err(error))),
            },
            other => (other, None),
        };
        *self = guest;
        paused
    }

    /// The VMM has paused the guest by itself, if it ran.
    pub fn paused_by_vmm(&mut self) {
        *self = match self.take() {
            Self::Running(running) => Self::Paused(running.paused_by_vmm()),
            other => other,
        };
    }

    /// Takes the guest out; what is left is [`Moving`](Self::Moving).
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Moving)
    }
}

impl<V: Resume> Running<V> {
    /// Takes charge of a running guest.
    pub fn new(vm: V) -> Self {
        Self(vm)
    }

    /// The VMM.
    pub fn vm(&mut self) -> &mut V {
        &mut self.0
    }

    /// Gives the VMM back.
    pub fn into_vm(self) -> V {
        self.0
    }

    /// Pauses the guest with `pause`, which returns for how long it has been paused by then.
    ///
    /// # Errors
    /// The guest, which the VMM could not pause, is resumed and returned with the error.
    pub fn pause(
        mut self,
        pause: impl FnOnce(&mut V) -> Result<Duration, VmError>,
    ) -> Result<(Paused<V>, Duration), (Self, VmError)> {
        match pause(&mut self.0) {
            Ok(paused_for) => Ok((Paused(Some(self.0)), paused_for)),
            Err(error) => match self.0.resume() {
                Ok(()) => Err((self, error)),
                Err(second) => {
                    let both = format!("{error}; and it could not be resumed: {second}");
                    Err((self, both.into()))
                }
            },
        }
    }

    /// The VMM has paused the guest by itself.
    pub fn paused_by_vmm(self) -> Paused<V> {
        Paused(Some(self.0))
    }
}

impl<V: Resume> Paused<V> {
    /// Lets the VMM do something with its paused guest, such as save its state.
    ///
    /// # Errors
    /// What the VMM says; the guest stays paused.
    pub fn with_vm<T>(
        &mut self,
        act: impl FnOnce(&mut V) -> Result<T, VmError>,
    ) -> Result<T, VmError> {
        self.0.as_mut().map_or_else(|| Err("the guest is gone".into()), act)
    }

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

/// Appends COMMIT to the journal, synced.
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
