//! Messages between the daemon and the processes beside it: lines of JSON.

use std::io::{self, BufRead, Read};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest line.
const MAX_LINE_BYTES: u64 = 1 << 20;

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
/// None for the messages of the daemon.
pub fn line(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}
