//! The destination's half of the handover.

use crate::{SessionKind, SessionWord};

/// The destination's state. See the diagram in the [crate](crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationState {
    /// Memory and state are arriving. OPEN is in the journal.
    Receiving,
    /// All memory is placed, the state is loaded and the digests agree. The destination waits for
    /// COMMIT.
    Ready,
    /// COMMIT was received, and the witness, if there is one, is asked for the guest.
    Claiming,
    /// RUN-INTENT is being written.
    IntentWriting,
    /// RUN-INTENT is on disk: this host owns the guest from now on, and needs nothing of the
    /// source.
    Owns,
    /// RUN-INTENT is on disk and the guest runs, but lacks pages that only the source has.
    Fetching,
    /// Every page is placed, and FETCHED is being written.
    FetchedWriting,
    /// The guest has ended while it lacked pages, and ENDED is being written.
    EndedWriting,
    /// ENDED is on disk: the guest was this host's, and has ended while it lacked pages. It needs
    /// nothing of the source any more.
    Ended,
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
    /// The witness has granted the guest to this host, or the session has no witness.
    Claimed,
    /// The witness has given the guest back to the source, or freed it.
    ClaimRefused,
    /// RUN-INTENT of a session of this kind is on disk.
    IntentWritten(SessionKind),
    /// Every page is placed, or the guest was ended on purpose: nothing of the source is needed.
    Fetched,
    /// FETCHED is on disk.
    FetchedWritten,
    /// The guest has crashed while it lacked pages.
    Crashed,
    /// ENDED is on disk.
    EndedWritten,
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
    /// Claim the guest at the witness, and report `Claimed` or `ClaimRefused`. An unanswered claim
    /// is neither. Without a witness, report `Claimed` at once.
    Claim,
    /// Append RUN-INTENT, synced, and report `IntentWritten` or `JournalFailed`.
    WriteIntent,
    /// Append ABORTED, synced, and report `AbortWritten` or `JournalFailed`.
    WriteAborted,
    /// Run the guest, unless it has already run on this host, as it may have before a restart.
    Run,
    /// Tell the source that the guest runs here and needs nothing of the source.
    SendRunning,
    /// Tell the source that the guest runs here and lacks pages.
    SendFetching,
    /// Append FETCHED, synced, and report `FetchedWritten` or `JournalFailed`.
    WriteFetched,
    /// Append ENDED, synced, and report `EndedWritten` or `JournalFailed`.
    WriteEnded,
    /// Tell the source that the guest has ended here while it lacked pages.
    SendEnded,
    /// Tell the source that the guest never ran here and never will.
    SendAborted,
    /// Discard the guest's memory and state on this host.
    Discard,
    /// Answer the query with this word.
    Answer(SessionWord),
}

impl DestinationState {
    /// Whether the guest is this host's, so that it may run here.
    #[must_use]
    pub fn may_run(self) -> bool {
        matches!(self, Self::Owns | Self::Ended) || self.is_fetching()
    }

    /// Whether the guest may run here and lacks pages, as far as the journal says.
    #[must_use]
    pub fn is_fetching(self) -> bool {
        matches!(self, Self::Fetching | Self::FetchedWriting | Self::EndedWriting)
    }

