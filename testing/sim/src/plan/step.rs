//! The steps of a migration that a host's process carries out itself.

use strum::VariantArray;

use crate::host::Host;

/// A step of a host's process that may take long: a call into a VMM, or a write to a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
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
    /// The destination allocates its memory.
    Prepare,
    /// The destination writes OPEN.
    Open,
    /// The destination begins to report the guest's access to missing pages.
    FetchMissing,
    /// The destination loads the state.
    Load,
    /// The destination writes RUN-INTENT.
    WriteIntent,
    /// The destination starts the guest.
    Run,
    /// The destination writes FETCHED.
    WriteFetched,
}

impl Step {
    /// All steps.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The host that carries it out.
    #[must_use]
    pub fn host(self) -> Host {
        match self {
            Self::StartLog
            | Self::Harvest
            | Self::Pause
            | Self::HarvestLast
            | Self::Save
            | Self::WriteCommit => Host::Source,
            Self::Prepare
            | Self::Open
            | Self::FetchMissing
            | Self::Load
            | Self::WriteIntent
            | Self::Run
            | Self::WriteFetched => Host::Destination,
        }
    }
}
