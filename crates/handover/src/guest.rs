//! The source's guest as types: the promises that were made decide what may be done with it.
//!
//! ```text
//! Running --pause--> Paused --commit(CommitWritten)--> Committed --release--> (gone)
//!    ^                 |  ^                                |
//!    +-----resume------+  +------take_back(Returned)-------+
//! ```
//! A [`Committed`] guest has no method that resumes it. Taking it back needs `Returned`, the proof
//! that this host owns the guest again, and only a handover in the state `Kept` gives that proof.
//!
//! The driver of a migration holds its guest as a [`SourceGuest`], which is in one of these types
//! at a time.

use std::time::Duration;

use crate::journal::{Journal, JournalError, Record};
use crate::{SessionKind, SourceState};

/// An error that a VMM reports. The local user sees the whole chain; the peer gets its text only.
pub type VmError = Box<dyn std::error::Error + Send + Sync>;

/// A guest that can be resumed. This is all that a process needs when it takes over from a source
/// process that died.
pub trait Resume: Send + 'static {
    /// Resumes the paused guest. Has no effect on a running guest.
    ///
    /// # Errors
    /// A vCPU or a device could not be started.
    fn resume(&mut self) -> Result<(), VmError>;

    /// Whether another party than the engine, such as an operator, has paused the guest.
    /// [`resume`](Self::resume) leaves such a guest paused, and it stays paused at the destination.
    /// The engine asks after it has saved the state.
    fn is_paused_by_others(&self) -> bool {
        false
    }
}

/// A VMM whose own post-copy can be connected again, after its streams to the destination have
/// ended. The guest stays paused here.
pub trait Reconnect {
    /// The new streams.
    type Streams;

    /// Ends the VMM's streams, as far as they have not ended, and connects it to new ones.
    ///
    /// # Errors
    /// The VMM's error. It can be tried again, unless the error says otherwise.
    fn reconnect(&mut self) -> Result<Self::Streams, VmError>;

    /// Whether the VMM has ended, and the guest's memory here with it. Called about once a second
    /// by a process that has taken a guest over, which the VMM does not notify.
    fn has_ended(&self) -> bool {
        false
    }
}

/// Number of attempts to resume a guest before the engine reports an error.
const RESUME_ATTEMPTS: u32 = 3;

/// The guest at the source, as held by the driver of the migration.
#[derive(Debug)]
pub enum SourceGuest<V: Resume> {
    /// The guest runs.
    Running(Running<V>),
    /// The guest is paused, and this host owns it.
    Paused(Paused<V>),
    /// COMMIT is journaled. The guest never runs here again, unless the destination aborts.
    Committed(Committed<V>),
    /// The destination owns the guest. Its VMM here remains to be torn down.
    Released(V),
    /// A transition between two of the other variants, within one call.
    Moving,
}

/// A guest that runs on this host.
#[derive(Debug)]
pub struct Running<V>(V);

/// A guest that is paused on this host and owned by it.
///
/// Dropping it without a decision, as a panic does, resumes the guest: a broken migration must not
/// leave the guest paused.
#[derive(Debug)]
pub struct Paused<V: Resume>(Option<V>);

/// A guest that this host has promised never to run again.
#[derive(Debug)]
pub struct Committed<V>(V);

/// Proof that COMMIT is on disk.
#[derive(Debug)]
pub struct CommitWritten(());

/// Proof that this host owns a committed guest again.
struct Returned(());

impl<V: Resume> SourceGuest<V> {
    /// A paused guest that another process takes over from a process that died. It can be resumed
    /// only in handover states that allow it.
    pub fn recovered(vm: V, state: SourceState) -> Self {
        if state.may_run() {
            Self::Paused(Paused(Some(vm)))
        } else {
            Self::Committed(Committed(vm))
        }
    }

    /// Commits the guest, if it is paused and owned by this host.
    pub fn commit(&mut self, proof: CommitWritten) {
        *self = match self.take() {
            Self::Paused(paused) => paused.commit(proof).map_or(Self::Moving, Self::Committed),
            other => other,
        };
    }

