//! The source's half of the handover.

use crate::{SessionKind, SessionWord};
use serde::{Deserialize, Serialize};

/// The source's state. See the diagram in the [crate](crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceState {
    /// The guest is here, running or paused, and nothing is decided.
    Holding,
    /// READY was received, and COMMIT is being written to the journal. It is not sent yet.
    Committing {
        /// The link was lost, or the user canceled, while COMMIT was being written.
        cut: bool,
    },
    /// COMMIT is journaled and sent. The guest must not run here any more.
    Committed,
    /// COMMIT is journaled and the destination is unreachable. The guest stays paused.
    InDoubt {
        /// Whether this process read COMMIT from the journal instead of writing it. The process
        /// that wrote COMMIT may have failed to do so and resumed the guest, and then the
        /// destination holds an outdated guest. So a recovered source asks, and never sends COMMIT.
        recovered: bool,
    },
    /// The destination runs the guest and still fetches pages of its memory from here. The memory
    /// is kept, and the guest never runs here again.
    Serving,
    /// The guest has crashed at the destination while it lacked pages of its memory, which is kept
    /// here until an operator gives the guest up.
    Ended,
    /// The destination owns the guest and needs nothing of this host.
    Given,
    /// The source owns the guest, and the guest runs here.
    Kept,
}

/// An input of the source's state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceEvent {
    /// The destination has placed all memory and loaded the state, and the digests agree.
    Ready,
    /// COMMIT is on disk.
    CommitWritten,
    /// COMMIT could not be written. It was not sent.
    CommitFailed,
    /// The destination runs the guest and needs nothing of this host.
    Running,
    /// The destination runs the guest and still lacks pages of its memory.
    Fetching,
    /// The destination's journaled answer about this session.
    Word(SessionWord),
    /// The witness has given the guest back: the destination never runs it.
    TakenBack,
    /// The link to the destination was lost, or was silent for too long.
    LinkLost,
    /// Before COMMIT: this side failed, the destination reported a failure, or the user canceled.
    Failed,
    /// The operator resolves a handover that is in doubt.
    Operator(OperatorWord),
    /// The operator gives up a guest that still lacks pages of this host's memory: the destination
    /// is lost permanently.
    GiveUp,
}

impl SourceEvent {
    /// The event of an operator's decision. The operator knows that the destination runs the
    /// guest, but not whether it has all pages. So a session with post-copy keeps the memory, and
    /// only [`GiveUp`](Self::GiveUp) frees it.
    #[must_use]
    pub fn of_operator(word: OperatorWord, kind: SessionKind) -> Self {
        match (word, kind) {
            (OperatorWord::DestinationOwns, SessionKind::PostCopy) => Self::Fetching,
            (word, _) => Self::Operator(word),
        }
    }
}

/// An operator's decision. The operator must have verified it by other means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OperatorWord {
    /// The destination runs or ran the guest: the source releases it.
    DestinationOwns,
    /// The destination does not run the guest and never will: the source resumes it.
    SourceResumes,
}

/// An action that the driver must take, in the given order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceEffect {
    /// Append COMMIT to the journal, synced, and report `CommitWritten` or `CommitFailed`.
    WriteCommit,
    /// Send COMMIT on the current link.
    SendCommit,
    /// Tell the destination that there will be no COMMIT, if the link still works.
    SendAbort,
    /// Ask the destination for its word about the session, now and at intervals.
    Ask,
    /// Append KEPT to the journal.
    WriteKept,
    /// Append GIVEN to the journal.
    WriteGiven,
    /// Append SERVING to the journal.
    WriteServing,
    /// Resume the guest here.
    Resume,
    /// Release the guest: it never runs here again.
    Release,
}

impl SourceState {
    /// Whether the guest may run on this host in this state.
    #[must_use]
    pub fn may_run(self) -> bool {
        matches!(self, Self::Holding | Self::Kept)
    }

