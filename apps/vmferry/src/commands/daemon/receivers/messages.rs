//! What a daemon and the process that starts its receivers say to each other: lines of JSON.

use std::io::{self, BufRead, Read};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vmferry_handover::SessionId;
use vmferry_wire::GuestIdentity;

/// The longest line.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// A receiver that the daemon wants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// The name of its template.
    pub template: String,
    /// The guest that it receives.
    pub guest: GuestIdentity,
    /// The session.
    pub session: SessionId,
    /// The name in the source's certificate, if it has one.
    pub source: Option<String>,
}

/// The daemon's message.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ask {
    /// Is repeated in the answer.
    pub number: u64,
    /// The receiver.
    pub order: Order,
}

/// A message to the daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Said {
    /// A receiver waits for its source, or there is none.
    Answer {
        /// Of the question.
        number: u64,
        /// Why there is none: the number of a [`vmferry_wire::ReasonCode`], and a text.
        refusal: Option<(u16, String)>,
    },
    /// A receiver has printed an event.
    Event {
        /// Its guest's name.
        guest: String,
        /// Its session.
        session: SessionId,
        /// The event.
        said: Value,
    },
}

/// Reads a line. `None` at the end, or if the line is too long.
///
/// # Errors
/// The system's.
pub fn read_line(reader: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    reader.take(MAX_LINE_BYTES).read_until(b'\n', &mut line)?;
    Ok((line.last() == Some(&b'\n')).then_some(line))
}

/// Reads a message. `None` at the end.
///
/// # Errors
/// The system's, or a line that is no message.
pub fn read<T: DeserializeOwned>(reader: &mut impl BufRead) -> io::Result<Option<T>> {
    match read_line(reader)? {
        Some(line) => Ok(Some(serde_json::from_slice(&line)?)),
        None => Ok(None),
    }
}

/// A message as a line.
///
/// # Errors
/// None for the messages above.
pub fn line(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}
