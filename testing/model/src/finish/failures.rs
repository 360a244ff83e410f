//! Writes of journals that fail while the daemon lives.

use vmferry_handover::{DestinationAction, FinishAnswer, FinishWord, SourceAction};

use super::model::Finish;
use super::world::World;

impl Finish {
    /// The process lives, and knows what it has not done.
    pub(super) fn source_write_fails(&self, world: &mut World, on_disk: bool) {
        let Some(process) = &mut world.source.process else { return };
        let Some((state, action)) = process.writing.take() else { return };
        if on_disk {
            world.source.disk = state;
        }
        process.state = world.source.disk;
        match action {
            // The Finish is not sent, so libvirt may see its connection fail.
            SourceAction::Send => world.source_connection = false,
            SourceAction::Reply(word) => {
                self.source_step(world, |state| state.hear(FinishAnswer::Word(word)).ok());
            }
            SourceAction::Ask | SourceAction::Nothing => {}
        }
    }

    pub(super) fn destination_write_fails(&self, world: &mut World, on_disk: bool) {
        let Some(process) = &mut world.destination.process else { return };
        let Some((state, action)) = process.writing.take() else { return };
        if on_disk {
            world.destination.disk = state;
        }
        process.state = world.destination.disk;
        let word = match action {
            // The Finish is not written.
            DestinationAction::Pass => FinishWord::DoesNotRun,
            DestinationAction::SendReply(word)
            | DestinationAction::Answer(FinishAnswer::Word(word)) => word,
            _ => return,
        };
        // BARRED is written again when the source asks again.
        self.destination_step(world, |state| state.reply(word).ok());
    }
}
