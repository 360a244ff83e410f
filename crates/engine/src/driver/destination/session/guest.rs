//! A session's operations on the guest and on its journal.

use std::time::{Duration, Instant};

use vmferry_memory::{PageSet, whole_hash_except};
use vmferry_wire::{Reason, ReasonCode, SessionId};

use super::Session;
use crate::causes::chain;
use crate::data::destination::target::Target;
use crate::error::MigrateError;
use crate::machine::destination::io::{Input, Prepared};
use crate::vmm::streamed::LateEnd;
use crate::vmm::{DestinationVm, GuestDescription, Landing, PrepareError};
use crate::witness::witness_id;
use vmferry_handover::Register;
use vmferry_handover::journal::{FileJournal, Journal, JournalError, Opening, Record, Side};

impl<V: DestinationVm> Session<'_, V> {
    pub(super) fn prepare(
        &mut self,
        guest: &GuestDescription,
        streams: Option<bool>,
        used_bytes: &[Option<u64>],
    ) -> Result<Prepared, MigrateError> {
        if let Some(policy) = &self.config.policy {
            policy
                .check_guest(&self.peer, &guest.identity)
                .map_err(|refusal| refused(ReasonCode::Unauthorized, &refusal))?;
        }
        self.guest = Some(guest.identity.clone());
        let landing = self.vm.prepare(guest).map_err(refusal)?;
        // A source of protocol version 1 indicates only by its VMM's name what it will send.
        let made = matches!(landing, Landing::Streams(_));
        if streams.is_some_and(|announced| announced != made) {
            drop(landing);
            self.vm.discard();
            return Err(refused(ReasonCode::Incompatible, other_way(made)));
        }
        self.target = Some(match landing {
            Landing::Memory(memory) if memory.layout() == guest.layout => {
                if let Err(shortage) = memory.check_room(used_bytes) {
                    drop(memory);
                    self.vm.discard();
                    return Err(refusal(PrepareError::NoRoom(shortage.to_string())));
                }
                Target::memory(memory)
            }
            Landing::Memory(_) => {
                self.vm.discard();
                let text = "the destination VMM made other memory slots than those announced";
                return Err(refused(ReasonCode::LayoutMismatch, text));
            }
            Landing::Streams(sockets) => {
                Target::streams(sockets, self.vm.takes_post_copy().is_ok())
            }
        });
        Ok(Prepared {
            post_copy: self.vm.takes_post_copy().map_err(|error| chain(&*error)),
            compares_storage: self.vm.storage().is_some(),
        })
    }

    /// The VMM has stopped reading a stream: it has loaded the guest and needs no more, or it has
    /// failed.
    pub(super) fn stream_refused(&mut self) -> Input {
        if self.is_loaded {
            return Input::Tick;
        }
        match self.vm.load(&[]) {
            Ok(()) => {
                self.is_loaded = true;
                Input::Tick
            }
            Err(source) => {
                Input::Failed(MigrateError::Vm { action: "load the guest's state", source })
            }
        }
    }

    /// The VMM of a carried guest has closed the stream of its requests for pages.
    pub(super) fn requests_ended(&mut self) -> Input {
        self.vmm_awaits = crossbeam_channel::after(Duration::from_secs(1));
        let done = match self.vm.late_end() {
            Ok(LateEnd::Complete) => Input::Fetched,
            Ok(LateEnd::GuestEnded) => self.vmm_gone(),
            Ok(LateEnd::Awaited) => return Input::Tick,
            Err(source) => {
                return Input::Failed(MigrateError::Vm {
                    action: "fetch the guest's pages",
                    source,
                });
            }
        };
        self.vmm_awaits = crossbeam_channel::never();
        done
    }

    /// The guest's VMM, which is a process of its own, has ended.
    pub(super) fn vmm_gone(&mut self) -> Input {
        Input::GuestEnded { in_order: self.vm.ended_in_order() }
    }

    pub(super) fn open(&mut self, session: SessionId) -> Result<(), MigrateError> {
        let opened =
            self.open_register(session).and_then(|()| self.open_journal(session)).and_then(|()| {
                self.vm.opened(session, &self.config.journal_directory).map_err(|source| {
                    MigrateError::Vm { action: "note where the guest is", source }
                })
            });
        if opened.is_err() {
            self.target = None;
            self.vm.discard();
        }
        opened
    }

    /// Opens the session's register at the witness, before the source can send COMMIT.
    fn open_register(&self, session: SessionId) -> Result<(), MigrateError> {
        let (Some(witness), Some(guest)) = (&self.config.witness, &self.guest) else {
            return Ok(());
        };
        let opened = witness.open(session, guest);
        let witness = witness.id();
        match opened {
            Ok(Register::Open) => Ok(()),
            // Another session has this number, or its data was restored.
            Ok(register) => Err(MigrateError::ClaimRefused { witness, register }),
            Err(source) => Err(MigrateError::NotOpened { witness, source }),
        }
    }

    pub(super) fn open_journal(&mut self, session: SessionId) -> Result<(), MigrateError> {
        let directory = &self.config.journal_directory;
        let Some(guest) = self.guest.clone() else {
            return Err(MigrateError::Local {
                action: "open the journal of a guest that was never announced",
                source: std::io::ErrorKind::NotFound.into(),
            });
        };
        let peer = (self.peer.address.as_str(), self.peer.names.as_slice());
        let witness = witness_id(self.config.witness.as_deref());
        let of = Opening { guest, process: None, witness };
        let journal = FileJournal::begin_for(directory, session, Side::Destination, of, peer)?;
        self.journal = Some(journal);
        Ok(())
    }

    pub(super) fn write(&mut self, record: &Record) -> Result<(), MigrateError> {
        match &mut self.journal {
            Some(journal) => Ok(journal.append(record)?),
            None => Err(MigrateError::Local {
                action: "write a journal that was never opened",
                source: std::io::ErrorKind::NotFound.into(),
            }),
        }
    }

    /// Appends a record of which an earlier attempt may have failed. Then it may be in the journal
    /// already.
    pub(super) fn write_again(&mut self, record: &Record) -> Result<(), MigrateError> {
        match (self.write(record), &mut self.journal) {
            (Err(MigrateError::Journal(JournalError::Poisoned { .. })), Some(journal)) => {
                if journal.renew(Side::Destination)?.contains(record) {
                    return Ok(());
                }
                self.write(record)
            }
            (written, _) => written,
        }
    }

    pub(super) fn hash(&mut self, except: PageSet) -> Option<Input> {
        let Some(memory) = self.target.as_ref().and_then(Target::guest_memory) else {
            let source = "what a VMM has loaded from its streams can't be hashed".into();
            return Some(Input::Failed(MigrateError::Vm { action: "hash its memory", source }));
        };
        let (memory, results) = (memory.clone(), self.inputs.0.clone());
        let spawned = std::thread::Builder::new().name("verify".into()).spawn(move || {
            let begun = Instant::now();
            let _ = results.send(whole_hash_except(&memory, &except).map_or_else(
                |error| Input::Failed(error.into()),
                |hash| Input::Hashed(hash, begun.elapsed()),
            ));
        });
        spawned.err().map(|source| Input::Failed(MigrateError::no_thread(source)))
    }
}

/// The VMM expects the guest in another way than the source sends it.
fn other_way(streams: bool) -> &'static str {
    if streams {
        "the destination's VMM takes a guest as streams of its VMM, and the source sends pages: \
         start it for a guest that is attached"
    } else {
        "the source's VMM streams its guest, and the destination's VMM takes pages: start it for a \
         guest that is carried"
    }
}

fn refused(code: ReasonCode, text: &str) -> MigrateError {
    MigrateError::Refused { peer: "destination", reason: Reason::new(code, text) }
}

/// A VMM's refusal as a reason for the source's operator.
fn refusal(error: PrepareError) -> MigrateError {
    let code = match &error {
        PrepareError::Identity { .. } => ReasonCode::IdentityMismatch,
        PrepareError::Layout { .. } => ReasonCode::LayoutMismatch,
        PrepareError::Incompatible(_) => ReasonCode::Incompatible,
        PrepareError::NoRoom(_) => ReasonCode::Memory,
        PrepareError::InUse(_) => ReasonCode::Busy,
        PrepareError::Vm(_) => ReasonCode::VmRefused,
    };
    refused(code, &crate::causes::chain(&error))
}
