//! The records of a journal and their form on disk.

use serde::{Deserialize, Serialize};
use vmferry_wire::GuestIdentity;

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
        /// Seconds since 1970.
        at: u64,
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
    pub reason: String,
}

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
/// The first line that is damaged, or is the other side's.
pub fn decode(bytes: &[u8], side: Side) -> Result<(Vec<Record>, usize), BadLine> {
    let mut records = Vec::new();
    let mut whole = 0;
    for (index, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let Some(text) = line.strip_suffix(b"\n") else { break };
        let bad = |reason| BadLine { line: index + 1, reason };
        let record = decode_line(text).map_err(bad)?;
        if !record.is_of(side) {
            return Err(bad(format!("a {} never writes `{}`", side.name(), record.name())));
        }
        records.push(record);
        whole += line.len();
    }
    Ok((records, whole))
}

/// The record of one line, without its end.
///
/// # Errors
/// What is wrong with it.
pub fn decode_line(line: &[u8]) -> Result<Record, String> {
    let line = std::str::from_utf8(line).map_err(|_| "not text".to_owned())?;
    let (sum, json) = line.split_once(' ').ok_or("no checksum")?;
    let sum = u32::from_str_radix(sum, 16).map_err(|_| "no checksum".to_owned())?;
    if sum != checksum(json.as_bytes()) {
        return Err("the checksum differs".into());
    }
    serde_json::from_str(json).map_err(|error| error.to_string())
}

fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}
