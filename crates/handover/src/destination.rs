//! The destination's half of the handover.

use crate::SessionWord;

/// The destination's state. See the diagram in the [crate](crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationState {
    /// Memory and state are arriving. OPEN is in the journal.
    Receiving,
    /// All memory is placed, the state is loaded and the digests agree. The destination waits for
    /// COMMIT.
    Ready,
    /// COMMIT was received, and RUN-INTENT is being written.
    IntentWriting,
    /// RUN-INTENT is on disk: this host owns the guest from now on.
    Owns,
    /// ABORTED is being written.
    AbortWriting,
    /// ABORTED is on disk: the guest never runs here.
    Aborted,
    /// The journal failed, so it is unknown which record is on disk. The guest does not run in this
    /// process. The next process that reads the journal decides; a guest that outlives this process
    /// waits for it.
    Stuck,
}

/// An input of the destination's state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationEvent {
    /// All memory is placed, the state is loaded and the digests agree.
    Loaded,
    /// COMMIT was received on the control channel or on a query channel.
    Commit,
    /// The source announced that there will be no COMMIT, or this side failed or was canceled.
    Failed,
    /// The link to the source was lost, or was silent for too long.
    LinkLost,
    /// No COMMIT was received within the configured time.
    CommitTimeout,
    /// RUN-INTENT is on disk.
    IntentWritten,
    /// ABORTED is on disk.
    AbortWritten,
    /// A write to the journal failed. The record may or may not be on disk.
    JournalFailed,
    /// The source asks for the destination's word about this session.
    Query,
}

/// An action that the driver must take, in the given order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationEffect {
    /// Tell the source that this side is READY.
    SendReady,
    /// Append RUN-INTENT, synced, and report `IntentWritten` or `JournalFailed`.
    WriteIntent,
    /// Append ABORTED, synced, and report `AbortWritten` or `JournalFailed`.
    WriteAborted,
    /// Run the guest, unless it has already run on this host, as it may have before a restart.
    Run,
    /// Tell the source that the guest runs here.
    SendRunning,
    /// Tell the source that the guest never ran here and never will.
    SendAborted,
    /// Discard the guest's memory and state on this host.
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

    /// Whether the handover has ended on this side.
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

    /// The state after `event`, and the required effects.
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
            // COMMIT without READY means a broken peer: the guest is incomplete here.
            (S::Receiving, On::Failed | On::LinkLost | On::Commit | On::CommitTimeout)
            | (S::Ready, On::Failed | On::CommitTimeout) => (S::AbortWriting, &[Do::WriteAborted]),

            (S::Ready, On::Commit) => (S::IntentWriting, &[Do::WriteIntent]),
            // The source may have journaled COMMIT. Only the timeout or the source's word ends the
            // wait.
            (S::Ready, On::LinkLost) => (S::Ready, &[]),

            (S::IntentWriting, On::IntentWritten) => (S::Owns, &[Do::Run, Do::SendRunning]),
            (S::AbortWriting, On::AbortWritten) => (S::Aborted, &[Do::SendAborted, Do::Discard]),
            (S::AbortWriting, On::JournalFailed) => (S::Stuck, &[Do::Discard]),
            // RUN-INTENT may be on disk. If it is, the next process needs the guest.
            (S::IntentWriting, On::JournalFailed) => (S::Stuck, &[]),

            // A repeated COMMIT: the answer to the first one was lost.
            (S::Owns, On::Commit) => (S::Owns, &[Do::SendRunning]),
            (S::Aborted, On::Commit) => (S::Aborted, &[Do::SendAborted]),

            (state, _) => (state, &[]),
        }
    }
}

/// The promises that a destination's journal holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DestinationRecords {
    /// Whether it holds OPEN.
    pub opened: bool,
    /// Whether it holds RUN-INTENT.
    pub intent: bool,
    /// Whether it holds ABORTED.
    pub aborted: bool,
}

/// The state of a session after a restart of the destination, and the required effects, derived
/// from the journal's records. `None` if the journal does not know the session.
///
/// A guest may outlive the process that received it. After RUN-INTENT the guest is run if it has
/// never run here. After ABORTED it is discarded.
#[must_use]
pub fn recover_destination(
    records: DestinationRecords,
) -> Option<(DestinationState, &'static [DestinationEffect])> {
    use DestinationEffect as Do;
    Some(match (records.opened, records.intent, records.aborted) {
        (_, true, false) => (DestinationState::Owns, &[Do::Run]),
        (_, false, true) => (DestinationState::Aborted, &[Do::Discard]),
        // ABORTED must be on disk before it is sent.
        (true, false, false) => (DestinationState::AbortWriting, &[Do::WriteAborted]),
        (false, false, false) => return None,
        // No version of this code writes both records. Neither word may be given.
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
    fn guest_runs_only_after_run_intent_is_written() {
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
    fn journal_never_holds_both_words() {
        // Once one of the records is or may be written, the other must never be requested.
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
    fn ready_destination_ignores_a_lost_link() {
        assert_eq!(
            DestinationState::Ready.step(DestinationEvent::LinkLost),
            (DestinationState::Ready, &[][..])
        );
    }

    #[test]
    fn stuck_keeps_the_guest_only_if_run_intent_may_be_written() {
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
            let records = DestinationRecords { opened, intent, aborted };
            assert_eq!(recover_destination(records), recovered);
        }
    }
}
