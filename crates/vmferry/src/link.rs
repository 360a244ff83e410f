//! A control channel: typed messages over a channel's two halves; and what is said of channels that are lost.

use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vmferry_transport::{ChannelCloser, ChannelWriter};
use vmferry_wire::{CONTROL_HEADER_BYTES, ControlHeader, ControlMessage};

use crate::error::MigrateError;

/// The sending half, shared by the threads that have something to say.
#[derive(Debug)]
pub struct ControlWriter<W>(Mutex<Outgoing<W>>);

#[derive(Debug)]
struct Outgoing<W> {
    writer: W,
    /// Of the protocol.
    version: u16,
    /// Kept, so that acknowledgements allocate nothing.
    bytes: Vec<u8>,
}

impl<W: Write> ControlWriter<W> {
    /// Wraps the sending half of a channel on which a version of the protocol was agreed on.
    pub fn new(writer: W, version: u16) -> Self {
        Self(Mutex::new(Outgoing { writer, version, bytes: Vec::new() }))
    }

    /// Sends one message whole, flushed.
    ///
    /// # Errors
    /// The channel's; some of the message may be on its way then.
    pub fn send(&self, message: &ControlMessage) -> io::Result<()> {
        let mut outgoing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Outgoing { writer, version, bytes } = &mut *outgoing;
        bytes.clear();
        message.encode(*version, bytes);
        writer.write_all(bytes)?;
        writer.flush()
    }
}

impl ControlWriter<ChannelWriter> {
    /// Says that nothing follows; what was sent before still arrives.
    ///
    /// # Errors
    /// The channel's.
    pub fn finish(&self) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).writer.finish()
    }
}

/// The control channel that a session has at the moment, for those who acknowledge: without one they say
/// nothing, as whoever makes it again is told how far every lane is.
#[derive(Debug, Default)]
pub struct ControlSlot(Mutex<Option<(Arc<ControlWriter<ChannelWriter>>, ChannelCloser)>>);

impl ControlSlot {
    /// From now on this channel.
    pub fn set(&self, writer: Arc<ControlWriter<ChannelWriter>>, closer: ChannelCloser) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((writer, closer));
    }

    /// Sends a message if there is a channel. One that fails is closed, which its reader notices.
    pub fn send(&self, message: &ControlMessage) {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((writer, closer)) = &*slot
            && writer.send(message).is_err()
        {
            closer.close();
            *slot = None;
        }
    }
}

/// The receiving half.
#[derive(Debug)]
pub struct ControlReader<R> {
    reader: R,
    /// Of the protocol.
    version: u16,
    offset: u64,
    body: Vec<u8>,
    ignored: Vec<u16>,
}

impl<R: Read> ControlReader<R> {
    /// Wraps the receiving half of a channel on which a version of the protocol was agreed on.
    pub fn new(reader: R, version: u16) -> Self {
        Self { reader, version, offset: 0, body: Vec::new(), ignored: Vec::new() }
    }

    /// Fields of the last message that this release does not know, and that were left out.
    pub fn ignored(&self) -> &[u16] {
        &self.ignored
    }

    /// The next message. The end of the channel is an error: no message says "the end".
    ///
    /// # Errors
    /// [`MigrateError::LinkLost`] or [`MigrateError::Protocol`].
    pub fn receive(&mut self, during: &'static str) -> Result<ControlMessage, MigrateError> {
        let mut header = [0; CONTROL_HEADER_BYTES];
        self.fill(&mut header, during)?;
        let protocol = |offset, error: vmferry_wire::WireError| MigrateError::Protocol {
            channel: "control".into(),
            offset,
            reason: error.to_string(),
        };
        let header = ControlHeader::parse(&header).map_err(|error| protocol(self.offset, error))?;
        self.offset += CONTROL_HEADER_BYTES as u64;
        // `parse` has checked the length against the limit of the message's type.
        let mut body = std::mem::take(&mut self.body);
        body.resize(header.body_bytes(), 0);
        let filled = self.fill(&mut body, during);
        self.body = body;
        filled?;
        let decoded = header
            .decode(self.version, &self.body)
            .map_err(|error| protocol(self.offset, error))?;
        self.offset += self.body.len() as u64;
        self.ignored = decoded.ignored;
        Ok(decoded.message)
    }

    fn fill(&mut self, into: &mut [u8], during: &'static str) -> Result<(), MigrateError> {
        self.reader.read_exact(into).map_err(|error| lost("control", during, &error))
    }
}

/// How long a data channel that is gone waits for the control channel to say why.
pub const EXPLANATION: Duration = Duration::from_millis(500);

/// A channel that is gone.
#[derive(Debug)]
pub struct Loss {
    /// Since when.
    pub since: Duration,
    /// Why.
    pub error: MigrateError,
}

/// A channel's name: a lane's, or the control channel's.
#[must_use]
pub fn channel_name(lane: Option<u8>) -> String {
    lane.map_or_else(|| "control".to_owned(), |lane| format!("lane {lane}"))
}

/// A broken channel as an error, with the end of the stream in plain words.
pub fn lost(channel: &str, during: &'static str, error: &io::Error) -> MigrateError {
    let detail = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the other side closed the connection".to_owned(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "the other side takes no data".to_owned()
        }
        _ => crate::error::chain(error),
    };
    MigrateError::LinkLost { channel: channel.to_owned(), during, detail }
}
