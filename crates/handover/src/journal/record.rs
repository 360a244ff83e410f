//! The records of a journal and their form on disk.
//!
//! Journals outlive the release that wrote them, because hosts are upgraded and rolled back. So
//! unknown members of a record are ignored, and stay in the file. An unknown record may be a
//! promise, so no word is given from its journal. Unknown records with `"optional":true` promise
//! nothing and are skipped.

use crate::{GuestIdentity, SessionKind, WitnessId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantNames};

/// A promise or an outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr, VariantNames)]
#[serde(tag = "record", rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Record {
    /// The session began. Both sides write this before anything else.
    Open {
        /// The guest.
        guest: GuestIdentity,
        /// The other host: its address, or the name in its certificate.
        peer: String,
        /// The names in the peer's certificate; empty without TLS.
        peer_names: Vec<String>,
        /// Seconds since 1970 by this host's clock, for people. Use `order` to compare sessions.
        at: u64,
        /// One more than the largest in the directory when the session began; 0 in journals of old
        /// releases, which had no numbers.
        #[serde(default)]
        order: u64,
        /// The process of the guest's VMM on this host, if it outlives the process that leads the
        /// session. It is identified by the host's boot ID, its process ID and its start time, so
        /// that no other process ever has the same value. Old releases wrote none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        process: Option<String>,
        /// The witness that both hosts ask before the guest runs at the destination, and in doubt.
        /// A release that does not know it asks the other host only, which is safe.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        witness: Option<WitnessId>,
    },
    /// Source: the guest never runs here again, unless the destination answers ABORTED.
    Commit,
    /// As `Commit`, of a session in which the destination may run the guest before it has all
    /// pages. A record of its own, because a release that does not know post-copy must not free the
    /// pages on an operator's word.
    CommitPostCopy,
    /// Source: the destination runs the guest and still fetches pages from here.
    Serving,
    /// Source: the destination owns the guest.
    Given {
        /// Whether an operator decided this instead of the destination.
        by_operator: bool,
    },
    /// Source: the source owns the guest.
    Kept {
        /// Whether an operator decided this.
        by_operator: bool,
    },
    /// Destination: this host owns the guest from now on.
    RunIntent,
    /// As `RunIntent`, and the guest may lack pages until `Fetched`. A record of its own, because a
    /// release that does not know post-copy must not say that it needs nothing of the source.
    RunIntentPostCopy,
    /// Destination: the guest has all its pages.
    Fetched,
    /// Destination: the guest has crashed while it lacked pages. A release that does not know this
    /// record refuses the journal: it would take the guest for one that still fetches.
    Ended,
    /// Destination: the guest never ran here and never will.
    Aborted {
        /// The reason, for people.
        reason: String,
    },
}

/// The side of a migration that a journal belongs to.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, EnumString, IntoStaticStr,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Side {
    /// The host that the guest leaves.
    Source,
    /// The host that the guest moves to.
    Destination,
}

impl Side {
    /// The name, `source` or `destination`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A line of a journal that is not a valid record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadLine {
    /// Line number, from 1.
    pub line: usize,
    /// The problem.
    pub reason: BadRecord,
}

/// The problem with a line of a journal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// The line is damaged, or was never a record.
    #[error("{0}")]
    Damaged(String),
    /// The line is valid, but a newer release's kind of record.
    #[error("a newer vmferry has written a record `{0}` that this release does not know")]
    Unknown(String),
}

/// The members that every record of every release has.
#[derive(Deserialize)]
struct Kind {
    record: String,
    /// Whether the record promises nothing.
    #[serde(default)]
    optional: bool,
}

