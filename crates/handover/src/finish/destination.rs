//! The daemon at the destination.

use serde::{Deserialize, Serialize};

use super::{FinishAnswer, FinishError, FinishRecord, FinishStep, FinishWord, word_of};
use crate::OperatorWord;

/// The daemon at the destination: what its journal says about the Finish. A session without a
/// journal has no state, and the answer about it is [`FinishAnswer::Unknown`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationFinish {
    /// The Finish was not written to libvirt.
    NotPassed,
    /// It may have been written.
    Passed,
    /// The word is known.
    Answered(FinishWord),
    /// It never was and never will be written: the daemon has said so.
    Barred,
}

/// What the destination's libvirt says about the domain, on a connection of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DomainSeen {
    /// Finish has succeeded: the domain runs, or has run (it is paused by an I/O error, crashed or
    /// shuts down), or it is paused by the user and the Finish had `VIR_MIGRATE_PAUSED`.
    Runs,
    /// The domain waits for its migration or its Finish: any other pause.
    Waits,
    /// There is no such domain, or it is shut off. It is *not* known whether it has run: it may
    /// have been shut down or moved to a third host since.
    Gone,
    /// libvirt does not answer.
    NoAnswer,
}

/// What the daemon at the destination does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DestinationAction {
    /// Write the Finish to libvirt.
    Pass,
    /// Reply to the Finish with an error in libvirt's place.
    Refuse,
    /// Send libvirt's reply to the other daemon.
    SendReply(FinishWord),
    /// Answer the other daemon.
    Answer(FinishAnswer),
    /// Look at the domain and report it to [`DestinationFinish::looked`]. If this process wrote
    /// the Finish and still awaits the reply on that connection, answer
    /// [`FinishAnswer::AskAgain`] instead.
    Look,
}

/// A step of the daemon at the destination.
pub type DestinationStep = FinishStep<DestinationFinish, DestinationAction>;

impl DestinationFinish {
    /// A Finish was received. Decides whether it may be passed to libvirt.
    ///
    /// # Errors
    /// [`FinishError::SecondFinish`].
    pub fn pass(self) -> Result<DestinationStep, FinishError> {
        match self {
            Self::NotPassed => {
                let record = FinishRecord::Passed;
                Ok(FinishStep::after(record, Self::Passed, DestinationAction::Pass))
            }
            Self::Barred => Ok(FinishStep::only(self, DestinationAction::Refuse)),
            Self::Passed | Self::Answered(_) => Err(FinishError::SecondFinish),
        }
    }

    /// libvirt has replied: the domain or an error.
    ///
    /// # Errors
    /// [`FinishError::NoFinish`], [`FinishError::Contradiction`].
    pub fn reply(self, word: FinishWord) -> Result<DestinationStep, FinishError> {
        self.say(word, false, DestinationAction::SendReply(word))
    }

    /// The other daemon asks.
    pub fn asked(self) -> DestinationStep {
        let answer = |word| DestinationAction::Answer(FinishAnswer::Word(word));
        match self {
            Self::NotPassed => FinishStep::after(
                FinishRecord::Barred,
                Self::Barred,
                answer(FinishWord::DoesNotRun),
            ),
            Self::Barred => FinishStep::only(self, answer(FinishWord::DoesNotRun)),
            Self::Passed => FinishStep::only(self, DestinationAction::Look),
            Self::Answered(word) => FinishStep::only(self, answer(word)),
        }
    }

    /// libvirt has told the domain's state, after [`DestinationAction::Look`].
    ///
    /// # Errors
    /// [`FinishError::NoFinish`].
    pub fn looked(self, seen: DomainSeen) -> Result<DestinationStep, FinishError> {
        match (self, seen) {
            (Self::NotPassed | Self::Barred, _) => Err(FinishError::NoFinish),
            (Self::Answered(_), _) => Ok(self.asked()),
            (Self::Passed, DomainSeen::Runs) => {
                let answer = FinishAnswer::Word(FinishWord::Runs);
                self.say(FinishWord::Runs, false, DestinationAction::Answer(answer))
            }
            // A domain that is gone may have run. Only libvirt's reply or an operator can tell.
            (Self::Passed, DomainSeen::Waits | DomainSeen::Gone | DomainSeen::NoAnswer) => {
                Ok(FinishStep::only(self, DestinationAction::Answer(FinishAnswer::AskAgain)))
            }
        }
    }

    /// The operator, who has looked at this host, decides about a Finish that was passed.
    ///
    /// # Errors
    /// [`FinishError::NoFinish`]; [`FinishError::Contradiction`] if there is another word.
    pub fn operator(self, operator: OperatorWord) -> Result<DestinationStep, FinishError> {
        let word = word_of(operator);
        self.say(word, true, DestinationAction::Answer(FinishAnswer::Word(word)))
    }

    /// The state that the records give. `None` if there is no record of the session.
    ///
    /// # Errors
    /// [`FinishError::Records`].
    pub fn recover(records: &[FinishRecord]) -> Result<Option<Self>, FinishError> {
        let mut state = None;
        for record in records {
            state = match (state, record) {
                (None, FinishRecord::Open { .. }) => Some(Self::NotPassed),
                (Some(Self::NotPassed), FinishRecord::Passed) => Some(Self::Passed),
                (Some(Self::NotPassed), FinishRecord::Barred) => Some(Self::Barred),
                (Some(Self::Passed), FinishRecord::Answered { word, .. }) => {
                    Some(Self::Answered(*word))
                }
                _ => return Err(FinishError::Records),
            };
        }
        Ok(state)
    }

    fn say(
        self,
        word: FinishWord,
        by_operator: bool,
        action: DestinationAction,
    ) -> Result<DestinationStep, FinishError> {
        match self {
            Self::NotPassed | Self::Barred => Err(FinishError::NoFinish),
            Self::Passed => {
                let record = FinishRecord::Answered { word, by_operator };
                Ok(FinishStep::after(record, Self::Answered(word), action))
            }
            Self::Answered(journaled) if journaled == word => Ok(FinishStep::only(self, action)),
            Self::Answered(journaled) => Err(FinishError::Contradiction { journaled, heard: word }),
        }
    }
}
