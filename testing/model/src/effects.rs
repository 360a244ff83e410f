//! The effects of each action: the engine's transition functions, and the world around them.

use vmferry_handover::{
    DestinationEffect, DestinationEvent, DestinationRecords, DestinationState, OperatorWord,
    SessionKind, SessionWord, SourceEffect, SourceEvent, SourceRecords, SourceState,
    recover_destination, recover_source,
};

use crate::action::Action;
use crate::model::{BrokenRule, Handover};
use crate::world::{
    DestinationGuest, DestinationProcess, DestinationRecord, Message, Source, SourceGuest,
    SourceProcess, World,
};

impl Handover {
    pub(crate) fn apply(&self, world: &mut World, action: Action) {
        match action {
            Action::DestinationOpens => {
                self.open_register(world);
                if let Some(process) = &mut world.destination.process {
                    process.writing = Some(DestinationRecord::Open);
                }
            }
            Action::SourceSendsAll => {
                world.source.guest = SourceGuest::Paused;
                world.source.sent_final = true;
                world.network.insert(Message::Final);
            }
            Action::Deliver(message) => self.deliver(world, message),
            Action::StrangerAnswers => {
                world.network.insert(Message::Answer(SessionWord::Unknown));
            }
            Action::SourceDoes { effect, fails } => {
                if let Some(process) = &mut world.source.process {
                    process.todo.remove(0);
                }
                self.source_does(world, effect, fails);
            }
            Action::DestinationDoes(effect) => {
                if let Some(process) = &mut world.destination.process {
                    process.todo.remove(0);
                }
                self.destination_does(world, effect);
            }
            Action::SourceWrote { fails, on_disk } => {
                self.end_source_write(world, on_disk);
                let event =
                    if fails { SourceEvent::CommitFailed } else { SourceEvent::CommitWritten };
                self.source_event(world, event);
            }
            Action::DestinationWrote { record, fails, on_disk } => {
                self.end_destination_write(world, on_disk);
                self.destination_wrote(world, record, fails);
            }
            Action::SourceLosesLink => self.source_event(world, SourceEvent::LinkLost),
            Action::SourceFails => self.source_event(world, SourceEvent::Failed),
            Action::DestinationLosesLink => {
                self.destination_event(world, DestinationEvent::LinkLost);
            }
            Action::DestinationFails => self.destination_event(world, DestinationEvent::Failed),
            Action::CommitTimesOut => {
                self.destination_event(world, DestinationEvent::CommitTimeout);
            }
            Action::SourceCrashes { on_disk } => {
                self.end_source_write(world, on_disk);
                world.source.process = None;
            }
            Action::DestinationCrashes { on_disk } => {
                self.end_destination_write(world, on_disk);
                crash_destination(world);
            }
            Action::SourceRestarts => self.restart_source(world),
            Action::DestinationRestarts => self.restart_destination(world),
            Action::DestinationIsLost => {
                world.destination.lost = true;
                crash_destination(world);
            }
            Action::GuestMovesOn => world.destination.guest = DestinationGuest::MovedOn,
            Action::PagesArrive => world.lacks_pages = false,
            Action::GuestCrashes => guest_crashes(world),
            Action::DestinationNoticesCrash => {
                let event = match self.broken {
                    Some(BrokenRule::CrashedIsFetched) => DestinationEvent::Fetched,
                    _ => DestinationEvent::Crashed,
                };
                self.destination_event(world, event);
            }
            Action::DestinationHasAll => self.destination_event(world, DestinationEvent::Fetched),
            Action::OperatorSays(word) => {
                let kind = match self.broken {
                    Some(BrokenRule::OperatorFreesPages) => SessionKind::PreCopy,
                    _ => world.kind,
                };
                self.source_event(world, SourceEvent::of_operator(word, kind));
            }
            Action::OperatorGivesUp => {
                world.given_up = true;
                self.source_event(world, SourceEvent::GiveUp);
            }
            Action::Witness(action) => self.apply_witness(world, action),
            Action::FaultsEnd { linked } => {
                world.faults_ended = true;
                world.cut_for_good = !linked;
                world.network.clear();
                if let Some(witness) = &mut world.witness {
                    witness.requests.clear();
                }
            }
        }
    }

