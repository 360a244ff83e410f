//! What is told.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};

/// Something that was read whole, and is right.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// What it is: `hello`, `BEGIN`, `frame` and so on.
    pub record: &'static str,
    /// What it says.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl Record {
    /// A record whose fields are those of an object.
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

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// One direction of a recorded channel.
    Recording,
    /// A session's journal.
    Journal,
    /// The saved state of a machine.
    State,
    /// Nothing that vmferry writes.
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

/// What came of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// What it is.
    pub kind: Kind,
    /// Records that are right, up to the end or the break.
    pub records: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// How it ends.
    #[serde(flatten)]
    pub end: End,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, records, bytes, end } = self;
        write!(f, "{kind}, {records} records in {bytes} bytes, {end}")
    }
}

/// How a file ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "end", rename_all = "kebab-case")]
pub enum End {
    /// With its last record.
    Whole,
    /// Within a record, of which everything that is there may be right: the recording, or the write, was cut off.
    CutOff {
        /// Where the record begins.
        offset: u64,
        /// Its number, from 1.
        record: u64,
        /// What it is.
        what: String,
        /// Bytes that it needs, as far as that is known.
        needed: u64,
        /// Bytes of them that are there.
        found: u64,
    },
    /// With something that is wrong.
    Broken(Break),
}

/// What is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Break {
    /// The offset in bytes of what is wrong.
    pub offset: u64,
    /// The number of the record, from 1.
    pub record: u64,
    /// What it is.
    pub what: String,
    /// What is wrong with it: what was expected, and what was found.
    pub problem: String,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::CutOff { offset, record, what, needed, found } => write!(
                f,
                "cut off in record {record}, {what} at byte {offset}: {found} of {needed} bytes are there"
            ),
            Self::Broken(Break { offset, record, what, problem }) => {
                write!(f, "broken at byte {offset}, in record {record}, {what}: {problem}")
            }
        }
    }
}
