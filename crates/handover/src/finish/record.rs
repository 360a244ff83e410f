//! The records of a Finish.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantNames};

use super::FinishWord;
use crate::GuestIdentity;
use crate::journal::{JournalRecord, Side};

/// A promise of a daemon, one line of its journal for the session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr, VariantNames)]
#[serde(tag = "record", rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum FinishRecord {
    /// Both: the Prepare of this session was seen. It is written before the Prepare is passed on.
    Open {
        /// The guest.
        guest: GuestIdentity,
        /// The other daemon's address.
        peer: String,
        /// The names in the other daemon's certificate.
        peer_names: Vec<String>,
    },
    /// Source: the Finish may have been sent.
    Sent,
    /// Destination: the Finish may have been written to libvirt.
    Passed,
    /// Destination: the Finish was never written to libvirt and never will be.
    Barred,
    /// Both: the word.
    Answered {
        /// The word.
        word: FinishWord,
        /// Whether an operator gave it.
        by_operator: bool,
    },
}

impl FinishRecord {
    /// Whether this side writes this kind of record.
    #[must_use]
    pub fn is_of(&self, side: Side) -> bool {
        match self {
            Self::Open { .. } | Self::Answered { .. } => true,
            Self::Sent => side == Side::Source,
            Self::Passed | Self::Barred => side == Side::Destination,
        }
    }
}

/// A line of a journal: the record, and when it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishEntry {
    /// The record.
    #[serde(flatten)]
    pub record: FinishRecord,
    /// Seconds since 1970 by this host's clock, for people; 0 if it is not known.
    #[serde(default)]
    pub at: u64,
}

impl FinishEntry {
    /// A record that is written now.
    #[must_use]
    pub fn now(record: FinishRecord) -> Self {
        let at = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        Self { record, at }
    }
}

impl JournalRecord for FinishEntry {
    const FILE_PREFIX: &'static str = "finish-";
    const NAMES: &'static [&'static str] = FinishRecord::VARIANTS;

    fn name_on_disk(&self) -> &'static str {
        (&self.record).into()
    }

    fn is_written_by(&self, side: Side) -> bool {
        self.record.is_of(side)
    }
}