    /// Handles a message as the engine does, including the checks outside the handover.
    fn deliver(&self, world: &mut World, message: Message) {
        let busy = if message.is_to_destination() {
            world.destination.process.as_ref().is_none_or(|process| !process.todo.is_empty())
        } else {
            world.source.process.as_ref().is_none_or(|process| !process.todo.is_empty())
        };
        if busy {
            return;
        }
        match message {
            Message::Final => {
                if session(world) == Some(DestinationState::Receiving) {
                    world.destination.guest = DestinationGuest::Loaded;
                    world.lacks_pages = world.kind == SessionKind::PostCopy;
                    self.destination_event(world, DestinationEvent::Loaded);
                }
            }
            Message::Commit => self.destination_event(world, DestinationEvent::Commit),
            Message::Abort => self.destination_event(world, DestinationEvent::Failed),
            Message::Query => {
                if session(world).is_some() {
                    self.destination_event(world, DestinationEvent::Query);
                } else {
                    world.network.insert(Message::Answer(SessionWord::Unknown));
                }
            }
            Message::Ready => {
                let holds = world.source.process.as_ref().is_some_and(|process| {
                    process.state == SourceState::Holding && world.source.sent_final
                });
                if holds {
                    self.source_event(world, SourceEvent::Ready);
                }
            }
            Message::Running => self.source_event(world, SourceEvent::Running),
            Message::Fetching => self.source_event(world, SourceEvent::Fetching),
            Message::Answer(SessionWord::Ended)
                if self.broken == Some(BrokenRule::EndedFreesPages) =>
            {
                self.source_event(world, SourceEvent::Word(SessionWord::Owns));
            }
            Message::Aborted => self.source_event(world, aborted_event(world)),
            Message::Answer(SessionWord::Unknown)
                if self.broken == Some(BrokenRule::UnknownIsAborted) =>
            {
                self.source_event(world, SourceEvent::Word(SessionWord::Aborted));
            }
            Message::Answer(word) => self.source_event(world, SourceEvent::Word(word)),
        }
    }

    pub(crate) fn source_event(&self, world: &mut World, event: SourceEvent) {
        let Some(process) = &mut world.source.process else { return };
        let (state, effects) = match (self.broken, process.state, event) {
            (
                Some(BrokenRule::ResumeAfterCommit),
                SourceState::Committed,
                SourceEvent::LinkLost | SourceEvent::Failed,
            ) => (SourceState::Kept, &[SourceEffect::Resume][..]),
            (
                Some(BrokenRule::EndOfLinkIsSuccess),
                SourceState::Committed,
                SourceEvent::LinkLost,
            ) => (SourceState::Given, &[SourceEffect::WriteGiven, SourceEffect::Release][..]),
            (Some(BrokenRule::ServingResumes), SourceState::Serving, SourceEvent::LinkLost) => {
                (SourceState::Kept, &[SourceEffect::Resume][..])
            }
            (
                Some(BrokenRule::UnansweredIsTakenBack),
                SourceState::InDoubt { .. },
                SourceEvent::LinkLost,
            ) => process.state.step(SourceEvent::TakenBack),
            (
                Some(BrokenRule::KeptBeforeResumed),
                SourceState::Committed | SourceState::InDoubt { .. },
                SourceEvent::Word(SessionWord::Aborted)
                | SourceEvent::Operator(OperatorWord::SourceResumes),
            ) => (SourceState::Kept, &[SourceEffect::WriteKept, SourceEffect::Resume][..]),
            (_, state, event) => state.step(event),
        };
        process.state = state;
        process.todo.extend(effects);
    }

    fn source_does(&self, world: &mut World, effect: SourceEffect, fails: bool) {
        match effect {
            SourceEffect::WriteCommit => {
                if self.broken == Some(BrokenRule::NoCommitInJournal) {
                    return self.source_event(world, SourceEvent::CommitWritten);
                }
                if let Some(process) = &mut world.source.process {
                    process.writing = true;
                }
            }
            SourceEffect::SendCommit => {
                world.network.insert(Message::Commit);
            }
            SourceEffect::SendAbort => {
                world.network.insert(Message::Abort);
            }
            SourceEffect::Ask => {
                world.network.insert(Message::Query);
                Self::take_back(world);
            }
            SourceEffect::WriteKept => world.source.kept |= !fails,
            SourceEffect::WriteGiven => world.source.given |= !fails,
            SourceEffect::WriteServing => world.source.serving |= !fails,
            SourceEffect::Resume => {
                if world.source.guest == SourceGuest::Paused {
                    world.source.guest = SourceGuest::Running;
                    world.resumed_here = true;
                    // An operator may say this only if the destination was lost before it ran the
                    // guest.
                    world.ran_outdated_state |= world.ran_at_destination;
                }
            }
            SourceEffect::Release => world.source.guest = SourceGuest::Released,
        }
    }

