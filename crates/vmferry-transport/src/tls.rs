//! TLS under the two halves of a channel.
//!
//! One rustls connection serves both directions and stands behind a lock, which nobody holds
//! while it waits for the network: the reading half receives ciphertext into a buffer of its own
//! first, the writing half encrypts into one and then sends. Records must be sent in the order
//! in which they were encrypted, so whoever encrypts holds the sending buffer's lock until they
//! are out. Lock order: sending buffer, then connection.

use std::io::{self, IoSlice, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::Connection;

use crate::error::TransportError;
use crate::stream::Stream;

/// Ciphertext that is received in one call. A frame of 256 KiB comes in one or two.
const RECEIVE_BYTES: usize = 256 << 10;

/// Plaintext that is encrypted and sent in one go: long enough that the system call does not
/// count, short enough to stay in the second-level cache.
const SEND_BYTES: usize = 256 << 10;

/// A TLS session on a socket.
#[derive(Debug)]
pub struct TlsSession {
    stream: Arc<Stream>,
    connection: Mutex<Connection>,
    /// Ciphertext about to be sent.
    sending: Mutex<Vec<u8>>,
}

impl TlsSession {
    /// Shakes hands within `timeout`, all steps together.
    ///
    /// # Errors
    /// What failed, in the words of [`TransportError`].
    pub fn handshake(
        stream: Arc<Stream>,
        mut connection: Connection,
        peer: &str,
        timeout: Duration,
    ) -> Result<Self, TransportError> {
        let deadline = Instant::now() + timeout;
        connection.set_buffer_limit(None);
        while connection.is_handshaking() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TransportError::TimedOut { peer: peer.into(), what: HANDSHAKE });
            }
            let step = stream
                .set_read_timeout(Some(left))
                .and_then(|()| stream.set_write_timeout(Some(left)))
                .and_then(|()| handshake_step(&stream, &mut connection));
            match step {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(match error.kind() {
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                            TransportError::TimedOut { peer: peer.into(), what: HANDSHAKE }
                        }
                        _ => TransportError::from_io(error, peer),
                    });
                }
            }
        }
        let finished = send_handshake(&stream, &mut connection)
            .and_then(|()| stream.set_read_timeout(None))
            .and_then(|()| stream.set_write_timeout(None));
        finished.map_err(|error| TransportError::from_io(error, peer))?;
        Ok(Self {
            stream,
            connection: Mutex::new(connection),
            sending: Mutex::new(Vec::with_capacity(SEND_BYTES + (8 << 10))),
        })
    }

    /// The names in the peer's certificate.
    pub fn peer_names(&self) -> Vec<String> {
        let connection = self.connection();
        let certificates = connection.peer_certificates().unwrap_or_default();
        certificates.first().map(crate::identity::names_of).unwrap_or_default()
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets `encrypt` put plaintext (or a closing message) into the connection, and sends what
    /// comes of it.
    fn send<T>(&self, encrypt: impl FnOnce(&mut Connection) -> io::Result<T>) -> io::Result<T> {
        let mut sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        sending.clear();
        let result = {
            let mut connection = self.connection();
            let result = encrypt(&mut connection);
            while connection.wants_write() {
                connection.write_tls(&mut *sending)?;
            }
            result
        }?;
        (&*self.stream).write_all(&sending)?;
        Ok(result)
    }
}

const HANDSHAKE: &str = "the TLS handshake";

fn send_handshake(stream: &Stream, connection: &mut Connection) -> io::Result<()> {
    while connection.wants_write() {
        connection.write_tls(&mut &*stream)?;
    }
    Ok(())
}

fn handshake_step(stream: &Stream, connection: &mut Connection) -> io::Result<()> {
    send_handshake(stream, connection)?;
    if !connection.is_handshaking() {
        return Ok(());
    }
    if connection.read_tls(&mut &*stream)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if let Err(error) = connection.process_new_packets() {
        // The alert tells the peer what we think of its certificate.
        let _ = send_handshake(stream, connection);
        return Err(io::Error::other(error));
    }
    Ok(())
}

/// The reading half.
#[derive(Debug)]
pub struct TlsReader {
    session: Arc<TlsSession>,
    received: Box<[u8]>,
    /// The part of `received` that rustls has not taken.
    pending: std::ops::Range<usize>,
    ended: bool,
}

impl TlsReader {
    pub fn new(session: Arc<TlsSession>) -> Self {
        let received = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { session, received, pending: 0..0, ended: false }
    }

    /// Decrypts what is here, until `into` is full or more ciphertext is needed.
    fn decrypt(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut connection = self.session.connection();
        let mut filled = 0;
        loop {
            match connection.reader().read(&mut into[filled..]) {
                // The peer has announced its end.
                Ok(0) if filled < into.len() => {
                    self.ended = true;
                    break;
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if filled == into.len() || self.pending.is_empty() {
                break;
            }
            let mut ciphertext = &self.received[self.pending.clone()];
            let taken = connection.read_tls(&mut ciphertext)?;
            self.pending.start += taken;
            let processed = connection.process_new_packets();
            let answer = connection.wants_write();
            if processed.is_err() || answer {
                drop(connection);
                // An alert, or the answer to a key update.
                let sent = self.session.send(|_| Ok(()));
                processed.map_err(io::Error::other)?;
                sent?;
                connection = self.session.connection();
            }
        }
        Ok(filled)
    }
}

impl Read for TlsReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            let filled = self.decrypt(into)?;
            if filled > 0 || self.ended {
                return Ok(filled);
            }
            let received = (&*self.session.stream).read(&mut self.received)?;
            if received == 0 {
                // Without the peer's closing message somebody may have cut the link.
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.pending = 0..received;
        }
    }
}

/// The writing half.
#[derive(Debug)]
pub struct TlsWriter {
    session: Arc<TlsSession>,
}

impl TlsWriter {
    pub fn new(session: Arc<TlsSession>) -> Self {
        Self { session }
    }

    /// Encrypts and sends up to [`SEND_BYTES`] of the slices.
    pub fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.session.send(|connection| {
            let mut taken = 0;
            for slice in from {
                let part = &slice[..slice.len().min(SEND_BYTES - taken)];
                connection.writer().write_all(part)?;
                taken += part.len();
                if taken == SEND_BYTES {
                    break;
                }
            }
            Ok(taken)
        })
    }

    /// Sends the closing message.
    pub fn finish(&mut self) -> io::Result<()> {
        self.session.send(|connection| {
            connection.send_close_notify();
            Ok(())
        })
    }
}
