//! The daemon at the source.

use super::{FinishAnswer, FinishError, FinishRecord, FinishStep, FinishWord, word_of};
use crate::OperatorWord;

/// The daemon at the source: what its journal says about the Finish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceFinish {
    /// The Finish was not sent.
    NotSent,
    /// It may have been sent. libvirt must not see its connection fail.
    Sent,
    /// The word is known, and is libvirt's reply.
    Answered(FinishWord),
}

/// What the daemon at the source does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceAction {
    /// Send the Finish to the other daemon. The keeper must hold the connection to libvirt.
    Send,
    /// Ask the other daemon, now and at intervals, and answer libvirt's keep-alive messages.
    Ask,
    /// Write the reply to libvirt, whole, unless it was written: the domain, or an error.
    Reply(FinishWord),
    /// Nothing: the source's libvirt may see its connection fail.
    Nothing,
}

/// A step of the daemon at the source.
pub type SourceStep = FinishStep<SourceFinish, SourceAction>;

impl SourceFinish {
    /// The Finish of the source's libvirt was received. The step sends it.
    ///
    /// # Errors
    /// [`FinishError::SecondFinish`].
    pub fn send(self) -> Result<SourceStep, FinishError> {
        match self {
            Self::NotSent => {
                Ok(FinishStep::after(FinishRecord::Sent, Self::Sent, SourceAction::Send))
            }
            Self::Sent | Self::Answered(_) => Err(FinishError::SecondFinish),
        }
    }

    /// The other daemon has forwarded libvirt's reply, or has answered.
    ///
    /// # Errors
    /// [`FinishError::NoFinish`], [`FinishError::Contradiction`].
    pub fn hear(self, answer: FinishAnswer) -> Result<SourceStep, FinishError> {
        match (self, answer) {
            (Self::NotSent, _) => Err(FinishError::NoFinish),
            (Self::Sent, FinishAnswer::Word(word)) => Ok(self.answered(word, false)),
            (Self::Answered(journaled), FinishAnswer::Word(heard)) if journaled != heard => {
                Err(FinishError::Contradiction { journaled, heard })
            }
            (Self::Sent | Self::Answered(_), _) => Ok(FinishStep::only(self, self.resumed())),
        }
    }

    /// The operator decides in the other daemon's place.
    ///
    /// # Errors
    /// [`FinishError::NoFinish`]; [`FinishError::Contradiction`] if there is another word.
    pub fn operator(self, operator: OperatorWord) -> Result<SourceStep, FinishError> {
        match self {
            Self::Sent => Ok(self.answered(word_of(operator), true)),
            Self::NotSent | Self::Answered(_) => self.hear(FinishAnswer::Word(word_of(operator))),
        }
    }

    /// What a daemon does that has this state after a restart, or whose link broke.
    #[must_use]
    pub fn resumed(self) -> SourceAction {
        match self {
            Self::NotSent => SourceAction::Nothing,
            Self::Sent => SourceAction::Ask,
            Self::Answered(word) => SourceAction::Reply(word),
        }
    }

    /// Whether libvirt may see its connection fail, which makes it resume its guest.
    #[must_use]
    pub fn may_break(self) -> bool {
        matches!(self, Self::NotSent | Self::Answered(FinishWord::DoesNotRun))
    }

    /// The state that the records give. `None` if there is no record of the session.
    ///
    /// # Errors
    /// [`FinishError::Records`].
    pub fn recover(records: &[FinishRecord]) -> Result<Option<Self>, FinishError> {
        let mut state = None;
        for record in records {
            state = match (state, record) {
                (None, FinishRecord::Open { .. }) => Some(Self::NotSent),
                (Some(Self::NotSent), FinishRecord::Sent) => Some(Self::Sent),
                (Some(Self::Sent), FinishRecord::Answered { word, .. }) => {
                    Some(Self::Answered(*word))
                }
                _ => return Err(FinishError::Records),
            };
        }
        Ok(state)
    }

    fn answered(self, word: FinishWord, by_operator: bool) -> SourceStep {
        let record = FinishRecord::Answered { word, by_operator };
        FinishStep::after(record, Self::Answered(word), SourceAction::Reply(word))
    }
}