    fn end_source_write(&self, world: &mut World, on_disk: bool) {
        if let Some(process) = &mut world.source.process
            && std::mem::take(&mut process.writing)
        {
            world.source.committed |= on_disk;
        }
    }

    fn restart_source(&self, world: &mut World) {
        let Source { committed, kept, given, serving, .. } = world.source;
        let records = match self.broken {
            Some(BrokenRule::ServingForgotten) if serving => {
                SourceRecords { committed, kept, given: true, serving: false }
            }
            _ => SourceRecords { committed, kept, given, serving },
        };
        let (mut state, mut effects) = recover_source(records);
        if kept || given {
            // The journal holds the outcome, so no process recovers the session.
            effects = &[];
        }
        if self.broken == Some(BrokenRule::RestartedSendsCommit)
            && matches!(state, SourceState::InDoubt { .. })
        {
            state = SourceState::InDoubt { recovered: false };
        }
        world.source.process =
            Some(SourceProcess { state, todo: effects.to_vec(), writing: false });
    }

    pub(crate) fn destination_event(&self, world: &mut World, event: DestinationEvent) {
        let Some(process) = &mut world.destination.process else { return };
        let Some(state) = process.session else { return };
        let (next, effects) = match (self.broken, state, event) {
            (
                Some(BrokenRule::StuckDiscards),
                DestinationState::IntentWriting,
                DestinationEvent::JournalFailed,
            ) => (DestinationState::Stuck, &[DestinationEffect::Discard][..]),
            (
                Some(BrokenRule::RunningWithoutAllPages),
                DestinationState::IntentWriting,
                DestinationEvent::IntentWritten(_),
            ) => state.step(DestinationEvent::IntentWritten(SessionKind::PreCopy)),
            (
                Some(BrokenRule::UnansweredIsGranted),
                DestinationState::Claiming,
                DestinationEvent::CommitTimeout,
            ) => state.step(DestinationEvent::Claimed),
            _ => state.step(event),
        };
        process.session = Some(next);
        process.todo.extend(effects);
    }

    fn restart_destination(&self, world: &mut World) {
        let records = world.destination_records();
        let destination = &mut world.destination;
        let recovered = recover_destination(DestinationRecords {
            intent: records.intent.map(|kind| match self.broken {
                Some(BrokenRule::FetchingForgotten) => SessionKind::PreCopy,
                _ => kind,
            }),
            ..records
        });
        let session = recovered.map(|(state, _)| state);
        let mut todo = recovered.map_or(Vec::new(), |(_, effects)| effects.to_vec());
        match self.broken {
            Some(BrokenRule::NotFinishedAfterRestart) => {
                todo.retain(|effect| *effect != DestinationEffect::Run);
            }
            Some(BrokenRule::RunsWithoutLooking) => todo.insert(0, DestinationEffect::Run),
            _ => {}
        }
        destination.process = Some(DestinationProcess { session, todo, writing: None });
    }

    fn destination_does(&self, world: &mut World, effect: DestinationEffect) {
        match effect {
            DestinationEffect::SendReady => {
                world.network.insert(Message::Ready);
            }
            DestinationEffect::Claim if self.broken == Some(BrokenRule::RunsUnclaimed) => {
                self.destination_event(world, DestinationEvent::Claimed);
            }
            DestinationEffect::Claim => self.claim(world),
            DestinationEffect::WriteIntent if self.broken == Some(BrokenRule::NoRunIntent) => {
                self.destination_event(world, DestinationEvent::IntentWritten(world.kind));
            }
            DestinationEffect::WriteIntent => begin_write(world, DestinationRecord::RunIntent),
            DestinationEffect::WriteAborted => begin_write(world, DestinationRecord::Aborted),
            DestinationEffect::Run => self.destination_runs(world),
            DestinationEffect::SendRunning => {
                world.network.insert(Message::Running);
            }
            DestinationEffect::SendFetching => {
                world.network.insert(Message::Fetching);
            }
            DestinationEffect::WriteFetched => begin_write(world, DestinationRecord::Fetched),
            DestinationEffect::WriteEnded => begin_write(world, DestinationRecord::Ended),
            DestinationEffect::SendEnded => {
                world.network.insert(Message::Answer(SessionWord::Ended));
            }
            DestinationEffect::SendAborted => {
                world.network.insert(Message::Aborted);
            }
            DestinationEffect::Discard => {
                world.destination.guest = DestinationGuest::Absent;
                world.lacks_pages = false;
            }
            DestinationEffect::Answer(word) => {
                world.network.insert(Message::Answer(word));
            }
        }
    }

