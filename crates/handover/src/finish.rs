//! libvirt's Finish: the step functions of the daemons that forward a peer-to-peer migration.
//!
//! The source's libvirt calls Finish at the destination's libvirt, which starts the guest there.
//! If the source's libvirt loses the connection before the reply, it resumes its own guest, and
//! the guest may run twice. So the daemon at the source keeps that connection until it has a word
//! from the daemon at the destination, and neither acts before its record is on disk.
//!
//! ```text
//!   daemon at the source                        daemon at the destination
//!
//!   NotSent                                     NotPassed --asked--> Barred: never passed
//!     | journal SENT, send Finish  ---------->    |
//!   Sent                                          | journal PASSED, write Finish to libvirt
//!     | link lost: ask until there is a word    Passed --asked--> look at the domain
//!     |                                           | libvirt replied, or the domain runs:
//!     | <---------- reply, or an answer           | journal ANSWERED, then send the word
//!   Answered: write the reply to libvirt        Answered
//! ```
//!
//! The functions are pure. Each returns a [`FinishStep`]: the record that must be on disk before
//! the action. If a record cannot be written, it may still be on disk: the daemon does not act, and
//! continues as if it had died, from [`SourceFinish::recover`] or [`DestinationFinish::recover`].
//! The model in `testing/model` checks these functions.

mod destination;
mod owner;
mod record;
mod source;

use serde::{Deserialize, Serialize};
use strum::Display;

pub use self::destination::{DestinationAction, DestinationFinish, DestinationStep, DomainSeen};
pub use self::owner::FinishOwner;
pub use self::record::{FinishEntry, FinishRecord};
pub use self::source::{SourceAction, SourceFinish, SourceStep};
use crate::OperatorWord;

/// The final word about a Finish. Never changes once it is journaled.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Display,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum FinishWord {
    /// The destination has the guest: the source's libvirt gets a successful reply and kills its
    /// guest.
    Runs,
    /// The guest never ran at the destination and never will: the source's libvirt gets an error
    /// and resumes its guest.
    DoesNotRun,
}

/// What the daemon at the destination answers when it is asked about a Finish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FinishAnswer {
    /// The word, which is in the journal.
    Word(FinishWord),
    /// It is not known yet, or an operator must decide.
    AskAgain,
    /// The daemon has no record of the session: another host answers, or its journal is lost. It
    /// is *not* [`FinishWord::DoesNotRun`].
    Unknown,
}

impl FinishAnswer {
    /// The number on the wire.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Unknown => 0,
            Self::AskAgain => 1,
            Self::Word(FinishWord::DoesNotRun) => 2,
            Self::Word(FinishWord::Runs) => 3,
        }
    }

    /// The answer of a number; `None` if a newer release sent it, so that it must be asked again.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        [
            Self::Unknown,
            Self::AskAgain,
            Self::Word(FinishWord::DoesNotRun),
            Self::Word(FinishWord::Runs),
        ]
        .get(usize::from(number))
        .copied()
    }
}

/// One step of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct FinishStep<State, Action> {
    /// Must be on disk, synced, before anything else is done.
    pub journal: Option<FinishRecord>,
    /// The state from then on.
    pub state: State,
    /// What to do then.
    pub action: Action,
}

impl<State, Action> FinishStep<State, Action> {
    fn after(journal: FinishRecord, state: State, action: Action) -> Self {
        Self { journal: Some(journal), state, action }
    }

    fn only(state: State, action: Action) -> Self {
        Self { journal: None, state, action }
    }
}

/// A step that must not be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FinishError {
    /// A second Finish in the session. It must not be passed on, and gets no reply.
    #[error("the session's Finish was already passed on")]
    SecondFinish,
    /// A reply, a word or an operator's decision about a Finish that was not passed on.
    #[error("the session's Finish was never passed on")]
    NoFinish,
    /// A word that differs from the journaled one. The journaled word stays.
    #[error("the journal says that the guest {journaled}; this says that it {heard}")]
    Contradiction {
        /// The word in the journal.
        journaled: FinishWord,
        /// The other one.
        heard: FinishWord,
    },
    /// The records exclude each other, or are of the other side. No word may be given.
    #[error("the journal's records contradict each other: no word can be given from it")]
    Records,
}

fn word_of(operator: OperatorWord) -> FinishWord {
    match operator {
        OperatorWord::DestinationOwns => FinishWord::Runs,
        OperatorWord::SourceResumes => FinishWord::DoesNotRun,
    }
}

#[cfg(test)]
mod tests;
