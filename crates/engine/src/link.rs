//! Control channels: typed messages over the two halves of a channel, and errors for lost channels.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use vmferry_memory::GuestBytes;
use vmferry_transport::{ChannelCloser, ChannelReader, ChannelWriter};
use vmferry_wire::{CONTROL_HEADER_BYTES, ControlHeader, ControlMessage};

use crate::error::MigrateError;

/// The sending half, shared by all threads that send messages.
#[derive(Debug)]
pub struct ControlWriter<W>(Mutex<Outgoing<W>>);

#[derive(Debug)]
struct Outgoing<W> {
    writer: W,
    /// The protocol version.
    version: u16,
    /// Reused, so that acknowledgements do not allocate.
    bytes: GuestBytes,
}

impl<W: Write> ControlWriter<W> {
    /// Wraps the sending half of a channel whose protocol version was negotiated.
    pub fn new(writer: W, version: u16) -> Self {
        Self(Mutex::new(Outgoing { writer, version, bytes: GuestBytes::new() }))
    }

    /// Sends and flushes one message.
    ///
    /// # Errors
    /// The channel's error. Part of the message may have been sent.
    pub fn send(&self, message: &ControlMessage) -> io::Result<()> {
        let mut outgoing = self.0.lock();
        let Outgoing { writer, version, bytes } = &mut *outgoing;
        bytes.clear();
        message.encode(*version, bytes);
        writer.write_all(bytes)?;
        writer.flush()
    }
}

impl ControlWriter<ChannelWriter> {
    /// Signals that nothing more follows. Data sent before still arrives.
    ///
    /// # Errors
    /// The channel's.
    pub fn finish(&self) -> io::Result<()> {
        self.0.lock().writer.finish()
    }
}

/// The present control channel of a session, for sending acknowledgements. Without a channel they
/// are dropped, because a reconnecting peer is sent the progress of every lane anyway.
#[derive(Debug, Default)]
pub struct ControlSlot(Mutex<Option<(Arc<ControlWriter<ChannelWriter>>, ChannelCloser)>>);

impl ControlSlot {
    /// Uses this channel from now on.
    pub fn set(&self, writer: Arc<ControlWriter<ChannelWriter>>, closer: ChannelCloser) {
        *self.0.lock() = Some((writer, closer));
    }

    /// Removes the channel until `set` is called again.
    pub fn clear(&self) {
        *self.0.lock() = None;
    }

    /// Sends a message if there is a channel. A channel that fails is closed, which its reader
    /// notices.
    pub fn send(&self, message: &ControlMessage) {
        let mut slot = self.0.lock();
        if let Some((writer, closer)) = &*slot
            && writer.send(message).is_err()
        {
            closer.close();
            *slot = None;
        }
    }
}

/// How long a peer may take to receive an answer. All answers are short and fit into the buffers of
/// any channel that is being read. A peer that takes longer is not reading, and the waiting thread
/// conducts a migration.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The peer on a control channel, which determines the permitted messages. The message type is
/// checked before anything is read or allocated for its body.
#[derive(Clone, Debug)]
pub enum Speaker {
    /// The source, on the control channel of a session. FINAL, the only long message, is read only
    /// when it is due.
    Source(FinalDue),
    /// The destination.
    Destination,
    /// A source that will be refused.
    Applicant,
    /// A peer that has not sent its query yet.
    Asker,
    /// A source in doubt that has asked about a session.
    InDoubt,
}

impl Speaker {
    fn may_say(&self, message: u16) -> bool {
        use vmferry_wire::number as is;
        let of_source = !matches!(
            message,
            is::ACCEPT
                | is::REFUSE
                | is::PLACED
                | is::READY
                | is::VERIFIED
                | is::RUNNING
                | is::ABORTED
                | is::ANSWER
        );
        match self {
            Self::Source(due) if message == is::FINAL => due.is_due(),
            Self::Source(_) => of_source,
            Self::Destination => !of_source || matches!(message, is::PING | is::PONG | is::ABORT),
            Self::Applicant => of_source && message != is::FINAL,
            Self::Asker => message == is::QUERY,
            Self::InDoubt => {
                matches!(message, is::QUERY | is::COMMIT | is::ABORT | is::PING | is::PONG)
            }
        }
    }
}

/// Whether the destination expects FINAL on a control channel. Only one is read at a time, and none
/// before the guest is accepted, because it may have 64 MiB.
#[derive(Clone, Debug, Default)]
pub struct FinalDue {
    /// Set while the session accepts FINAL: the guest is accepted and nothing is decided yet.
    wanted: Arc<AtomicBool>,
    /// One was read on this channel and has not been withdrawn.
    said: bool,
}

