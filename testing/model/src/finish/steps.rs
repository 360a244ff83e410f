//! The effects of each action: the daemons' own step functions, and libvirt around them.

use vmferry_handover::{
    DestinationAction, DestinationFinish, DestinationStep, DomainSeen, FinishAnswer, FinishRecord,
    FinishStep, FinishWord, OperatorWord, SourceAction, SourceFinish, SourceStep,
};

use super::action::Action;
use super::model::{BrokenFinish, Finish};
use super::operator::operator_acts;
use super::world::{Daemon, Domain, LibvirtCall, Message, Process, SourceGuest, World};

impl Finish {
    pub(super) fn apply(&self, world: &mut World, action: Action) {
        match action {
            Action::KeeperHolds => world.keeper = true,
            Action::SourceSends => {
                world.has_call = false;
                self.source_step(world, |state| state.send().ok());
            }
            Action::SourceAsks => {
                world.network.insert(Message::Ask);
            }
            Action::SourceBreaks => world.source_connection = false,
            Action::SourceWrote => wrote(&mut world.source),
            Action::SourceDoes => source_does(world),
            Action::Deliver(message) => self.deliver(world, message),
            Action::StrangerAnswers => {
                let barred = self.broken == Some(BrokenFinish::UnknownIsBarred);
                let word = FinishAnswer::Word(FinishWord::DoesNotRun);
                let answer = if barred { word } else { FinishAnswer::Unknown };
                world.network.insert(Message::Answer(answer));
            }
            Action::DestinationWrote => wrote(&mut world.destination),
            Action::DestinationDoes => self.destination_does(world),
            Action::DestinationHears => {
                if let LibvirtCall::Replied(word) = world.call {
                    world.call = LibvirtCall::None;
                    self.destination_step(world, |state| state.reply(word).ok());
                }
            }
            Action::DestinationGivesUp => gives_up(world),
            Action::DestinationCloses => world.libvirt_connection = false,
            Action::SourceWriteFails { on_disk } => self.source_write_fails(world, on_disk),
            Action::DestinationWriteFails { on_disk } => {
                self.destination_write_fails(world, on_disk);
            }
            Action::SourceConfirms => {
                world.source_guest = match world.source_guest {
                    SourceGuest::Confirms(FinishWord::Runs) => SourceGuest::Killed,
                    _ => SourceGuest::Runs,
                }
            }
            Action::SourceSeesBreak => {
                world.source_guest = SourceGuest::Confirms(FinishWord::DoesNotRun);
            }
            Action::FaultsEnd => {
                world.faults_ended = true;
                world.network.clear();
                // A record that was not synced gets to the disk at last if its process lives.
                sync(&mut world.source);
                sync(&mut world.destination);
            }
            _ if self.apply_to_libvirt_or_death(world, action) => {}
            _ => operator_acts(world, action),
        }
    }