    /// Whether COMMIT is in the journal, so that nothing on this host may resume the guest.
    #[must_use]
    pub fn is_committed(self) -> bool {
        matches!(self, Self::Committed | Self::InDoubt { .. } | Self::Serving | Self::Ended)
    }

    /// Whether the handover has ended on this side.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Given | Self::Kept)
    }

    /// The state after `event`, and the required effects.
    ///
    /// An event without a meaning in the current state, such as a late RUNNING after `Given` or a
    /// repeated READY, changes nothing.
    #[must_use]
    pub fn step(self, event: SourceEvent) -> (Self, &'static [SourceEffect]) {
        use SourceEffect as Do;
        use SourceEvent as On;
        use SourceState as S;
        match (self, event) {
            (S::Holding, On::Ready) => (S::Committing { cut: false }, &[Do::WriteCommit]),
            (S::Holding, On::Failed | On::LinkLost) => {
                (S::Kept, &[Do::Resume, Do::SendAbort, Do::WriteKept])
            }

            (S::Committing { .. }, On::LinkLost | On::Failed) => (S::Committing { cut: true }, &[]),
            (S::Committing { cut: false }, On::CommitWritten) => (S::Committed, &[Do::SendCommit]),
            // COMMIT is on disk but was not sent. The source must still ask first, as rule 5
            // requires.
            (S::Committing { cut: true }, On::CommitWritten) => {
                (S::InDoubt { recovered: false }, &[Do::Ask])
            }
            // COMMIT was not sent, so the destination cannot run the guest, and this process may
            // continue. The record may be on disk all the same. A later process that reads it asks,
            // and sends no COMMIT.
            (S::Committing { .. }, On::CommitFailed) => (S::Kept, &[Do::Resume, Do::SendAbort]),

            (
                S::Committed | S::InDoubt { .. } | S::Serving,
                On::Running | On::Word(SessionWord::Owns),
            ) => (S::Given, &[Do::WriteGiven, Do::Release]),
            (S::Committed | S::InDoubt { .. }, On::Fetching | On::Word(SessionWord::Fetching)) => {
                (S::Serving, &[Do::WriteServing])
            }
            // The guest has run at the destination, so no word and no failure resumes it here.
            (S::Serving, On::LinkLost | On::Failed | On::Word(SessionWord::Unknown)) => {
                (S::Serving, &[Do::Ask])
            }
            (S::Serving, On::Word(SessionWord::Ended)) => (S::Ended, &[]),
            (S::Committed | S::InDoubt { .. }, On::Word(SessionWord::Ended)) => {
                (S::Ended, &[Do::WriteServing])
            }
            (S::Serving | S::Ended, On::GiveUp) => (S::Given, &[Do::WriteGiven, Do::Release]),
            (S::Committed | S::InDoubt { .. }, On::Word(SessionWord::Aborted))
            | (S::InDoubt { .. }, On::TakenBack) => (S::Kept, &[Do::Resume, Do::WriteKept]),
            (S::Committed, On::LinkLost | On::Failed) => {
                (S::InDoubt { recovered: false }, &[Do::Ask])
            }
            (S::InDoubt { recovered: false }, On::Word(SessionWord::Pending)) => {
                (self, &[Do::SendCommit])
            }
            (S::InDoubt { recovered: true }, On::Word(SessionWord::Pending)) => {
                (self, &[Do::SendAbort])
            }
            (S::InDoubt { .. }, On::Word(SessionWord::Unknown) | On::LinkLost) => {
                (self, &[Do::Ask])
            }
            (S::InDoubt { .. }, On::Operator(OperatorWord::DestinationOwns)) => {
                (S::Given, &[Do::WriteGiven, Do::Release])
            }
            (S::InDoubt { .. }, On::Operator(OperatorWord::SourceResumes)) => {
                (S::Kept, &[Do::Resume, Do::WriteKept])
            }

            (state, _) => (state, &[]),
        }
    }
}

