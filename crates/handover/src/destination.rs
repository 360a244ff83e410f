//! The destination's half of the handover.

use crate::SessionWord;

/// Where the destination stands. See the diagram in the [crate](crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationState {
    /// Memory and state are arriving. OPEN is in the journal.
    Receiving,
    /// All memory is placed, the state is loaded, the digests agree: waits for COMMIT.
    Ready,
    /// COMMIT has come and RUN-INTENT is being written.
    IntentWriting,
    /// RUN-INTENT is on disk: the guest is this host's, for good.
    Owns,
    /// ABORTED is being written.
    AbortWriting,
    /// ABORTED is on disk: the guest never runs here.
    Aborted,
    /// The journal failed, so that nobody knows which record is on disk. The guest does not run in
    /// this process; the next one to read the journal knows. A guest that outlives the process
    /// waits for that one.
    Stuck,
}

/// What happens to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationEvent {
    /// All memory is placed, the state is loaded, the digests agree.
    Loaded,
    /// COMMIT, on the control channel or on a query channel.
    Commit,
    /// The source said that there will be no COMMIT, or this side failed or was cancelled.
    Failed,
    /// The link to the source is gone, or silent for too long.
    LinkLost,
    /// No COMMIT has come for as long as the configuration allows.
    CommitTimeout,
    /// RUN-INTENT is on disk.
    IntentWritten,
    /// ABORTED is on disk.
    AbortWritten,
    /// The record that was being written may be on disk, or not.
    JournalFailed,
    /// The source asks for the word about this session.
    Query,
}

/// What the driver must do, in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationEffect {
    /// Tell the source that this side is READY.
    SendReady,
    /// Append RUN-INTENT, synced, and report `IntentWritten` or `JournalFailed`.
    WriteIntent,
    /// Append ABORTED, synced, and report `AbortWritten` or `JournalFailed`.
    WriteAborted,
    /// Run the guest, unless it has run on this host before. After a restart it may have.
    Run,
    /// Tell the source that the guest runs here.
    SendRunning,
    /// Tell the source that the guest never ran here and never will.
    SendAborted,
    /// Throw away what is here of the guest's memory and state.
    Discard,
    /// Answer the query with this word.
    Answer(SessionWord),
}

impl DestinationState {
    /// Whether the guest may run on this host in this state.
    #[must_use]
    pub fn may_run(self) -> bool {
        self == Self::Owns
    }

    /// Whether the handover is over on this side.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Owns | Self::Aborted | Self::Stuck)
    }

    /// The word that this side gives about its session.
    #[must_use]
    pub fn word(self) -> SessionWord {
        match self {
            Self::Receiving | Self::Ready | Self::IntentWriting | Self::AbortWriting => {
                SessionWord::Pending
            }
            Self::Owns => SessionWord::Owns,
            Self::Aborted => SessionWord::Aborted,
            Self::Stuck => SessionWord::Unknown,
        }
    }

    /// The state after `event`, and what must be done.
    #[must_use]
    pub fn step(self, event: DestinationEvent) -> (Self, &'static [DestinationEffect]) {
        use DestinationEffect as Do;
        use DestinationEvent as On;
        use DestinationState as S;
        match (self, event) {
            (state, On::Query) => (
                state,
                match state.word() {
                    SessionWord::Unknown => &[Do::Answer(SessionWord::Unknown)],
                    SessionWord::Pending => &[Do::Answer(SessionWord::Pending)],
                    SessionWord::Aborted => &[Do::Answer(SessionWord::Aborted)],
                    SessionWord::Owns => &[Do::Answer(SessionWord::Owns)],
                },
            ),

            (S::Receiving, On::Loaded) => (S::Ready, &[Do::SendReady]),
            // A COMMIT without READY is a broken peer: the guest is not whole here.
            (S::Receiving, On::Failed | On::LinkLost | On::Commit | On::CommitTimeout)
            | (S::Ready, On::Failed | On::CommitTimeout) => (S::AbortWriting, &[Do::WriteAborted]),

            (S::Ready, On::Commit) => (S::IntentWriting, &[Do::WriteIntent]),
            // The source may have journalled COMMIT: only time or its own word ends the wait.
            (S::Ready, On::LinkLost) => (S::Ready, &[]),

            (S::IntentWriting, On::IntentWritten) => (S::Owns, &[Do::Run, Do::SendRunning]),
            (S::AbortWriting, On::AbortWritten) => (S::Aborted, &[Do::SendAborted, Do::Discard]),
            (S::AbortWriting, On::JournalFailed) => (S::Stuck, &[Do::Discard]),
            // RUN-INTENT may be on disk: the next process needs the guest then.
            (S::IntentWriting, On::JournalFailed) => (S::Stuck, &[]),

            // COMMIT again: the answer to the first one was lost.
            (S::Owns, On::Commit) => (S::Owns, &[Do::SendRunning]),
            (S::Aborted, On::Commit) => (S::Aborted, &[Do::SendAborted]),

            (state, _) => (state, &[]),
        }
    }
}