impl Record {
    /// The record's name on disk.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.into()
    }

    /// COMMIT of a session of this kind.
    #[must_use]
    pub fn commit(kind: SessionKind) -> Self {
        match kind {
            SessionKind::PreCopy => Self::Commit,
            SessionKind::PostCopy => Self::CommitPostCopy,
        }
    }

    /// RUN-INTENT of a session of this kind.
    #[must_use]
    pub fn run_intent(kind: SessionKind) -> Self {
        match kind {
            SessionKind::PreCopy => Self::RunIntent,
            SessionKind::PostCopy => Self::RunIntentPostCopy,
        }
    }

    /// Whether it is COMMIT, of a session with or without post-copy.
    #[must_use]
    pub fn is_commit(&self) -> bool {
        matches!(self, Self::Commit | Self::CommitPostCopy)
    }

    /// Whether this side writes this kind of record.
    #[must_use]
    pub fn is_of(&self, side: Side) -> bool {
        match self {
            Self::Open { .. } => true,
            Self::Commit
            | Self::CommitPostCopy
            | Self::Serving
            | Self::Given { .. }
            | Self::Kept { .. } => side == Side::Source,
            Self::RunIntent
            | Self::RunIntentPostCopy
            | Self::Fetched
            | Self::Ended
            | Self::Aborted { .. } => side == Side::Destination,
        }
    }

    /// The record's line on disk.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        line(self)
    }
}

/// A kind of records that journals are made of. Their JSON has its name in the member `record`.
pub trait JournalRecord: Serialize + DeserializeOwned {
    /// What precedes the side in the names of the files.
    const FILE_PREFIX: &'static str;
    /// The names of all records of this kind.
    const NAMES: &'static [&'static str];

    /// The record's name on disk.
    fn name_on_disk(&self) -> &'static str;

    /// Whether this side writes this record.
    fn is_written_by(&self, side: Side) -> bool;
}

impl JournalRecord for Record {
    const FILE_PREFIX: &'static str = "";
    const NAMES: &'static [&'static str] = Self::VARIANTS;

    fn name_on_disk(&self) -> &'static str {
        self.name()
    }

    fn is_written_by(&self, side: Side) -> bool {
        self.is_of(side)
    }
}

/// A record's line on disk.
pub(super) fn line(record: &impl JournalRecord) -> Vec<u8> {
    let json = serde_json::to_string(record).expect("a record has only strings and numbers");
    format!("{:08x} {json}\n", checksum(json.as_bytes())).into_bytes()
}

/// Decodes the records of one side's journal. Also returns the length in bytes of the lines that
/// hold them.
///
/// Bytes after the last line feed are a record that was torn during its write, and so was never
/// promised. A damaged complete line *was* promised. A record that only the other side writes means
/// that the file was renamed or assembled, and no word may be given from it.
///
/// # Errors
/// The first line that is damaged, written by a newer release, or written by the other side.
pub fn decode(bytes: &[u8], side: Side) -> Result<(Vec<Record>, usize), BadLine> {
    decode_records(bytes, side)
}

/// [`decode`] for any kind of records.
pub(super) fn decode_records<R: JournalRecord>(
    bytes: &[u8],
    side: Side,
) -> Result<(Vec<R>, usize), BadLine> {
    let mut records = Vec::new();
    let mut whole = 0;
    for (index, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let Some(text) = line.strip_suffix(b"\n") else { break };
        let bad = |reason| BadLine { line: index + 1, reason };
        let record: Option<R> = decode_record(text).map_err(bad)?;
        if let Some(record) = &record
            && !record.is_written_by(side)
        {
            let text = format!("a {} never writes `{}`", side.name(), record.name_on_disk());
            return Err(bad(BadRecord::Damaged(text)));
        }
        records.extend(record);
        whole += line.len();
    }
    Ok((records, whole))
}

/// Decodes one line without its line feed; `None` for an unknown optional record.
///
/// # Errors
/// The problem with the line.
pub fn decode_line(line: &[u8]) -> Result<Option<Record>, BadRecord> {
    decode_record(line)
}

fn decode_record<R: JournalRecord>(line: &[u8]) -> Result<Option<R>, BadRecord> {
    let damaged = |text: &str| BadRecord::Damaged(text.to_owned());
    let line = std::str::from_utf8(line).map_err(|_| damaged("not text"))?;
    let (sum, json) = line.split_once(' ').ok_or_else(|| damaged("no checksum"))?;
    let sum = u32::from_str_radix(sum, 16).map_err(|_| damaged("no checksum"))?;
    if sum != checksum(json.as_bytes()) {
        return Err(damaged("the checksum differs"));
    }
    let bad = |error: serde_json::Error| BadRecord::Damaged(error.to_string());
    let kind: Kind = serde_json::from_str(json).map_err(bad)?;
    match (R::NAMES.contains(&kind.record.as_str()), kind.optional) {
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