/// The outcomes and promises that a source's journal holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRecords {
    /// Whether it holds COMMIT.
    pub committed: bool,
    /// Whether it holds KEPT.
    pub kept: bool,
    /// Whether it holds GIVEN.
    pub given: bool,
    /// Whether it holds SERVING.
    pub serving: bool,
}

/// The state of a session after the source's process died, and the required effects, derived from
/// the journal's records. The process that has the guest now must carry out the effects.
#[must_use]
pub fn recover_source(records: SourceRecords) -> (SourceState, &'static [SourceEffect]) {
    let SourceRecords { committed, kept, given, serving } = records;
    match (committed, kept, given) {
        (_, false, true) => (SourceState::Given, &[SourceEffect::Release]),
        // The guest has run at the destination, which may still lack pages.
        _ if serving => (SourceState::Serving, &[SourceEffect::Ask]),
        (_, true, false) | (false, false, false) => (SourceState::Kept, &[SourceEffect::Resume]),
        // No version of this code writes both outcomes. The destination knows the right one.
        (true, false, false) | (_, true, true) => {
            (SourceState::InDoubt { recovered: true }, &[SourceEffect::Ask])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [SourceState; 10] = [
        SourceState::Holding,
        SourceState::Committing { cut: false },
        SourceState::Committing { cut: true },
        SourceState::Committed,
        SourceState::InDoubt { recovered: false },
        SourceState::InDoubt { recovered: true },
        SourceState::Serving,
        SourceState::Ended,
        SourceState::Given,
        SourceState::Kept,
    ];
    const EVENTS: [SourceEvent; 17] = [
        SourceEvent::Ready,
        SourceEvent::CommitWritten,
        SourceEvent::CommitFailed,
        SourceEvent::Running,
        SourceEvent::Word(SessionWord::Unknown),
        SourceEvent::Word(SessionWord::Pending),
        SourceEvent::Word(SessionWord::Aborted),
        SourceEvent::Word(SessionWord::Owns),
        SourceEvent::Word(SessionWord::Fetching),
        SourceEvent::Word(SessionWord::Ended),
        SourceEvent::TakenBack,
        SourceEvent::LinkLost,
        SourceEvent::Failed,
        SourceEvent::Operator(OperatorWord::DestinationOwns),
        SourceEvent::Operator(OperatorWord::SourceResumes),
        SourceEvent::Fetching,
        SourceEvent::GiveUp,
    ];

    #[test]
    fn committed_source_resumes_only_after_aborted_the_witness_or_the_operator() {
        for state in STATES.into_iter().filter(|s| s.is_committed()) {
            for event in EVENTS {
                let (next, effects) = state.step(event);
                let allowed = event == SourceEvent::Word(SessionWord::Aborted)
                    || event == SourceEvent::TakenBack
                    || event == SourceEvent::Operator(OperatorWord::SourceResumes);
                assert!(
                    allowed || !effects.contains(&SourceEffect::Resume),
                    "{state:?} resumed on {event:?}"
                );
                assert!(allowed || !next.may_run(), "{state:?} + {event:?} = {next:?}");
            }
        }
    }

    #[test]
    fn serving_source_frees_memory_only_after_running_or_giving_up() {
        for event in EVENTS {
            let (next, effects) = SourceState::Serving.step(event);
            assert!(!effects.contains(&SourceEffect::Resume), "{event:?}");
            let frees = matches!(
                event,
                SourceEvent::Running | SourceEvent::Word(SessionWord::Owns) | SourceEvent::GiveUp
            );
            assert_eq!(effects.contains(&SourceEffect::Release), frees, "{event:?}");
            let ended = event == SourceEvent::Word(SessionWord::Ended);
            let stays = if ended { SourceState::Ended } else { SourceState::Serving };
            assert_eq!(next, if frees { SourceState::Given } else { stays }, "{event:?}");
        }
    }

    #[test]
    fn only_an_operator_frees_what_a_crashed_guest_lacked() {
        for event in EVENTS {
            let freed =
                (SourceState::Given, &[SourceEffect::WriteGiven, SourceEffect::Release][..]);
            let stays = (SourceState::Ended, &[][..]);
            let expected = if event == SourceEvent::GiveUp { freed } else { stays };
            assert_eq!(SourceState::Ended.step(event), expected, "{event:?}");
        }
    }

    #[test]
    fn giving_up_means_nothing_before_the_destination_runs_the_guest() {
        let serves =
            |state: &SourceState| matches!(state, SourceState::Serving | SourceState::Ended);
        for state in STATES.into_iter().filter(|state| !serves(state)) {
            assert_eq!(state.step(SourceEvent::GiveUp), (state, &[][..]));
        }
    }

    #[test]
    fn operator_of_a_post_copy_session_frees_no_pages() {
        let doubt = SourceState::InDoubt { recovered: true };
        let owns = OperatorWord::DestinationOwns;
        for (kind, next) in [
            (SessionKind::PreCopy, SourceState::Given),
            (SessionKind::PostCopy, SourceState::Serving),
        ] {
            assert_eq!(doubt.step(SourceEvent::of_operator(owns, kind)).0, next);
        }
        let resumes = SourceEvent::of_operator(OperatorWord::SourceResumes, SessionKind::PostCopy);
        assert_eq!(doubt.step(resumes).0, SourceState::Kept);
    }

    /// No process recovers a session whose journal says KEPT. A process that dies after writing it
    /// must not leave the guest paused.
    #[test]
    fn kept_is_written_after_the_resume() {
        for (state, event) in STATES.into_iter().flat_map(|s| EVENTS.map(|event| (s, event))) {
            let (_, effects) = state.step(event);
            let at = |wanted| effects.iter().position(|effect| *effect == wanted);
            if let Some(kept) = at(SourceEffect::WriteKept) {
                let resumed = at(SourceEffect::Resume);
                assert!(resumed.is_some_and(|at| at < kept), "{state:?} {event:?} {effects:?}");
            }
        }
    }

    #[test]
    fn final_states_never_change() {
        for state in [SourceState::Given, SourceState::Kept] {
            for event in EVENTS {
                assert_eq!(state.step(event), (state, &[][..]));
            }
        }
    }

    #[test]
    fn commit_is_sent_only_after_it_is_written() {
        for state in STATES {
            for event in EVENTS {
                let (_, effects) = state.step(event);
                if effects.contains(&SourceEffect::SendCommit) {
                    assert!(
                        state.is_committed() || event == SourceEvent::CommitWritten,
                        "{state:?} + {event:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn unknown_is_not_aborted() {
        for recovered in [false, true] {
            let doubt = SourceState::InDoubt { recovered };
            let found = doubt.step(SourceEvent::Word(SessionWord::Unknown));
            assert_eq!(found, (doubt, &[SourceEffect::Ask][..]));
        }
    }

    #[test]
    fn recovered_source_never_sends_commit() {
        for event in EVENTS {
            let (next, effects) = SourceState::InDoubt { recovered: true }.step(event);
            assert!(!effects.contains(&SourceEffect::SendCommit), "{event:?}");
            assert_ne!(next, SourceState::InDoubt { recovered: false }, "{event:?}");
        }
    }

    #[test]
    fn recover_source_follows_the_journal() {
        let nothing = SourceRecords { committed: false, kept: false, given: false, serving: false };
        let committed = SourceRecords { committed: true, ..nothing };
        let serving = SourceRecords { serving: true, ..committed };
        for (records, state) in [
            (nothing, SourceState::Kept),
            (committed, SourceState::InDoubt { recovered: true }),
            (SourceRecords { kept: true, ..committed }, SourceState::Kept),
            (SourceRecords { given: true, ..committed }, SourceState::Given),
            (serving, SourceState::Serving),
            (SourceRecords { given: true, ..serving }, SourceState::Given),
            (SourceRecords { kept: true, ..serving }, SourceState::Serving),
        ] {
            assert_eq!(recover_source(records).0, state, "{records:?}");
        }
    }
}