    /// Returns whether it is such an action.
    fn apply_to_libvirt_or_death(&self, world: &mut World, action: Action) -> bool {
        match action {
            Action::LibvirtBegins if world.domain == Domain::Waits => {
                world.call = LibvirtCall::Begun;
            }
            Action::LibvirtBegins => libvirt_replies(world, FinishWord::DoesNotRun),
            Action::LibvirtStarts => {
                world.domain = Domain::Runs;
                libvirt_replies(world, FinishWord::Runs);
            }
            Action::LibvirtFails => {
                world.domain = Domain::NeverRan;
                libvirt_replies(world, FinishWord::DoesNotRun);
            }
            Action::LibvirtDrops => {
                world.call = LibvirtCall::None;
                world.reply_lost = true;
            }
            Action::AutoDestroys => world.domain = Domain::NeverRan,
            Action::SourceDies { on_disk } => {
                dies(&mut world.source, on_disk);
                world.has_call = false;
                if !world.keeper || self.broken == Some(BrokenFinish::NoKeepAlive) {
                    world.source_connection = false;
                }
            }
            Action::SourceRestarts => {
                let state = world.source.disk;
                let todo = Some(state.resumed()).filter(|todo| *todo != SourceAction::Nothing);
                world.source.process = Some(Process { state, writing: None, todo });
            }
            Action::KeeperDies => {
                world.keeper = false;
                world.source_connection &= world.source.process.is_some();
            }
            Action::DestinationDies { on_disk } => {
                let process = world.destination.process.as_ref();
                let heard = process
                    .is_some_and(|process| matches!(process.state, DestinationFinish::Answered(_)));
                dies(&mut world.destination, on_disk);
                let lost_before = world.reply_lost;
                if world.keeps_destination {
                    // The Finish may not have been written, or its reply died with the process.
                    world.reply_lost |= world.call == LibvirtCall::None
                        && world.destination.disk == DestinationFinish::Passed;
                } else {
                    close_libvirt_connection(world);
                }
                // A word that was acted on is not lost with the process.
                world.reply_lost = lost_before || (world.reply_lost && !heard);
            }
            Action::DestinationRestarts => {
                let state = world.destination.disk;
                world.destination.process = Some(Process { state, writing: None, todo: None });
            }
            Action::SourceLibvirtRestarts => {
                world.source_guest = SourceGuest::LeftPaused;
                world.source_connection = false;
                if self.breaks(BrokenFinish::ForwardsEnd) {
                    gives_up(world);
                }
            }
            Action::LibvirtDies => {
                world.libvirt_runs = false;
                world.auto_destroy = false;
                close_libvirt_connection(world);
                world.call = LibvirtCall::None;
            }
            Action::LibvirtRestarts { kills } => {
                world.libvirt_runs = true;
                if kills {
                    world.domain = ended(world);
                }
            }
            Action::GuestMovesOn => world.domain = Domain::MovedOn,
            Action::GuestEnds => world.domain = ended(world),
            Action::HostIsLost => {
                world.lost = true;
                world.destination.process = None;
                world.libvirt_runs = false;
                world.libvirt_connection = false;
                world.call = LibvirtCall::None;
                world.domain = ended(world);
            }
            _ => return false,
        }
        true
    }

    fn deliver(&self, world: &mut World, message: Message) {
        match message {
            Message::Finish => {
                // A Finish passes only on the connection of its Prepare.
                if !world.libvirt_connection || world.destination.idle().is_none() {
                    return;
                }
                let passes_barred = self.broken == Some(BrokenFinish::PassesAfterBarred);
                self.destination_step(world, |state| match state {
                    DestinationFinish::Barred if passes_barred => {
                        DestinationFinish::NotPassed.pass().ok()
                    }
                    _ => state.pass().ok(),
                });
            }
            Message::Ask => {
                if world.destination.idle().is_some() {
                    self.destination_step(world, |state| Some(state.asked()));
                }
            }
            Message::Reply(word) => {
                if world.source.idle().is_some() {
                    self.source_step(world, |state| state.hear(FinishAnswer::Word(word)).ok());
                }
            }
            Message::Answer(answer) => {
                if world.source.idle().is_some() {
                    self.source_step(world, |state| state.hear(answer).ok());
                }
            }
        }
    }

    fn destination_does(&self, world: &mut World) {
        let action = world.destination.process.as_mut().and_then(|process| process.todo.take());
        match action {
            Some(DestinationAction::Pass) => {
                if world.libvirt_connection {
                    world.call = LibvirtCall::Written;
                } else {
                    // It can't be written any more.
                    self.destination_step(world, |state| state.reply(FinishWord::DoesNotRun).ok());
                }
            }
            Some(DestinationAction::Refuse) => {
                world.network.insert(Message::Reply(FinishWord::DoesNotRun));
            }
            Some(DestinationAction::SendReply(word)) => {
                world.network.insert(Message::Reply(word));
            }
            Some(DestinationAction::Answer(answer)) => {
                world.network.insert(Message::Answer(answer));
            }
            Some(DestinationAction::Look) => self.look(world),
            None => {}
        }
    }

    fn look(&self, world: &mut World) {
        let waiting = world.libvirt_connection && !world.reply_lost;
        let seen = match (world.libvirt_runs, world.domain) {
            (false, _) => DomainSeen::NoAnswer,
            (true, domain) => domain.seen(),
        };
        let does_not_run = match self.broken {
            Some(BrokenFinish::SaysWithoutLooking) => true,
            Some(BrokenFinish::GoneIsDoesNotRun) => !waiting && seen == DomainSeen::Gone,
            _ => false,
        };
        if does_not_run {
            self.destination_step(world, |state| state.operator(OperatorWord::SourceResumes).ok());
        } else if waiting {
            world.network.insert(Message::Answer(FinishAnswer::AskAgain));
        } else {
            self.destination_step(world, |state| state.looked(seen).ok());
        }
    }