    /// Whether the handover has ended on this side.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Owns | Self::Ended | Self::Aborted | Self::Stuck)
    }

    /// The word that this side gives about its session.
    #[must_use]
    pub fn word(self) -> SessionWord {
        match self {
            Self::Receiving
            | Self::Ready
            | Self::Claiming
            | Self::IntentWriting
            | Self::AbortWriting => SessionWord::Pending,
            Self::Owns => SessionWord::Owns,
            Self::Fetching | Self::FetchedWriting | Self::EndedWriting => SessionWord::Fetching,
            Self::Ended => SessionWord::Ended,
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
                    SessionWord::Fetching => &[Do::Answer(SessionWord::Fetching)],
                    SessionWord::Ended => &[Do::Answer(SessionWord::Ended)],
                },
            ),

            (S::Receiving, On::Loaded) => (S::Ready, &[Do::SendReady]),
            // COMMIT without READY means a broken peer: the guest is incomplete here.
            (S::Receiving, On::Failed | On::LinkLost | On::Commit | On::CommitTimeout)
            // A claim permits RUN-INTENT and does not demand it.
            | (S::Ready | S::Claiming, On::Failed | On::CommitTimeout)
            | (S::Claiming, On::ClaimRefused) => (S::AbortWriting, &[Do::WriteAborted]),

            (S::Ready, On::Commit) => (S::Claiming, &[Do::Claim]),
            (S::Claiming, On::Claimed) => (S::IntentWriting, &[Do::WriteIntent]),
            // The source may have journaled COMMIT. Only the timeout or the source's word ends the
            // wait.
            (S::Ready, On::LinkLost) => (S::Ready, &[]),

            (S::IntentWriting, On::IntentWritten(SessionKind::PreCopy)) => {
                (S::Owns, &[Do::Run, Do::SendRunning])
            }
            (S::IntentWriting, On::IntentWritten(SessionKind::PostCopy)) => {
                (S::Fetching, &[Do::Run, Do::SendFetching])
            }
            (S::Fetching, On::Fetched) => (S::FetchedWriting, &[Do::WriteFetched]),
            (S::FetchedWriting, On::FetchedWritten) => (S::Owns, &[Do::SendRunning]),
            (S::Fetching, On::Crashed) => (S::EndedWriting, &[Do::WriteEnded]),
            (S::EndedWriting, On::EndedWritten) => (S::Ended, &[Do::SendEnded]),
            // The source keeps the pages until a later attempt succeeds.
            (S::FetchedWriting | S::EndedWriting, On::JournalFailed) => (S::Fetching, &[]),
            (S::AbortWriting, On::AbortWritten) => (S::Aborted, &[Do::SendAborted, Do::Discard]),
            (S::AbortWriting, On::JournalFailed) => (S::Stuck, &[Do::Discard]),
            // RUN-INTENT may be on disk. If it is, the next process needs the guest.
            (S::IntentWriting, On::JournalFailed) => (S::Stuck, &[]),

            // A repeated COMMIT: the answer to the first one was lost.
            (S::Owns, On::Commit) => (S::Owns, &[Do::SendRunning]),
            (S::Fetching | S::FetchedWriting | S::EndedWriting, On::Commit) => {
                (self, &[Do::SendFetching])
            }
            (S::Ended, On::Commit) => (S::Ended, &[Do::SendEnded]),
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
    /// The kind of the session whose RUN-INTENT it holds.
    pub intent: Option<SessionKind>,
    /// Whether it holds FETCHED.
    pub fetched: bool,
    /// Whether it holds ENDED.
    pub ended: bool,
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
    let DestinationRecords { opened, intent, fetched, ended, aborted } = records;
    Some(match (opened, intent, aborted) {
        (_, Some(SessionKind::PostCopy), false) if ended && !fetched => {
            (DestinationState::Ended, &[])
        }
        (_, Some(SessionKind::PostCopy), false) if !fetched => {
            (DestinationState::Fetching, &[Do::Run, Do::SendFetching])
        }
        (_, Some(_), false) => (DestinationState::Owns, &[Do::Run]),
        // No version of this code writes these without RUN-INTENT. No word may be given.
        (_, None, _) if fetched || ended => (DestinationState::Stuck, &[]),
        (_, None, true) => (DestinationState::Aborted, &[Do::Discard]),
        // ABORTED must be on disk before it is sent.
        (true, None, false) => (DestinationState::AbortWriting, &[Do::WriteAborted]),
        (false, None, false) => return None,
        // No version of this code writes both records. Neither word may be given.
        (_, Some(_), true) => (DestinationState::Stuck, &[]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [DestinationState; 12] = [
        DestinationState::Receiving,
        DestinationState::Ready,
        DestinationState::Claiming,
        DestinationState::IntentWriting,
        DestinationState::Owns,
        DestinationState::Fetching,
        DestinationState::FetchedWriting,
        DestinationState::EndedWriting,
        DestinationState::Ended,
        DestinationState::AbortWriting,
        DestinationState::Aborted,
        DestinationState::Stuck,
    ];
    const EVENTS: [DestinationEvent; 16] = [
        DestinationEvent::Loaded,
        DestinationEvent::Commit,
        DestinationEvent::Failed,
        DestinationEvent::LinkLost,
        DestinationEvent::CommitTimeout,
        DestinationEvent::Claimed,
        DestinationEvent::ClaimRefused,
        DestinationEvent::IntentWritten(SessionKind::PreCopy),
        DestinationEvent::IntentWritten(SessionKind::PostCopy),
        DestinationEvent::Fetched,
        DestinationEvent::FetchedWritten,
        DestinationEvent::Crashed,
        DestinationEvent::EndedWritten,
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
                    && matches!(event, DestinationEvent::IntentWritten(_));
                assert_eq!(effects.contains(&DestinationEffect::Run), first_run);
                assert!(!next.may_run() || state.may_run() || first_run);
            }
        }
    }

    #[test]
    fn run_intent_is_written_only_after_the_claim_is_granted() {
        for (state, event) in STATES.into_iter().flat_map(|s| EVENTS.map(|event| (s, event))) {
            let (_, effects) = state.step(event);
            let granted = state == DestinationState::Claiming && event == DestinationEvent::Claimed;
            let writes = effects.contains(&DestinationEffect::WriteIntent);
            assert_eq!(writes, granted, "{state:?} {event:?}");
        }
    }

    #[test]
    fn source_is_freed_only_after_fetched_is_written() {
        use DestinationState::{EndedWriting, FetchedWriting, Fetching};
        for state in [Fetching, FetchedWriting, EndedWriting] {
            assert_eq!(state.word(), SessionWord::Fetching);
            for event in EVENTS {
                let (next, effects) = state.step(event);
                let written = state == FetchedWriting && event == DestinationEvent::FetchedWritten;
                assert_eq!(next == DestinationState::Owns, written, "{state:?} {event:?}");
                assert_eq!(effects.contains(&DestinationEffect::SendRunning), written);
                assert!(next.may_run(), "{state:?} {event:?}");
            }
        }
    }

    #[test]
    fn source_is_told_of_a_crash_only_after_ended_is_written() {
        for (state, event) in STATES.into_iter().flat_map(|s| EVENTS.map(|event| (s, event))) {
            let (next, effects) = state.step(event);
            let written =
                state == DestinationState::EndedWriting && event == DestinationEvent::EndedWritten;
            let stays = state == DestinationState::Ended;
            assert_eq!(next == DestinationState::Ended, written || stays, "{state:?} {event:?}");
            let tells = effects.contains(&DestinationEffect::SendEnded);
            assert!(!tells || written || stays, "{state:?} {event:?}");
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
        let opened = DestinationRecords {
            opened: true,
            intent: None,
            fetched: false,
            ended: false,
            aborted: false,
        };
        let intent = |intent| DestinationRecords { intent: Some(intent), ..opened };
        let without = intent(SessionKind::PostCopy);
        let aborted = DestinationRecords { aborted: true, ..opened };
        for (records, recovered) in [
            (intent(SessionKind::PreCopy), Some((DestinationState::Owns, &[Do::Run][..]))),
            (without, Some((DestinationState::Fetching, &[Do::Run, Do::SendFetching]))),
            (
                DestinationRecords { fetched: true, ..without },
                Some((DestinationState::Owns, &[Do::Run])),
            ),
            (DestinationRecords { ended: true, ..without }, Some((DestinationState::Ended, &[]))),
            (
                DestinationRecords { ended: true, fetched: true, ..without },
                Some((DestinationState::Owns, &[Do::Run])),
            ),
            (DestinationRecords { ended: true, ..opened }, Some((DestinationState::Stuck, &[]))),
            (aborted, Some((DestinationState::Aborted, &[Do::Discard]))),
            (opened, Some((DestinationState::AbortWriting, &[Do::WriteAborted]))),
            (DestinationRecords { opened: false, ..opened }, None),
            (DestinationRecords { fetched: true, ..opened }, Some((DestinationState::Stuck, &[]))),
            (
                DestinationRecords { aborted: true, ..intent(SessionKind::PreCopy) },
                Some((DestinationState::Stuck, &[])),
            ),
            (DestinationRecords { aborted: true, ..without }, Some((DestinationState::Stuck, &[]))),
        ] {
            assert_eq!(recover_destination(records), recovered, "{records:?}");
        }
    }
}
