//! The records of a journal and their form on disk.
//!
//! What is on disk outlives the release that wrote it, in both directions: hosts are upgraded, and rolled back. So members
//! of a record that this release does not know are left alone, in the file too. A record that it does not know may be
//! a promise: then no word is given on the journal. One whose line says `"optional":true` is none, and is left out.

use crate::GuestIdentity;
use serde::{Deserialize, Serialize};

/// One promise or outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "kebab-case")]
pub enum Record {
    /// The session began: written before anything else, on both sides.
    Open {
        /// The guest.
        guest: GuestIdentity,
        /// The other host, as it was reached or as its certificate names it.
        peer: String,
        /// The names in the peer's certificate; empty without TLS.
        peer_names: Vec<String>,
        /// Seconds since 1970 by this host's clock, for people. What came first is told by `order`.
        at: u64,
        /// One more than the largest in the directory when the session began; 0 in the journals of old versions,
        /// which had none.
        #[serde(default)]
        order: u64,
        /// The process of the guest's VMM on this host, if it is one that outlives the process that
        /// leads the session: by the host's boot, its number and its start, so that no other
        /// process is ever called so. Old versions wrote none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        process: Option<String>,
    },
    /// Source: the guest never runs here again, unless the destination says ABORTED.
    Commit,
    /// Source: the destination has the guest.
    Given {
        /// Whether an operator said so instead of the destination.
        by_operator: bool,
    },
    /// Source: the guest runs here.
    Kept {
        /// Whether an operator said so.
        by_operator: bool,
    },
    /// Destination: the guest is this host's from now on.
    RunIntent,
    /// Destination: the guest never ran here and never will.
    Aborted {
        /// Why, for people.
        reason: String,
    },
}

/// Which half of a migration a journal belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The host that the guest leaves.
    Source,
    /// The host that it goes to.
    Destination,
}

impl Side {
    /// `source` or `destination`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// Why the bytes of a journal are not records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadLine {
    /// Line number, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub reason: BadRecord,
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// It was damaged, or never was a record.
    #[error("{0}")]
    Damaged(String),
    /// It is whole, and of a kind that a newer release writes.
    #[error("a newer vmferry has written a record `{0}` that this release does not know")]
    Unknown(String),
}

/// What every record has, of whatever release.
#[derive(Deserialize)]
struct Kind {
    record: String,
    /// Whether nothing is promised by it.
    #[serde(default)]
    optional: bool,
}

/// The kinds of this release.
const KINDS: [&str; 6] = ["open", "commit", "given", "kept", "run-intent", "aborted"];

impl Record {
    /// The record's name on disk.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Open { .. } => "open",
            Self::Commit => "commit",
            Self::Given { .. } => "given",
            Self::Kept { .. } => "kept",
            Self::RunIntent => "run-intent",
            Self::Aborted { .. } => "aborted",
        }
    }

    /// Whether this side ever writes such a record.
    #[must_use]
    pub fn is_of(&self, side: Side) -> bool {
        match self {
            Self::Open { .. } => true,
            Self::Commit | Self::Given { .. } | Self::Kept { .. } => side == Side::Source,
            Self::RunIntent | Self::Aborted { .. } => side == Side::Destination,
        }
    }

    /// The record as it stands on disk: one line.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let json = serde_json::to_string(self).expect("a record has only strings and numbers");
        format!("{:08x} {json}\n", checksum(json.as_bytes())).into_bytes()
    }
}

/// The records of the bytes of this side's journal, and the length in bytes of the lines that hold them.
///
/// What follows the last line's end is a record that was torn while it was written, and so was
/// never promised. A whole line that is damaged is another matter: it *was* promised. A record that
/// only the other side writes is in a file that was renamed or put together: no word may be given on it.
///
/// # Errors
/// The first line that is damaged, is a newer release's, or is the other side's.
pub fn decode(bytes: &[u8], side: Side) -> Result<(Vec<Record>, usize), BadLine> {
    let mut records = Vec::new();
    let mut whole = 0;
    for (index, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let Some(text) = line.strip_suffix(b"\n") else { break };
        let bad = |reason| BadLine { line: index + 1, reason };
        let record = decode_line(text).map_err(bad)?;
        if let Some(record) = &record
            && !record.is_of(side)
        {
            let text = format!("a {} never writes `{}`", side.name(), record.name());
            return Err(bad(BadRecord::Damaged(text)));
        }
        records.extend(record);
        whole += line.len();
    }
    Ok((records, whole))
}

/// The record of one line, without its end; none if it need not be known.
///
/// # Errors
/// What is wrong with it.
pub fn decode_line(line: &[u8]) -> Result<Option<Record>, BadRecord> {
    let damaged = |text: &str| BadRecord::Damaged(text.to_owned());
    let line = std::str::from_utf8(line).map_err(|_| damaged("not text"))?;
    let (sum, json) = line.split_once(' ').ok_or_else(|| damaged("no checksum"))?;
    let sum = u32::from_str_radix(sum, 16).map_err(|_| damaged("no checksum"))?;
    if sum != checksum(json.as_bytes()) {
        return Err(damaged("the checksum differs"));
    }
    let bad = |error: serde_json::Error| BadRecord::Damaged(error.to_string());
    let kind: Kind = serde_json::from_str(json).map_err(bad)?;
    match (KINDS.contains(&kind.record.as_str()), kind.optional) {
        (true, _) => serde_json::from_str(json).map(Some).map_err(bad),
        (false, true) => Ok(None),
        (false, false) => Err(BadRecord::Unknown(kind.record)),
    }
}

fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
#[path = "golden.rs"]
mod golden;