    /// Runs a guest that has never run here. A guest that has is left alone.
    fn destination_runs(&self, world: &mut World) {
        match world.destination.guest {
            DestinationGuest::Loaded => {
                world.destination.guest = DestinationGuest::Running;
                world.ran_at_destination = true;
                world.ran_outdated_state |= world.resumed_here;
            }
            DestinationGuest::MovedOn if self.broken == Some(BrokenRule::RunsWhatMovedOn) => {
                world.destination.guest = DestinationGuest::Running;
                world.ran_outdated_state = true;
            }
            _ => {}
        }
    }

    fn end_destination_write(&self, world: &mut World, on_disk: bool) {
        let Some(process) = &mut world.destination.process else { return };
        match process.writing.take() {
            Some(DestinationRecord::Open) => world.destination.opened |= on_disk,
            Some(DestinationRecord::RunIntent) => world.destination.intent |= on_disk,
            Some(DestinationRecord::Fetched) => world.destination.fetched |= on_disk,
            Some(DestinationRecord::Ended) => world.destination.ended |= on_disk,
            Some(DestinationRecord::Aborted) => world.destination.aborted |= on_disk,
            None => {}
        }
    }

    fn destination_wrote(&self, world: &mut World, record: DestinationRecord, fails: bool) {
        let fails = fails
            && !(record == DestinationRecord::RunIntent
                && self.broken == Some(BrokenRule::FailedWriteIsWritten));
        let event = match record {
            DestinationRecord::Open => {
                // If OPEN cannot be written, the guest is refused and nothing of it remains.
                if let Some(process) = &mut world.destination.process
                    && !fails
                {
                    process.session = Some(DestinationState::Receiving);
                }
                return;
            }
            _ if fails => DestinationEvent::JournalFailed,
            DestinationRecord::RunIntent => DestinationEvent::IntentWritten(world.kind),
            DestinationRecord::Fetched => DestinationEvent::FetchedWritten,
            DestinationRecord::Ended => DestinationEvent::EndedWritten,
            DestinationRecord::Aborted => DestinationEvent::AbortWritten,
        };
        self.destination_event(world, event);
    }
}

fn session(world: &World) -> Option<DestinationState> {
    world.destination.process.as_ref().and_then(|process| process.session)
}

/// Before COMMIT, ABORTED ends the migration. After it, ABORTED gives the guest back.
fn aborted_event(world: &World) -> SourceEvent {
    let holds =
        world.source.process.as_ref().is_some_and(|process| process.state == SourceState::Holding);
    if holds { SourceEvent::Failed } else { SourceEvent::Word(SessionWord::Aborted) }
}

fn begin_write(world: &mut World, record: DestinationRecord) {
    if let Some(process) = &mut world.destination.process {
        process.writing = Some(record);
    }
}

fn crash_destination(world: &mut World) {
    world.destination.process = None;
    if world.outlives && !world.destination.lost {
        return;
    }
    guest_crashes(world);
}

/// The guest's VMM at the destination ends.
fn guest_crashes(world: &mut World) {
    let ran =
        matches!(world.destination.guest, DestinationGuest::Running | DestinationGuest::Crashed);
    // Before RUN-INTENT nothing is lost: the source has everything, and may still run the guest.
    let was_promised =
        world.destination.guest == DestinationGuest::Loaded && world.destination.intent;
    world.crashed_lacking |= world.lacks_pages && (ran || was_promised);
    world.destination.guest = match world.destination.guest {
        DestinationGuest::Running | DestinationGuest::Crashed => DestinationGuest::Crashed,
        DestinationGuest::Absent | DestinationGuest::Loaded => DestinationGuest::Absent,
        DestinationGuest::MovedOn => DestinationGuest::MovedOn,
    };
    // A guest that is gone needs no pages.
    world.lacks_pages = false;
}
