//! What the driver of the source promises, and takes back.

use super::{Core, Held};
use crate::held::{returned, write_commit};
use crate::source::io::Input;
use crate::vm::Resume;

impl<V: Resume> Core<'_, V> {
    pub(super) fn commit(&mut self) -> Input {
        match write_commit(&mut self.journal) {
            Ok(proof) => {
                self.held = match std::mem::replace(&mut self.held, Held::Moving) {
                    Held::Paused(paused) => {
                        paused.commit(proof).map_or(Held::Moving, Held::Committed)
                    }
                    other => other,
                };
                Input::CommitWritten(Ok(()))
            }
            Err(error) => Input::CommitWritten(Err(error.into())),
        }
    }

    /// Lets the guest run, if it stands still here and is this host's.
    pub(super) fn resume(&mut self) {
        let paused = match std::mem::replace(&mut self.held, Held::Moving) {
            Held::Paused(paused) => paused,
            Held::Committed(committed) => match returned(self.machine.handover()) {
                Some(proof) => committed.take_back(proof),
                None => {
                    self.held = Held::Committed(committed);
                    return;
                }
            },
            other => {
                self.held = other;
                return;
            }
        };
        match paused.resume() {
            Ok(running) => self.held = Held::Running(running),
            Err((paused, error)) => {
                self.held = paused.map_or(Held::Moving, Held::Paused);
                self.resume_failure = Some(error);
            }
        }
    }
}