    pub(super) fn source_step(
        &self,
        world: &mut World,
        step: impl FnOnce(SourceFinish) -> Option<SourceStep>,
    ) {
        let Some(process) = &mut world.source.process else { return };
        let Some(step) = step(process.state) else { return };
        let rule = BrokenFinish::UnsyncedAnsweredAtSource;
        self.begin(process, step, rule, world.faults_ended);
    }

    pub(super) fn destination_step(
        &self,
        world: &mut World,
        step: impl FnOnce(DestinationFinish) -> Option<DestinationStep>,
    ) {
        let Some(process) = &mut world.destination.process else { return };
        let Some(step) = step(process.state) else { return };
        let rule = BrokenFinish::UnsyncedAnswered;
        self.begin(process, step, rule, world.faults_ended);
    }

    /// Begins to write the step's record, or acts if there is none.
    fn begin<S, A>(
        &self,
        process: &mut Process<S, A>,
        step: FinishStep<S, A>,
        answered: BrokenFinish,
        faults_ended: bool,
    ) {
        let unsynced = match step.journal {
            None => true,
            Some(_) if faults_ended => false,
            Some(FinishRecord::Sent) => self.broken == Some(BrokenFinish::UnsyncedSent),
            Some(FinishRecord::Passed) => self.broken == Some(BrokenFinish::UnsyncedPassed),
            Some(FinishRecord::Barred) => self.broken == Some(BrokenFinish::UnsyncedBarred),
            Some(FinishRecord::Answered { .. }) => self.broken == Some(answered),
            Some(FinishRecord::Open { .. }) => false,
        };
        if unsynced {
            process.state = step.state;
            process.todo = Some(step.action);
        } else {
            process.writing = Some((step.state, step.action));
        }
    }
}

fn source_does(world: &mut World) {
    let action = world.source.process.as_mut().and_then(|process| process.todo.take());
    match action {
        Some(SourceAction::Send) => {
            world.network.insert(Message::Finish);
        }
        Some(SourceAction::Ask) => {
            world.network.insert(Message::Ask);
        }
        Some(SourceAction::Reply(word)) => {
            if world.source_connection && world.source_guest == SourceGuest::Waits {
                world.source_guest = SourceGuest::Confirms(word);
            }
        }
        Some(SourceAction::Nothing) | None => {}
    }
}

fn gives_up(world: &mut World) {
    world.libvirt_connection = false;
    drop_reply(world);
}

fn sync<S: Copy, A>(daemon: &mut Daemon<S, A>) {
    if let Some(process) = &daemon.process {
        daemon.disk = process.state;
    }
}

fn wrote<S: Copy, A>(daemon: &mut Daemon<S, A>) {
    let Some(process) = &mut daemon.process else { return };
    let Some((state, action)) = process.writing.take() else { return };
    process.state = state;
    process.todo = Some(action);
    daemon.disk = state;
}

fn dies<S, A>(daemon: &mut Daemon<S, A>, on_disk: bool) {
    let writing = daemon.process.take().and_then(|process| process.writing);
    if let Some((state, _)) = writing
        && on_disk
    {
        daemon.disk = state;
    }
}

fn libvirt_replies(world: &mut World, word: FinishWord) {
    world.call = LibvirtCall::Replied(word);
    if !world.libvirt_connection {
        drop_reply(world);
        world.reply_lost = true;
    }
}

fn close_libvirt_connection(world: &mut World) {
    if world.destination.disk != DestinationFinish::NotPassed || world.call != LibvirtCall::None {
        world.reply_lost = true;
    }
    world.libvirt_connection = false;
    drop_reply(world);
}

fn drop_reply(world: &mut World) {
    if matches!(world.call, LibvirtCall::Replied(_)) {
        world.call = LibvirtCall::None;
    }
}

fn ended(world: &World) -> Domain {
    let promised = world.destination.disk == DestinationFinish::Answered(FinishWord::Runs);
    match world.domain {
        Domain::Runs => Domain::Ended,
        // As after RUN-INTENT: the guest has crashed.
        Domain::Waits if promised => Domain::Ended,
        Domain::Waits => Domain::NeverRan,
        other => other,
    }
}
