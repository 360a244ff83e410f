//! The records of a Finish.

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantNames};

use super::FinishWord;
use crate::GuestIdentity;
use crate::journal::Side;

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
        /// Seconds since 1970 by this host's clock, for people.
        at: u64,
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