/// The state of a session after a restart of the destination, from what its journal holds, and what
/// must be done: `None` when the journal does not know the session.
///
/// A guest may outlive the process that received it. One that was promised to run is run if it
/// never has, and what is left of one that never will is thrown away.
#[must_use]
pub fn recover_destination(
    opened: bool,
    intent: bool,
    aborted: bool,
) -> Option<(DestinationState, &'static [DestinationEffect])> {
    use DestinationEffect as Do;
    Some(match (opened, intent, aborted) {
        (_, true, false) => (DestinationState::Owns, &[Do::Run]),
        (_, false, true) => (DestinationState::Aborted, &[Do::Discard]),
        // ABORTED must be on disk before it is said.
        (true, false, false) => (DestinationState::AbortWriting, &[Do::WriteAborted]),
        (false, false, false) => return None,
        // Written by no version of this code. Neither word may be given.
        (_, true, true) => (DestinationState::Stuck, &[]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [DestinationState; 7] = [
        DestinationState::Receiving,
        DestinationState::Ready,
        DestinationState::IntentWriting,
        DestinationState::Owns,
        DestinationState::AbortWriting,
        DestinationState::Aborted,
        DestinationState::Stuck,
    ];
    const EVENTS: [DestinationEvent; 9] = [
        DestinationEvent::Loaded,
        DestinationEvent::Commit,
        DestinationEvent::Failed,
        DestinationEvent::LinkLost,
        DestinationEvent::CommitTimeout,
        DestinationEvent::IntentWritten,
        DestinationEvent::AbortWritten,
        DestinationEvent::JournalFailed,
        DestinationEvent::Query,
    ];

    #[test]
    fn the_guest_runs_only_after_run_intent_is_written() {
        for state in STATES {
            for event in EVENTS {
                let (next, effects) = state.step(event);
                let first_run = state == DestinationState::IntentWriting
                    && event == DestinationEvent::IntentWritten;
                assert_eq!(effects.contains(&DestinationEffect::Run), first_run);
                assert!(!next.may_run() || state.may_run() || first_run);
            }
        }
    }

    #[test]
    fn no_journal_ever_holds_both_words() {
        // From a state in which one record is or may be written, the other is never asked for.
        let reachable = |from: DestinationState| {
            let mut seen = vec![from];
            let mut at = 0;
            while at < seen.len() {
                for event in EVENTS {
                    let (next, _) = seen[at].step(event);
                    if !seen.contains(&next) {
                        seen.push(next);
                    }
                }
                at += 1;
            }
            seen
        };
        for (from, forbidden) in [
            (DestinationState::IntentWriting, DestinationEffect::WriteAborted),
            (DestinationState::AbortWriting, DestinationEffect::WriteIntent),
        ] {
            for state in reachable(from) {
                for event in EVENTS {
                    assert!(!state.step(event).1.contains(&forbidden), "{state:?} {event:?}");
                }
            }
        }
    }

    #[test]
    fn a_ready_destination_outlives_its_link() {
        assert_eq!(
            DestinationState::Ready.step(DestinationEvent::LinkLost),
            (DestinationState::Ready, &[][..])
        );
    }

    #[test]
    fn stuck_keeps_a_guest_that_may_be_promised() {
        let failed = DestinationEvent::JournalFailed;
        assert_eq!(
            DestinationState::IntentWriting.step(failed),
            (DestinationState::Stuck, &[][..])
        );
        assert_eq!(
            DestinationState::AbortWriting.step(failed),
            (DestinationState::Stuck, &[DestinationEffect::Discard][..])
        );
    }

    #[test]
    fn recover_destination_follows_the_journal() {
        use DestinationEffect as Do;
        for (journal, recovered) in [
            ((true, true, false), Some((DestinationState::Owns, &[Do::Run][..]))),
            ((true, false, true), Some((DestinationState::Aborted, &[Do::Discard]))),
            ((true, false, false), Some((DestinationState::AbortWriting, &[Do::WriteAborted]))),
            ((false, false, false), None),
            ((true, true, true), Some((DestinationState::Stuck, &[]))),
        ] {
            let (opened, intent, aborted) = journal;
            assert_eq!(recover_destination(opened, intent, aborted), recovered);
        }
    }
}
