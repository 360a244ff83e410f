//! A connected, authenticated channel and its two halves.

use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use crate::error::TransportError;
use crate::stream::Stream;
use crate::tls::{TlsReader, TlsSession, TlsWriter};

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
    /// A peer that nothing says who it is.
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
    stream: Arc<Stream>,
    tls: Option<Arc<TlsSession>>,
    peer: PeerIdentity,
}

impl Channel {
    pub(crate) fn new(
        stream: Arc<Stream>,
        tls: Option<Arc<TlsSession>>,
        peer: PeerIdentity,
    ) -> Self {
        Self { stream, tls, peer }
    }

    #[cfg(test)]
    pub(crate) fn session(&self) -> Option<Arc<TlsSession>> {
        self.tls.clone()
    }

    #[cfg(test)]
    pub(crate) fn stream(&self) -> Arc<Stream> {
        Arc::clone(&self.stream)
    }

    /// Who is at the other end.
    #[must_use]
    pub fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    /// Closes the channel from any thread.
    #[must_use]
    pub fn closer(&self) -> ChannelCloser {
        ChannelCloser::new(Arc::clone(&self.stream))
    }

    /// The two halves, for two threads.
    #[must_use]
    pub fn split(self) -> (ChannelReader, ChannelWriter) {
        let reader = ChannelReader {
            stream: Arc::clone(&self.stream),
            tls: self.tls.as_ref().map(|tls| TlsReader::new(Arc::clone(tls))),
            peer: self.peer.address.clone(),
        };
        let writer = ChannelWriter {
            stream: self.stream,
            tls: self.tls.map(TlsWriter::new),
            peer: self.peer.address,
            finished: false,
        };
        (reader, writer)
    }
}

/// The receiving half. `Ok(0)` is the end that the peer has announced; over TLS any other end is
/// an error.
#[derive(Debug)]
pub struct ChannelReader {
    stream: Arc<Stream>,
    tls: Option<TlsReader>,
    peer: String,
}

impl ChannelReader {
    /// Bounds the wait for the next bytes; `None` waits for ever.
    ///
    /// # Errors
    /// The system's.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<(), TransportError> {
        self.stream
            .set_read_timeout(timeout)
            .map_err(|source| TransportError::Io { peer: self.peer.clone(), source })
    }
}

impl Read for ChannelReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.read(into),
            None => (&*self.stream).read(into),
        }
    }
}

/// The sending half. What is written is on its way when the call returns. Dropping it announces
/// the end as far as that is possible without waiting; [`finish`](Self::finish) says whether it
/// was. After an error, a time-out too, a TLS channel takes no more.
#[derive(Debug)]
pub struct ChannelWriter {
    stream: Arc<Stream>,
    tls: Option<TlsWriter>,
    peer: String,
    finished: bool,
}

impl ChannelWriter {
    /// Bounds the wait for a peer that takes nothing; `None` waits for ever.
    ///
    /// # Errors
    /// The system's.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> Result<(), TransportError> {
        self.stream
            .set_write_timeout(timeout)
            .map_err(|source| TransportError::Io { peer: self.peer.clone(), source })
    }

    /// Announces the end to the peer: it reads everything written before, then the end.
    ///
    /// # Errors
    /// The system's; a peer that is gone already is none.
    pub fn finish(&mut self) -> io::Result<()> {
        self.finished = true;
        let announced = match &mut self.tls {
            Some(tls) => tls.finish(),
            None => Ok(()),
        };
        match announced.and_then(|()| self.stream.shutdown(Shutdown::Write)) {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            other => other,
        }
    }
}

impl Drop for ChannelWriter {
    fn drop(&mut self) {
        if !self.finished {
            // The closing message goes before the end of the stream.
            drop(self.tls.take());
            // A channel that is closed already needs nothing.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
    }
}

impl Write for ChannelWriter {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.write_vectored(from),
            None => (&*self.stream).write_vectored(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Closes a channel from any thread: whoever waits on it wakes up.
#[derive(Clone, Debug)]
pub struct ChannelCloser(Arc<Stream>);

impl ChannelCloser {
    pub(crate) fn new(stream: Arc<Stream>) -> Self {
        Self(stream)
    }

    /// Closes both directions at once. What was written may be lost: see
    /// [`ChannelWriter::finish`].
    pub fn close(&self) {
        // A channel that is closed already needs nothing.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}
