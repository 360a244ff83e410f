//! A control channel: typed messages over a channel's two halves; and what is said of channels that are lost.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vmferry_memory::GuestBytes;
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
    bytes: GuestBytes,
}

impl<W: Write> ControlWriter<W> {
    /// Wraps the sending half of a channel on which a version of the protocol was agreed on.
    pub fn new(writer: W, version: u16) -> Self {
        Self(Mutex::new(Outgoing { writer, version, bytes: GuestBytes::new() }))
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

    /// No channel, until there is another one.
    pub fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
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

/// How long a peer may take to receive an answer. All of them are short, and fit into the buffers
/// of any channel that is read: a peer that leaves them longer is not reading, and the thread that
/// waits leads a migration.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Who speaks on a control channel, and so which messages may come on it. The type of a message is
/// looked at before anything is read or allocated for its body.
#[derive(Clone, Debug)]
pub enum Speaker {
    /// The source, on the control channel of a session. FINAL, the one long message, is read only
    /// when it is due.
    Source(FinalDue),
    /// The destination.
    Destination,
    /// A source to refuse.
    Applicant,
    /// Somebody whose question was not asked yet.
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

/// Whether the destination waits for a FINAL on a control channel. Only one is read at a time, and
/// none before the guest is accepted: it may have 64 MiB.
#[derive(Clone, Debug, Default)]
pub struct FinalDue {
    /// The session takes one: the guest is accepted, and nothing is decided yet.
    wanted: Arc<AtomicBool>,
    /// One was read on this channel, and not withdrawn since.
    said: bool,
}

impl FinalDue {
    /// For a channel of a session that says when it wants one.
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

/// How much room is made for a message at first. A longer one gets more as it comes, at most twice
/// what has come: what a peer says that it will send costs nothing.
const FIRST_BYTES: usize = 16 << 10;

/// The receiving half.
#[derive(Debug)]
pub struct ControlReader<R> {
    reader: R,
    speaker: Speaker,
    /// Of the protocol.
    version: u16,
    offset: u64,
    body: GuestBytes,
    ignored: Vec<u16>,
}

impl<R: Read> ControlReader<R> {
    /// Wraps the receiving half of a channel on which a version of the protocol was agreed on.
    pub fn new(reader: R, version: u16, speaker: Speaker) -> Self {
        Self { reader, speaker, version, offset: 0, body: GuestBytes::new(), ignored: Vec::new() }
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
        if !self.speaker.may_say(header.number()) {
            let reason = format!("{} came out of turn: this side was {during}", header.name());
            let channel = "control".into();
            return Err(MigrateError::Protocol { channel, offset: self.offset, reason });
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
        // A body that was long is not kept, nor copied.
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
