//! Probes: asking another host about itself before a guest is sent there. A probe reports whether
//! the host admits this host and the guest, what its machine is, whether the VMM that waits there
//! could take the guest's machine, how its clock differs, and how fast the link is. It starts no
//! session and promises nothing.
//!
//! [`probe`] asks. A destination answers in the thread that greets the connection, so that a
//! running migration is not disturbed: one probe at a time, with bounded bytes and time.

mod answer;
mod ask;
pub(crate) mod host;

use std::io::{Read, Write};
use std::time::Duration;

use vmferry_wire::{CONTROL_HEADER_BYTES, ProbeHeader, ProbeMessage};

#[doc(hidden)]
pub use answer::{Comparer, Gate, answer};
pub use ask::{About, LinkFigures, ProbeError, Probed, probe};
pub use host::{HostFacts, HugePages, LibvirtFacts};

use crate::error::MigrateError;

/// The longest time for which the link is loaded.
pub const LOAD_TIME: Duration = Duration::from_secs(2);
/// The most bytes sent as load: two seconds of a link of 32 Gbit/s.
pub const MOST_LOAD_BYTES: u64 = 8 << 30;
/// The longest time that a probe takes at the host that answers: less than the limit for a whole
/// greeting.
const PROBE_TIME: Duration = Duration::from_secs(9);
/// The most messages other than LOAD that one side of a probe answers.
const MOST_ECHOES: u32 = 64;

/// Sends a message.
fn send(writer: &mut impl Write, message: &ProbeMessage) -> Result<(), MigrateError> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    writer
        .write_all(&bytes)
        .and_then(|()| writer.flush())
        .map_err(|error| crate::link::lost("probe", "asking the other host", &error))
}

/// Receives messages and counts their bytes.
struct Messages<R> {
    reader: R,
    offset: u64,
    body: Vec<u8>,
}

impl<R: Read> Messages<R> {
    fn new(reader: R) -> Self {
        Self { reader, offset: 0, body: Vec::new() }
    }

    fn receive(&mut self) -> Result<ProbeMessage, MigrateError> {
        let lost = |error| crate::link::lost("probe", "asking the other host", &error);
        let mut header = [0; CONTROL_HEADER_BYTES];
        self.reader.read_exact(&mut header).map_err(lost)?;
        let header = ProbeHeader::parse(&header).map_err(|error| self.bad(&error.to_string()))?;
        self.offset += CONTROL_HEADER_BYTES as u64;
        // `parse` has checked the length.
        self.body.resize(header.body_bytes(), 0);
        self.reader.read_exact(&mut self.body).map_err(lost)?;
        let message = header.decode(&self.body).map_err(|error| self.bad(&error.to_string()))?;
        self.offset += self.body.len() as u64;
        Ok(message)
    }

    fn bad(&self, reason: &str) -> MigrateError {
        MigrateError::protocol("probe", self.offset, reason)
    }
}
