//! The source's half of the handover.

use crate::SessionWord;
use serde::{Deserialize, Serialize};

/// Where the source stands. See the diagram in the [crate](crate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceState {
    /// The guest is here, running or paused, and nothing is decided.
    Holding,
    /// READY has come and COMMIT is being written to the journal; it is not sent yet.
    Committing {
        /// The link was lost, or the user cancelled, while COMMIT was being written.
        cut: bool,
    },
    /// COMMIT is journalled and sent. The guest may not run here any more.
    Committed,
    /// COMMIT is journalled and the destination can't be reached: the guest stays paused.
    InDoubt {
        /// Whether this process has read of COMMIT in the journal, and did not write it. The one
        /// that did may have failed to and let the guest run on, so that what the destination has
        /// would be a guest of the past: a recovered source asks, and never sends COMMIT.
        recovered: bool,
    },
    /// The destination owns the guest.
    Given,
    /// The source owns the guest, and it runs here.
    Kept,
}

/// What happens to the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceEvent {
    /// The destination has placed all memory and loaded the state, and the digests agree.
    Ready,
    /// COMMIT is on disk.
    CommitWritten,
    /// COMMIT could not be written. It was never sent.
    CommitFailed,
    /// The destination runs the guest.
    Running,
    /// The destination's journalled answer about this session.
    Word(SessionWord),
    /// The link to the destination is gone, or silent for too long.
    LinkLost,
    /// A failure on this side or told by the destination before COMMIT, or the user's wish.
    Failed,
    /// The operator decides a handover in doubt.
    Operator(OperatorWord),
}

/// What an operator can decide, after making sure by other means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OperatorWord {
    /// The destination runs the guest, or ran it: this side gives it up.
    DestinationOwns,
    /// The destination does not run the guest and never will: this side resumes it.
    SourceResumes,
}

/// What the driver must do, in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceEffect {
    /// Append COMMIT to the journal, synced, and report `CommitWritten` or `CommitFailed`.
    WriteCommit,
    /// Send COMMIT on the link that is there.
    SendCommit,
    /// Tell the destination, if it still listens, that there will be no COMMIT.
    SendAbort,
    /// Ask the destination for its word about the session, now and at intervals.
    Ask,
    /// Append KEPT to the journal.
    WriteKept,
    /// Append GIVEN to the journal.
    WriteGiven,
    /// Let the guest run here.
    Resume,
    /// Give up the guest: it never runs here again.
    Release,
}

impl SourceState {
    /// Whether the guest may run on this host in this state.
    #[must_use]
    pub fn may_run(self) -> bool {
        matches!(self, Self::Holding | Self::Kept)
    }

    /// Whether COMMIT may be in the journal, so that nothing on this host may resume the guest.
    #[must_use]
    pub fn is_committed(self) -> bool {
        matches!(self, Self::Committed | Self::InDoubt { .. })
    }

    /// Whether the handover is over on this side.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Given | Self::Kept)
    }

    /// The state after `event`, and what must be done.
    ///
    /// An event that means nothing in a state (a late RUNNING after `Given`, a READY repeated)
    /// changes nothing.
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
            // COMMIT is on disk though never sent. Rule 5 knows no exception: ask first.
            (S::Committing { cut: true }, On::CommitWritten) => {
                (S::InDoubt { recovered: false }, &[Do::Ask])
            }
            // Never sent, so the destination can't run: this process may go on. The record may be
            // on disk all the same, and whoever reads it later asks, and sends no COMMIT either.
            (S::Committing { .. }, On::CommitFailed) => (S::Kept, &[Do::Resume, Do::SendAbort]),

            (S::Committed | S::InDoubt { .. }, On::Running | On::Word(SessionWord::Owns)) => {
                (S::Given, &[Do::WriteGiven, Do::Release])
            }
            (S::Committed | S::InDoubt { .. }, On::Word(SessionWord::Aborted)) => {
                (S::Kept, &[Do::Resume, Do::WriteKept])
            }
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

/// Where a session stands after the source's process has died, from what its journal holds, and
/// what whoever has the guest now must do.
#[must_use]
pub fn recover_source(
    committed: bool,
    kept: bool,
    given: bool,
) -> (SourceState, &'static [SourceEffect]) {
    match (committed, kept, given) {
        (_, false, true) => (SourceState::Given, &[SourceEffect::Release]),
        (_, true, false) | (false, false, false) => (SourceState::Kept, &[SourceEffect::Resume]),
        // Both outcomes were written by no version of this code: the destination knows.
        (true, false, false) | (_, true, true) => {
            (SourceState::InDoubt { recovered: true }, &[SourceEffect::Ask])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [SourceState; 8] = [
        SourceState::Holding,
        SourceState::Committing { cut: false },
        SourceState::Committing { cut: true },
        SourceState::Committed,
        SourceState::InDoubt { recovered: false },
        SourceState::InDoubt { recovered: true },
        SourceState::Given,
        SourceState::Kept,
    ];
    const EVENTS: [SourceEvent; 13] = [
        SourceEvent::Ready,
        SourceEvent::CommitWritten,
        SourceEvent::CommitFailed,
        SourceEvent::Running,
        SourceEvent::Word(SessionWord::Unknown),
        SourceEvent::Word(SessionWord::Pending),
        SourceEvent::Word(SessionWord::Aborted),
        SourceEvent::Word(SessionWord::Owns),
        SourceEvent::LinkLost,
        SourceEvent::Failed,
        SourceEvent::Operator(OperatorWord::DestinationOwns),
        SourceEvent::Operator(OperatorWord::SourceResumes),
        SourceEvent::Running,
    ];

    #[test]
    fn a_committed_source_resumes_only_on_aborted_or_by_the_operator() {
        for state in STATES.into_iter().filter(|s| s.is_committed()) {
            for event in EVENTS {
                let (next, effects) = state.step(event);
                let allowed = event == SourceEvent::Word(SessionWord::Aborted)
                    || event == SourceEvent::Operator(OperatorWord::SourceResumes);
                assert!(
                    allowed || !effects.contains(&SourceEffect::Resume),
                    "{state:?} resumed on {event:?}"
                );
                assert!(allowed || !next.may_run(), "{state:?} + {event:?} = {next:?}");
            }
        }
    }

    /// Nobody takes up a session whose journal says KEPT: a process that dies must not leave a
    /// paused guest with it.
    #[test]
    fn kept_is_written_after_the_guest_is_resumed() {
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
    fn a_recovered_source_never_sends_commit() {
        for event in EVENTS {
            let (next, effects) = SourceState::InDoubt { recovered: true }.step(event);
            assert!(!effects.contains(&SourceEffect::SendCommit), "{event:?}");
            assert_ne!(next, SourceState::InDoubt { recovered: false }, "{event:?}");
        }
    }

    #[test]
    fn a_restart_reads_the_journal() {
        let state = |committed, kept, given| recover_source(committed, kept, given).0;
        assert_eq!(state(false, false, false), SourceState::Kept);
        assert_eq!(state(true, false, false), SourceState::InDoubt { recovered: true });
        assert_eq!(state(true, true, false), SourceState::Kept);
        assert_eq!(state(true, false, true), SourceState::Given);
    }
}
