//! Which hints are valid: the state machine of free page hinting (section 5.5.6.4).

use std::fmt;

use crate::{BalloonError, SavedHints, SavedPhase};

/// `VIRTIO_BALLOON_CMD_ID_STOP`.
const STOP: u32 = 0;
/// `VIRTIO_BALLOON_CMD_ID_DONE`.
const DONE: u32 = 1;
/// 0 and 1 are reserved.
const FIRST_ID: u32 = 2;

/// The number of a round of hints, from 2 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommandId(pub(crate) u32);

impl CommandId {
    /// The number that the driver sees.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Display for CommandId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The effect of a driver's command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reaction {
    Nothing,
    /// The driver has no more hints.
    Complete(CommandId),
    /// The round is over because the driver sent an unexpected command.
    Unexpected(CommandId),
}

#[derive(Debug)]
pub(crate) struct Hints {
    /// The value in the configuration space: STOP, DONE or an ID.
    shown: u32,
    /// The last ID that was used; 0 before the first.
    last: u32,
    phase: SavedPhase,
}

impl Hints {
    pub(crate) fn new() -> Self {
        Self { shown: STOP, last: 0, phase: SavedPhase::Idle }
    }

    pub(crate) fn shown(&self) -> u32 {
        self.shown
    }

    pub(crate) fn start(&mut self) -> CommandId {
        self.last = self.last.checked_add(1).map_or(FIRST_ID, |next| next.max(FIRST_ID));
        self.shown = self.last;
        self.phase = SavedPhase::Requested;
        CommandId(self.last)
    }

    pub(crate) fn stop(&mut self) {
        (self.shown, self.phase) = (STOP, SavedPhase::Idle);
    }

    pub(crate) fn finish(&mut self) {
        (self.shown, self.phase) = (DONE, SavedPhase::Idle);
    }

    /// Whether an ID was used and DONE was not shown since.
    pub(crate) fn owes_done(&self) -> bool {
        self.last != 0 && self.shown != DONE
    }

    /// The round that may still report hints.
    pub(crate) fn awaited(&self) -> Option<CommandId> {
        matches!(self.phase, SavedPhase::Requested | SavedPhase::Started)
            .then_some(CommandId(self.shown))
    }

    /// The round that hints belong to now.
    pub(crate) fn current(&self) -> Option<CommandId> {
        (self.phase == SavedPhase::Started).then_some(CommandId(self.shown))
    }

    /// Handles a command of the driver. Commands of earlier rounds are common and are ignored.
    pub(crate) fn command(&mut self, command: u32) -> Reaction {
        let id = CommandId(self.shown);
        match self.phase {
            SavedPhase::Requested if command == self.shown => {
                self.phase = SavedPhase::Started;
                Reaction::Nothing
            }
            // Sending it twice is against the rules, but the meaning is clear.
            SavedPhase::Started if command == self.shown => Reaction::Nothing,
            SavedPhase::Started => {
                self.phase = SavedPhase::Ended;
                if command == STOP { Reaction::Complete(id) } else { Reaction::Unexpected(id) }
            }
            _ => Reaction::Nothing,
        }
    }

    pub(crate) fn save(&self) -> SavedHints {
        SavedHints { shown: self.shown, last: self.last, phase: self.phase }
    }

    pub(crate) fn restore(saved: &SavedHints) -> Result<Self, BalloonError> {
        let SavedHints { shown, last, phase } = *saved;
        let is_id = shown >= FIRST_ID;
        if last == DONE || (is_id && shown != last) || (is_id == (phase == SavedPhase::Idle)) {
            let text = format!("hints in phase {phase:?} with command {shown} after {last}");
            return Err(BalloonError::State(text));
        }
        Ok(Self { shown, last, phase })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_ids_never_repeat_and_skip_reserved_ones() {
        let mut hints = Hints::new();
        assert_eq!((hints.start().0, hints.start().0), (2, 3));
        hints.last = u32::MAX - 1;
        assert_eq!(hints.start().0, u32::MAX);
        assert_eq!(hints.start().0, 2);
        hints.finish();
        assert_eq!(hints.start().0, 3);
    }

    #[test]
    fn load_refuses_impossible_states() {
        use SavedPhase::{Ended, Idle, Requested, Started};
        for (shown, last, phase) in [
            (0, 0, Idle),
            (1, 7, Idle),
            (0, 7, Idle),
            (7, 7, Started),
            (7, 7, Requested),
            (9, 9, Ended),
        ] {
            let saved = SavedHints { shown, last, phase };
            assert_eq!(Hints::restore(&saved).unwrap().save(), saved);
        }
        for (shown, last, phase) in [
            (0, 0, Started),
            (1, 7, Ended),
            (6, 7, Started),
            (7, 7, Idle),
            (0, 1, Idle),
            (0, 5, Requested),
        ] {
            assert!(
                Hints::restore(&SavedHints { shown, last, phase }).is_err(),
                "{shown} {phase:?}"
            );
        }
    }
}
