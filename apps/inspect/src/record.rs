//! The output of an inspection.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};

/// A record that was read completely and is valid.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// The offset of the record in bytes.
    pub offset: u64,
    /// The length in bytes.
    pub bytes: u64,
    /// The kind of record: `hello`, `BEGIN`, `frame` and so on.
    pub record: &'static str,
    /// The record's fields.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl Record {
    /// Makes a record whose fields are the members of an object.
    pub(crate) fn new(offset: u64, bytes: u64, record: &'static str, fields: Value) -> Self {
        let Value::Object(fields) = fields else { unreachable!("fields are an object") };
        Self { offset, bytes, record, fields }
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>10} {:>8}  {:<9}", self.offset, self.bytes, self.record)?;
        for (name, value) in &self.fields {
            match value {
                Value::String(text) => write!(f, " {name}={}", text.escape_debug())?,
                other => write!(f, " {name}={other}")?,
            }
        }
        Ok(())
    }
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// One direction of a recorded channel.
    Recording,
    /// A session's journal.
    Journal,
    /// The saved state of a machine.
    State,
    /// Not a file of vmferry.
    Unknown,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Recording => "recorded channel",
            Self::Journal => "journal",
            Self::State => "saved state",
            Self::Unknown => "unknown file",
        })
    }
}

/// The result of reading a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// The kind of the file.
    pub kind: Kind,
    /// Number of valid records before the end or the break.
    pub records: u64,
    /// Number of bytes read.
    pub bytes: u64,
    /// The end of the file.
    #[serde(flatten)]
    pub end: End,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, records, bytes, end } = self;
        write!(f, "{kind}, {records} records in {bytes} bytes, {end}")
    }
}

/// The end of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "end", rename_all = "kebab-case")]
pub enum End {
    /// The file ends after its last record.
    Whole,
    /// The file ends within a record: the recording or the write was cut off.
    CutOff {
        /// The offset of the record.
        offset: u64,
        /// The number of the record, from 1.
        record: u64,
        /// The kind of record.
        what: String,
        /// Bytes that the record needs, as far as known.
        needed: u64,
        /// Bytes of the record in the file.
        found: u64,
    },
    /// The file has invalid content.
    Broken(Break),
}

/// An error and its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Break {
    /// The offset of the error in bytes.
    pub offset: u64,
    /// The number of the record, from 1.
    pub record: u64,
    /// The kind of record.
    pub what: String,
    /// The error: what was expected and what was found.
    pub problem: String,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::CutOff { offset, record, what, needed, found } => write!(
                f,
                "cut off in record {record}, {what} at byte {offset}: \
                 {found} of {needed} bytes are there"
            ),
            Self::Broken(Break { offset, record, what, problem }) => {
                write!(f, "broken at byte {offset}, in record {record}, {what}: {problem}")
            }
        }
    }
}
