//! A connected, authenticated channel and its two halves.

use std::io::{self, BufRead, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use vmferry_memory::GuestBytes;

use crate::error::TransportError;
use crate::recording::Recorder;
use crate::transport::{Close, Receive, Transmit, Transport};

/// Who is at the other end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Its address, for people.
    pub address: String,
    /// The names in its certificate, a SPIFFE URI first; none without TLS.
    pub names: Vec<String>,
    /// Whether the channel is encrypted and the peer authenticated.
    pub tls: bool,
    /// How the keys of an encrypted channel were agreed on, such as `X25519MLKEM768`.
    pub key_exchange: Option<String>,
    /// The user of the process at the other end of a Unix socket.
    pub uid: Option<u32>,
}

impl PeerIdentity {
    /// A peer that has shown no certificate.
    #[must_use]
    pub fn anonymous(address: String) -> Self {
        Self { address, ..Self::default() }
    }

    /// A peer whose certificate was verified. `key_exchange` is the group that the keys were agreed on in.
    #[must_use]
    pub fn authenticated(
        address: String,
        names: Vec<String>,
        key_exchange: Option<String>,
    ) -> Self {
        Self { address, names, tls: true, key_exchange, uid: None }
    }

    /// The name that it goes by: its URI, or another name in its certificate, or its user.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        match (self.names.first(), self.uid) {
            (Some(name), _) => Some(name.clone()),
            (None, Some(uid)) => Some(format!("uid {uid}")),
            (None, None) => None,
        }
    }

    /// Whether both are the same host, by all that was proved of them. A certificate that was renewed in the
    /// meantime may have other addresses in it, but not another first name.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        self.tls == other.tls && self.name() == other.name()
    }
}

impl std::fmt::Display for PeerIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.address)?;
        self.name().map_or(Ok(()), |name| write!(f, " ({name})"))
    }
}

/// A byte stream to a peer.
#[derive(Debug)]
pub struct Channel {
    transport: Box<dyn Transport>,
    peer: PeerIdentity,
}

impl Channel {
    /// A channel over a connected transport, its own or a caller's.
    #[must_use]
    pub fn new(transport: impl Transport, peer: PeerIdentity) -> Self {
        Self { transport: Box::new(transport), peer }
    }

    /// The same channel, recorded if there is a recorder.
    #[must_use]
    pub(crate) fn recorded(self, recorder: Option<&Recorder>) -> Self {
        match recorder {
            Some(recorder) => Self::new(recorder.wrap(self.transport), self.peer),
            None => self,
        }
    }

    /// Who is at the other end.
    #[must_use]
    pub fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    /// What carries it.
    #[must_use]
    pub fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    /// Closes the channel from any thread.
    #[must_use]
    pub fn closer(&self) -> ChannelCloser {
        ChannelCloser::new(self.transport.closer())
    }

    /// The two halves, for two threads.
    #[must_use]
    pub fn split(self) -> (ChannelReader, ChannelWriter) {
        let peer = self.peer.address;
        let (reader, writer) = self.transport.split();
        (ChannelReader::new(reader, peer.clone()), ChannelWriter { half: writer, peer })
    }
}

/// The receiving half. `Ok(0)` is the end that the peer has announced; over a transport that
/// authenticates its peer any other end is an error.
///
/// Short reads go through a buffer; long ones find the rest of it first, and then go past it.
#[derive(Debug)]
pub struct ChannelReader {
    half: Box<dyn Receive>,
    buffer: GuestBytes,
    /// The part of the buffer that was received and not read.
    unread: Range<usize>,
    peer: String,
}

impl ChannelReader {
    fn new(half: Box<dyn Receive>, peer: String) -> Self {
        let mut buffer = GuestBytes::new();
        buffer.extend_to(half.buffer_bytes());
        Self { half, buffer, unread: 0..0, peer }
    }

    /// A descriptor from which what follows can be read as it is, if the channel has one and nothing is buffered: for
    /// whoever wants to receive into memory that no slice may refer to.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        if self.unread.is_empty() { self.half.descriptor() } else { None }
    }

    /// Offers what has come to `take` where it lies, as [`Receive::read_in_place`] does.
    ///
    /// # Errors
    /// Those of a read.
    pub fn read_in_place(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize> {
        if self.unread.is_empty()
            && let Some(taken) = self.half.read_in_place(take)
        {
            return taken;
        }
        let taken = match self.fill_buf()? {
            [] => 0,
            piece => take(piece),
        };
        self.consume(taken);
        Ok(taken)
    }

    /// Bounds the wait for the next bytes; `None` waits for ever.
    ///
    /// # Errors
    /// The system's.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<(), TransportError> {
        self.half
            .set_timeout(timeout)
            .map_err(|source| TransportError::Io { peer: self.peer.clone(), source })
    }
}

impl Read for ChannelReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.unread.is_empty() && into.len() >= self.buffer.len() {
            return self.half.read(into);
        }
        let taken = self.fill_buf()?.read(into)?;
        self.consume(taken);
        Ok(taken)
    }
}

impl BufRead for ChannelReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.unread.is_empty() {
            self.unread = 0..0;
            self.unread.end = self.half.read(&mut self.buffer)?;
        }
        Ok(&self.buffer[self.unread.clone()])
    }

    fn consume(&mut self, bytes: usize) {
        self.unread.start = self.unread.end.min(self.unread.start + bytes);
    }
}

/// The sending half. What is written is on its way when the call returns. Dropping it announces
/// the end as far as that is possible without waiting; [`finish`](Self::finish) says whether it
/// was. After an error, a time-out too, a channel that authenticates its peer takes no more.
#[derive(Debug)]
pub struct ChannelWriter {
    half: Box<dyn Transmit>,
    peer: String,
}

impl ChannelWriter {
    /// Bounds the wait for a peer that takes nothing; `None` waits for ever.
    ///
    /// # Errors
    /// The system's.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<(), TransportError> {
        self.half
            .set_timeout(timeout)
            .map_err(|source| TransportError::Io { peer: self.peer.clone(), source })
    }

    /// Announces the end to the peer: it reads everything written before, then the end.
    ///
    /// # Errors
    /// The system's; a peer that is gone already is none.
    pub fn finish(&mut self) -> io::Result<()> {
        match self.half.finish() {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            other => other,
        }
    }
}

impl Write for ChannelWriter {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.half.write(from)
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.half.write_vectored(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.half.flush()
    }
}

/// Closes a channel from any thread: whoever waits on it wakes up.
#[derive(Clone, Debug)]
pub struct ChannelCloser(Arc<dyn Close>);

impl ChannelCloser {
    pub(crate) fn new(transport: Arc<dyn Close>) -> Self {
        Self(transport)
    }

    /// Closes both directions at once. What was written may be lost: see
    /// [`ChannelWriter::finish`].
    pub fn close(&self) {
        self.0.close();
    }
}
