//! What operators do, as `vmferry resolve` lets them.
//!
//! They have looked at the other host, or it is lost, so they say what is true. The word is in the
//! journal before libvirt is told anything, and libvirt is told what the journal says.

use vmferry_handover::{DestinationFinish, FinishStep, FinishWord, OperatorWord, SourceFinish};

use super::action::Action;
use super::model::{BrokenFinish, Finish};
use super::world::{Daemon, Domain, LibvirtCall, SourceGuest, World};

const OWNS: OperatorWord = OperatorWord::DestinationOwns;
const RESUMES: OperatorWord = OperatorWord::SourceResumes;

impl Finish {
    pub(super) fn operator_actions(&self, world: &World, actions: &mut Vec<Action>) {
        Self::at_the_source(world, actions);
        if world.libvirt_runs && !world.lost {
            self.at_the_destination(world, actions);
        }
    }

    fn at_the_source(world: &World, actions: &mut Vec<Action>) {
        let ran = world.has_run_there();
        let never = match world.destination.disk {
            DestinationFinish::Barred | DestinationFinish::Answered(FinishWord::DoesNotRun) => true,
            _ => world.lost && !ran,
        };
        if is_free(&world.source) && world.source.disk == SourceFinish::Sent {
            if ran {
                actions.push(Action::OperatorAtSource(OWNS));
            } else if never {
                actions.push(Action::OperatorAtSource(RESUMES));
            }
        }
        // With the connection that the keeper holds. A daemon that lives replies itself.
        if let (None, SourceFinish::Answered(_)) = (&world.source.process, world.source.disk)
            && world.keeper
            && world.source_connection
            && world.source_guest == SourceGuest::Waits
        {
            actions.push(Action::OperatorReplies);
        }
        if world.source_guest == SourceGuest::LeftPaused {
            let sends = world.source.process.as_ref().is_some_and(|process| {
                process.writing.is_some() || process.state != SourceFinish::NotSent
            });
            match world.source.disk {
                SourceFinish::Answered(FinishWord::DoesNotRun) => {
                    actions.push(Action::OperatorEndsPause(RESUMES));
                }
                SourceFinish::NotSent if !sends => {
                    actions.push(Action::OperatorEndsPause(RESUMES));
                }
                SourceFinish::Answered(FinishWord::Runs) => {
                    actions.push(Action::OperatorEndsPause(OWNS));
                }
                SourceFinish::Sent | SourceFinish::NotSent => {}
            }
        }
    }

    fn at_the_destination(&self, world: &World, actions: &mut Vec<Action>) {
        let idle = world.call == LibvirtCall::None;
        // libvirt has a job for a guest that it will start or destroy by itself.
        let is_left = world.domain == Domain::Waits && idle && !world.auto_destroy;
        let early = self.breaks(BrokenFinish::DecidesTooEarly);
        let passed = world.destination.disk == DestinationFinish::Passed;
        if passed && is_free(&world.destination) && (world.reply_lost && idle || early) {
            match world.domain {
                Domain::Runs | Domain::MovedOn | Domain::Ended => {
                    actions.push(Action::OperatorAtDestination(OWNS));
                }
                Domain::NeverRan => actions.push(Action::OperatorAtDestination(RESUMES)),
                Domain::Waits if is_left => {
                    actions.push(Action::OperatorAtDestination(OWNS));
                    actions.push(Action::OperatorAtDestination(RESUMES));
                }
                // A keeper has the connection, so libvirt goes on waiting.
                Domain::Waits if world.libvirt_connection || early => {
                    actions.push(Action::OperatorAtDestination(RESUMES));
                }
                Domain::Waits => {}
            }
        }
        match world.destination.disk {
            DestinationFinish::Answered(FinishWord::Runs) if is_left => {
                actions.push(Action::OperatorResumes);
            }
            DestinationFinish::Answered(FinishWord::DoesNotRun)
                if world.domain == Domain::Waits && idle =>
            {
                actions.push(Action::OperatorDestroys);
            }
            // Nothing passes a Finish on once the connection of the Prepare is closed.
            DestinationFinish::NotPassed | DestinationFinish::Barred
                if is_left && !world.libvirt_connection =>
            {
                actions.push(Action::OperatorDestroys);
            }
            _ => {}
        }
    }
}

/// The effects.
pub(super) fn operator_acts(world: &mut World, action: Action) {
    match action {
        Action::OperatorAtSource(word) => {
            if let Ok(step) = world.source.disk.operator(word) {
                decides(&mut world.source, step);
            }
        }
        Action::OperatorAtDestination(word) => {
            if let Ok(step) = world.destination.disk.operator(word) {
                decides(&mut world.destination, step);
            }
        }
        Action::OperatorReplies => {
            if let SourceFinish::Answered(word) = world.source.disk {
                world.source_guest = SourceGuest::Confirms(word);
            }
        }
        Action::OperatorEndsPause(OperatorWord::SourceResumes) => {
            world.source_guest = SourceGuest::Runs;
        }
        Action::OperatorEndsPause(OperatorWord::DestinationOwns) => {
            world.source_guest = SourceGuest::Killed;
        }
        Action::OperatorResumes => world.domain = Domain::Runs,
        Action::OperatorDestroys => world.domain = Domain::NeverRan,
        _ => {}
    }
}

/// An operator's word is on disk, and a daemon that lives acts on it.
fn decides<S: Copy, A>(daemon: &mut Daemon<S, A>, step: FinishStep<S, A>) {
    daemon.disk = step.state;
    if let Some(process) = &mut daemon.process {
        process.state = step.state;
        process.todo = Some(step.action);
    }
}

/// Whether no daemon is in the middle of a step.
fn is_free<S: Copy, A>(daemon: &Daemon<S, A>) -> bool {
    daemon.process.is_none() || daemon.idle().is_some()
}
