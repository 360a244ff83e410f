//! Who has the guest, by one host's journal of a Finish.

use serde::{Deserialize, Serialize};

use super::{DestinationFinish, DomainSeen, FinishWord, SourceFinish};

/// Who has the guest, as far as one host knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FinishOwner {
    /// The source: the guest has not run at the destination. While a daemon leads the session, and
    /// only then, this may change.
    Source,
    /// The destination: the guest runs there, has run there, or will when its operator resumes it.
    Destination,
    /// This host can't tell.
    Undecided,
}

impl From<FinishWord> for FinishOwner {
    fn from(word: FinishWord) -> Self {
        match word {
            FinishWord::Runs => Self::Destination,
            FinishWord::DoesNotRun => Self::Source,
        }
    }
}

impl SourceFinish {
    /// Who has the guest, by the source's journal.
    #[must_use]
    pub fn owner(self) -> FinishOwner {
        match self {
            Self::NotSent => FinishOwner::Source,
            Self::Sent => FinishOwner::Undecided,
            Self::Answered(word) => word.into(),
        }
    }
}

impl DestinationFinish {
    /// Who has the guest, by the destination's journal and what its libvirt says about the domain.
    #[must_use]
    pub fn owner(self, seen: DomainSeen) -> FinishOwner {
        match (self, seen) {
            (Self::NotPassed | Self::Barred, _) => FinishOwner::Source,
            (Self::Answered(word), _) => word.into(),
            (Self::Passed, DomainSeen::Runs) => FinishOwner::Destination,
            (Self::Passed, DomainSeen::Waits | DomainSeen::Gone | DomainSeen::NoAnswer) => {
                FinishOwner::Undecided
            }
        }
    }
}