impl FinalDue {
    /// For a channel of a session; `wanted` is the session's flag.
    #[must_use]
    pub fn of(wanted: &Arc<AtomicBool>) -> Self {
        Self { wanted: Arc::clone(wanted), said: false }
    }

    fn is_due(&self) -> bool {
        self.wanted.load(Ordering::Acquire) && !self.said
    }

    fn heard(&mut self, message: &ControlMessage) {
        match message {
            ControlMessage::Final { .. } => self.said = true,
            ControlMessage::Withdraw {} => self.said = false,
            _ => {}
        }
    }
}

/// Initial buffer size for a message. The buffer of a longer message grows as data arrives, to at
/// most twice what has arrived, so a length announced by a peer allocates nothing.
const FIRST_BYTES: usize = 16 << 10;

/// The receiving half.
#[derive(Debug)]
pub struct ControlReader<R> {
    reader: R,
    speaker: Speaker,
    /// The protocol version.
    version: u16,
    offset: u64,
    body: GuestBytes,
    ignored: Vec<u16>,
}

impl<R: Read> ControlReader<R> {
    /// Wraps the receiving half of a channel whose protocol version was negotiated.
    pub fn new(reader: R, version: u16, speaker: Speaker) -> Self {
        Self { reader, speaker, version, offset: 0, body: GuestBytes::new(), ignored: Vec::new() }
    }

    /// Fields of the last message that this release does not know and has ignored.
    pub fn ignored(&self) -> &[u16] {
        &self.ignored
    }

    /// Receives the next message. The end of the channel is an error, since no message marks the
    /// end.
    ///
    /// # Errors
    /// [`MigrateError::LinkLost`] or [`MigrateError::Protocol`].
    pub fn receive(&mut self, during: &'static str) -> Result<ControlMessage, MigrateError> {
        let mut header = [0; CONTROL_HEADER_BYTES];
        self.fill(&mut header, during)?;
        let protocol = |offset, error: vmferry_wire::WireError| {
            MigrateError::protocol("control", offset, error.to_string())
        };
        let header = ControlHeader::parse(&header).map_err(|error| protocol(self.offset, error))?;
        if !self.speaker.may_say(header.number()) {
            let reason = format!("{} came out of turn: this side was {during}", header.name());
            return Err(MigrateError::protocol("control", self.offset, reason));
        }
        self.offset += CONTROL_HEADER_BYTES as u64;
        // `parse` has checked the length against the limit of the message's type.
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        while body.len() < header.body_bytes() {
            let (filled, left) = (body.len(), header.body_bytes() - body.len());
            body.extend_to(filled + left.min(filled.max(FIRST_BYTES)));
            self.fill(&mut body[filled..], during)?;
        }
        let bytes = body.len() as u64;
        // A long body is passed on, neither kept nor copied.
        let decoded = if body.len() > FIRST_BYTES {
            header.decode_whole(self.version, body)
        } else {
            self.body = body;
            header.decode(self.version, &self.body)
        };
        let decoded = decoded.map_err(|error| protocol(self.offset, error))?;
        self.offset += bytes;
        self.ignored = decoded.ignored;
        if let Speaker::Source(due) = &mut self.speaker {
            due.heard(&decoded.message);
        }
        Ok(decoded.message)
    }

    fn fill(&mut self, into: &mut [u8], during: &'static str) -> Result<(), MigrateError> {
        self.reader.read_exact(into).map_err(|error| lost("control", during, &error))
    }
}

/// How long a lost data channel waits for the control channel to report the reason.
pub const EXPLANATION: Duration = Duration::from_millis(500);

/// A lost channel.
#[derive(Debug)]
pub struct Loss {
    /// The time of the loss.
    pub since: Duration,
    /// The cause.
    pub error: MigrateError,
}

/// A greeted data channel.
pub struct DataChannel {
    /// The receiving half.
    pub reader: ChannelReader,
    /// The sending half.
    pub writer: ChannelWriter,
    /// Closes it from any thread.
    pub closer: ChannelCloser,
}

/// A channel's name: a lane's, or the control channel's.
#[must_use]
pub fn channel_name(lane: Option<u8>) -> String {
    lane.map_or_else(|| "control".to_owned(), |lane| format!("lane {lane}"))
}

/// An I/O error as `MigrateError::LinkLost`, with the end of the stream in plain words.
pub fn lost(channel: &str, during: &'static str, error: &io::Error) -> MigrateError {
    let detail = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the other side closed the connection".to_owned(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "the other side takes no data".to_owned()
        }
        _ => crate::causes::chain(error),
    };
    MigrateError::LinkLost { channel: channel.to_owned(), during, detail }
}