    /// Resumes the guest, if it is paused and owned by this host. A committed guest is resumed only
    /// if `state` says that this host owns it again.
    ///
    /// # Errors
    /// The VMM's last error. The guest stays paused.
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

    /// Releases the guest, if it is committed.
    pub fn release(&mut self) {
        *self = match self.take() {
            Self::Committed(committed) => Self::Released(committed.release()),
            other => other,
        };
    }

    /// Pauses the guest if it runs, and returns how long it has been paused; see
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

    /// Records that the VMM has paused the guest by itself. Has no effect unless the guest was
    /// running.
    pub fn paused_by_vmm(&mut self) {
        *self = match self.take() {
            Self::Running(running) => Self::Paused(running.paused_by_vmm()),
            other => other,
        };
    }

    /// Takes the guest out and leaves [`Moving`](Self::Moving).
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Moving)
    }
}

impl<V: Resume> Running<V> {
    /// Wraps the VMM of a running guest.
    pub fn new(vm: V) -> Self {
        Self(vm)
    }

    /// The VMM.
    pub fn vm(&mut self) -> &mut V {
        &mut self.0
    }

    /// Returns the VMM.
    pub fn into_vm(self) -> V {
        self.0
    }

    /// Pauses the guest with `pause`, which returns how long the guest has been paused.
    ///
    /// # Errors
    /// The VMM's error. The guest is resumed and returned with it.
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

    /// Records that the VMM has paused the guest by itself.
    pub fn paused_by_vmm(self) -> Paused<V> {
        Paused(Some(self.0))
    }
}

impl<V: Resume> Paused<V> {
    /// Calls `act` on the VMM of the paused guest, for example to save its state.
    ///
    /// # Errors
    /// The VMM's error. The guest stays paused.
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

    /// Resumes the guest. Failed attempts are repeated, because a guest that stays paused is an
    /// outage.
    ///
    /// # Errors
    /// The paused guest and the VMM's last error.
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

    /// Returns the VMM with its guest paused, for a guest that cannot be resumed.
    #[must_use]
    pub fn into_vm(mut self) -> Option<V> {
        self.0.take()
    }

    /// Commits the guest.
    #[must_use]
    pub fn commit(mut self, _proof: CommitWritten) -> Option<Committed<V>> {
        self.0.take().map(Committed)
    }
}

impl<V: Resume> Drop for Paused<V> {
    fn drop(&mut self) {
        if let Some(mut vm) = self.0.take() {
            // The error has no receiver here. Either the guest runs, or its VMM died with this
            // process.
            let _ = vm.resume();
        }
    }
}

impl<V: Resume> Committed<V> {
    /// Takes the guest back.
    fn take_back(self, _proof: Returned) -> Paused<V> {
        Paused(Some(self.0))
    }

    /// Releases the guest. Its VMM remains to be torn down.
    pub fn release(self) -> V {
        self.0
    }
}

impl<V: Reconnect> Committed<V> {
    /// Connects the VMM's own post-copy again.
    ///
    /// # Errors
    /// See [`Reconnect::reconnect`].
    pub fn reconnect(&mut self) -> Result<V::Streams, VmError> {
        self.0.reconnect()
    }

    /// Whether the VMM has ended. See [`Reconnect::has_ended`].
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.0.has_ended()
    }
}

/// Appends COMMIT to the journal and syncs it. The record names the kind of the session.
///
/// # Errors
/// The journal's error. This host still owns the guest.
pub fn write_commit(
    journal: &mut dyn Journal,
    kind: SessionKind,
) -> Result<CommitWritten, JournalError> {
    journal.append(&Record::commit(kind))?;
    Ok(CommitWritten(()))
}

/// The proof that this host owns the guest, if the handover's state says so.
fn returned(state: SourceState) -> Option<Returned> {
    (state == SourceState::Kept).then_some(Returned(()))
}
