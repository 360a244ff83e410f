//! Steps of a migration that a host's process carries out itself.

use super::Host;

/// What a host's process does itself, and may take long for: calls into a VMM, and writes to a
/// journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The source starts the dirty log.
    StartLog,
    /// The source harvests it.
    Harvest,
    /// The source pauses the guest.
    Pause,
    /// The source harvests for the last time.
    HarvestLast,
    /// The source saves the guest's state.
    Save,
    /// The source writes COMMIT.
    WriteCommit,
    /// The destination makes its memory.
    Prepare,
    /// The destination writes OPEN.
    Open,
    /// The destination loads the state.
    Load,
    /// The destination writes RUN-INTENT.
    WriteIntent,
    /// The destination starts the guest.
    Run,
}

impl Step {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::StartLog,
        Self::Harvest,
        Self::Pause,
        Self::HarvestLast,
        Self::Save,
        Self::WriteCommit,
        Self::Prepare,
        Self::Open,
        Self::Load,
        Self::WriteIntent,
        Self::Run,
    ];

    /// Whose step it is.
    #[must_use]
    pub fn host(self) -> Host {
        match self {
            Self::StartLog
            | Self::Harvest
            | Self::Pause
            | Self::HarvestLast
            | Self::Save
            | Self::WriteCommit => Host::Source,
            Self::Prepare | Self::Open | Self::Load | Self::WriteIntent | Self::Run => {
                Host::Destination
            }
        }
    }
}
