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

/// The peer at the other end of a channel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerIdentity {
    /// The peer's address, for people.
    pub address: String,
    /// The names in the peer's certificate, a SPIFFE URI first; empty without TLS.
    pub names: Vec<String>,
    /// Whether the channel is encrypted and the peer authenticated.
    pub tls: bool,
    /// The key exchange group of an encrypted channel, such as `X25519MLKEM768`.
    pub key_exchange: Option<String>,
    /// The user ID of the process at the other end of a Unix socket.
    pub uid: Option<u32>,
}

impl PeerIdentity {
    /// A peer without a certificate.
    #[must_use]
    pub fn anonymous(address: String) -> Self {
        Self { address, ..Self::default() }
    }

    /// A peer whose certificate was verified. `key_exchange` is the negotiated key exchange group.
    #[must_use]
    pub fn authenticated(
        address: String,
        names: Vec<String>,
        key_exchange: Option<String>,
    ) -> Self {
        Self { address, names, tls: true, key_exchange, uid: None }
    }

    /// The peer's name: a URI or another name in its certificate, or its user ID.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        match (self.names.first(), self.uid) {
            (Some(name), _) => Some(name.clone()),
            (None, Some(uid)) => Some(format!("uid {uid}")),
            (None, None) => None,
        }
    }

    /// Whether both are the same host, as far as they were authenticated. A renewed certificate may
    /// have other addresses, but must have the same first name.
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
    /// A channel over a connected transport.
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

    /// The peer at the other end.
    #[must_use]
    pub fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    /// The transport that carries the channel.
    #[must_use]
    pub fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    /// A handle that closes the channel from any thread.
    #[must_use]
    pub fn closer(&self) -> ChannelCloser {
        ChannelCloser::new(self.transport.closer())
    }

    /// The two halves, for use in two threads.
    #[must_use]
    pub fn split(self) -> (ChannelReader, ChannelWriter) {
        let peer = self.peer.address;
        let (reader, writer) = self.transport.split();
        (ChannelReader::new(reader, peer.clone()), ChannelWriter { half: writer, peer })
    }
}

/// The receiving half. `Ok(0)` is an end that the peer announced. Over a transport that
/// authenticates its peer, every other end is an error.
///
/// Short reads go through a buffer. Long reads first take the rest of the buffer and then bypass
/// it.
#[derive(Debug)]
pub struct ChannelReader {
    half: Box<dyn Receive>,
    buffer: GuestBytes,
    /// The received part of the buffer that was not read yet.
    unread: Range<usize>,
    peer: String,
}

impl ChannelReader {
    fn new(half: Box<dyn Receive>, peer: String) -> Self {
        let mut buffer = GuestBytes::new();
        buffer.extend_to(half.buffer_bytes());
        Self { half, buffer, unread: 0..0, peer }
    }

    /// A descriptor from which the following bytes can be read directly, if the channel has one and
    /// nothing is buffered. Used to receive into memory that no slice may refer to.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        if self.unread.is_empty() { self.half.descriptor() } else { None }
    }

    /// Offers received bytes to `take` without copying, as [`Receive::read_in_place`] does.
    ///
    /// # Errors
    /// As for a read.
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

    /// Limits the wait for the next bytes; `None` waits without limit.
    ///
    /// # Errors
    /// The operating system's error.
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

/// The sending half. A write starts transmission before it returns. Dropping the half announces the
/// end if that is possible without waiting; [`finish`](Self::finish) waits and reports errors.
/// After any error, including a timeout, a channel that authenticates its peer accepts no more
/// writes.
#[derive(Debug)]
pub struct ChannelWriter {
    half: Box<dyn Transmit>,
    peer: String,
}

impl ChannelWriter {
    /// Limits the wait for a peer that does not receive; `None` waits without limit.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<(), TransportError> {
        self.half
            .set_timeout(timeout)
            .map_err(|source| TransportError::Io { peer: self.peer.clone(), source })
    }

    /// Announces the end to the peer, which reads everything written before and then the end.
    ///
    /// # Errors
    /// The operating system's error. A peer that has already gone is not an error.
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

/// Closes a channel from any thread and wakes the threads that wait on it.
#[derive(Clone, Debug)]
pub struct ChannelCloser(Arc<dyn Close>);

impl ChannelCloser {
    pub(crate) fn new(transport: Arc<dyn Close>) -> Self {
        Self(transport)
    }

    /// Closes both directions at once. Written data may be lost: see [`ChannelWriter::finish`].
    pub fn close(&self) {
        self.0.close();
    }
}
