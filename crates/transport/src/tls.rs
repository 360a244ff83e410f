//! TLS under the two halves of a channel.
//!
//! One rustls connection serves both directions and stands behind a lock, which nobody holds
//! while it waits for the network: the reading half receives ciphertext into a buffer of its own
//! first, the writing half sends what the network takes at once, and waits for it without the lock. Records
//! leave the connection in the order in which they were encrypted, by whoever has the lock for sending. Lock order:
//! sending, then connection. The reading half never waits for the lock for sending: two peers that wait for their own
//! writers would wait for each other.

use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::Shutdown;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use rustls::Connection;

use crate::channel::PeerIdentity;
use crate::stream::Stream;
use crate::transport::{Close, Receive, Transmit, Transport};

/// Ciphertext that is received in one call. A frame of 256 KiB comes in one or two.
const RECEIVE_BYTES: usize = 256 << 10;

/// What is decrypted ahead of a frame's head: its pages are read in place.
const BUFFER_BYTES: usize = 1 << 10;

/// Plaintext that is encrypted and sent in one go: three full records, which fit into the longest segment that Linux
/// makes, 64 KiB with its headers, and are on their way while they are in the cache. `vmferry-bench engine`, two and four
/// channels: in place of 256 KiB this is 10 and 20 % faster; 16, 32, 60, 64, 96 and 128 KiB are slower.
pub const SEND_BYTES: usize = 48 << 10;

/// A connection over TLS.
#[derive(Debug)]
pub struct Tls(pub Arc<TlsSession>);

impl Transport for Tls {
    fn closer(&self) -> Arc<dyn Close> {
        Arc::clone(&self.0.stream) as Arc<dyn Close>
    }

    fn split(self: Box<Self>) -> (Box<dyn Receive>, Box<dyn Transmit>) {
        let reader = TlsReader::new(Arc::clone(&self.0));
        (Box::new(reader), Box::new(TlsWriter { session: self.0, finished: false }))
    }
}

/// A TLS session on a socket.
#[derive(Debug)]
pub struct TlsSession {
    stream: Arc<Stream>,
    connection: Mutex<Connection>,
    sending: Mutex<Sending>,
}

#[derive(Debug, Default)]
struct Sending {
    /// How long the network may take nothing.
    timeout: Option<Duration>,
    /// Records were lost, or sent in part: nothing that follows would make sense to the peer.
    torn: bool,
}

/// The peer at this address, by the certificate that it has shown in the handshake.
pub fn peer_of(connection: &Connection, address: String) -> PeerIdentity {
    let certificates = connection.peer_certificates().unwrap_or_default();
    let names = certificates
        .first()
        .map(|certificate| crate::identity::names_or_key_of(certificate))
        .unwrap_or_default();
    let group = connection.negotiated_key_exchange_group();
    let key_exchange = group.map(|group| format!("{:?}", group.name()));
    PeerIdentity::authenticated(address, names, key_exchange)
}

impl TlsSession {
    /// A session whose handshake is done.
    pub fn new(stream: Arc<Stream>, connection: Connection) -> Self {
        Self { stream, connection: Mutex::new(connection), sending: Mutex::default() }
    }

    /// The peer at this address, by its certificate.
    pub fn peer(&self, address: String) -> PeerIdentity {
        peer_of(&self.connection(), address)
    }

    /// The socket, for what a peer should not do.
    #[cfg(test)]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// What rustls does by itself after 2^24 records, some 256 GiB.
    #[cfg(test)]
    pub fn change_keys(&self) {
        self.connection().refresh_traffic_keys().unwrap();
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sending(&self) -> MutexGuard<'_, Sending> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets `encrypt` put plaintext (or a closing message) into the connection, and sends what
    /// comes of it.
    fn send<T>(&self, encrypt: impl FnOnce(&mut Connection) -> io::Result<T>) -> io::Result<T> {
        let mut sending = self.sending();
        sending.check()?;
        let result = encrypt(&mut self.connection())?;
        while !self.send_now(&mut sending)? {
            let writable = self.stream.await_writable(sending.timeout);
            sending.torn = writable.is_err();
            writable?;
        }
        Ok(result)
    }

    /// Sends what the network takes at once; whether that is all.
    fn send_now(&self, sending: &mut Sending) -> io::Result<bool> {
        let mut connection = self.connection();
        while connection.wants_write() {
            match connection.write_tls(&mut AtOnce(&self.stream)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    sending.torn = true;
                    return Err(error);
                }
            }
        }
        Ok(true)
    }

    /// Sends the last words if the network takes them at once.
    fn send_last(&self, sending: &mut Sending, say: impl FnOnce(&mut Connection)) {
        if sending.check().is_ok() {
            say(&mut self.connection());
            // Whoever sends next learns of a connection that is gone.
            let _ = self.send_now(sending);
        }
    }

    /// Says that nothing follows, unless that was said before. Does not wait: whoever drops a
    /// channel must not be held up by its peer.
    fn announce_end(&self) {
        self.send_last(&mut self.sending(), |connection| connection.send_close_notify());
    }

    /// Sends what rustls wants to say to the peer, such as an alert. If the writing half is at
    /// work its next records take it along.
    fn answer(&self) {
        let mut sending = match self.sending.try_lock() {
            Ok(sending) => sending,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        self.send_last(&mut sending, |_| ());
    }
}

impl Sending {
    fn check(&self) -> io::Result<()> {
        if self.torn {
            let text = "an earlier write failed in the middle of a TLS record";
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, text));
        }
        Ok(())
    }
}

/// A socket that is asked for no more than it takes at once.
struct AtOnce<'a>(&'a Stream);

impl Write for AtOnce<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.0.send_now(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.send_now(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for TlsSession {
    fn drop(&mut self) {
        self.announce_end();
    }
}

/// The reading half.
#[derive(Debug)]
struct TlsReader {
    session: Arc<TlsSession>,
    received: Box<[u8]>,
    /// The part of `received` that rustls has not taken.
    pending: std::ops::Range<usize>,
    /// Why nothing more can be read, once what was decrypted before is handed out.
    failure: Option<rustls::Error>,
}

impl TlsReader {
    fn new(session: Arc<TlsSession>) -> Self {
        let received = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { session, received, pending: 0..0, failure: None }
    }

    /// Offers what is here to `take`, decrypting, until more ciphertext is needed or `take` leaves something. `None` if
    /// nothing is here.
    fn decrypt(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<Option<usize>> {
        let mut connection = self.session.connection();
        let mut taken = 0;
        loop {
            let mut plaintext = connection.reader();
            match plaintext.fill_buf() {
                // The peer has announced its end.
                Ok([]) => {
                    return Ok(Some(taken));
                }
                Ok(piece) => {
                    let length = take(piece).min(piece.len());
                    let left = piece.len() - length;
                    plaintext.consume(length);
                    taken += length;
                    if left > 0 {
                        return Ok(Some(taken));
                    }
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if self.pending.is_empty() {
                return Ok((taken > 0).then_some(taken));
            }
            let mut ciphertext = &self.received[self.pending.clone()];
            self.pending.start += connection.read_tls(&mut ciphertext)?;
            let processed = connection.process_new_packets();
            if processed.is_err() || connection.wants_write() {
                drop(connection);
                // An alert, or the answer to a key update.
                self.session.answer();
                connection = self.session.connection();
            }
            if let Err(error) = processed {
                self.failure = Some(error);
                // The records before the bad one may have brought more.
                self.pending = 0..0;
            }
        }
    }

    /// Offers what has come to `take`, waiting if nothing has.
    fn offer(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize> {
        loop {
            if let Some(taken) = self.decrypt(take)? {
                return Ok(taken);
            }
            if let Some(failure) = &self.failure {
                return Err(io::Error::other(failure.clone()));
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

impl Receive for TlsReader {
    fn read_in_place(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> Option<io::Result<usize>> {
        Some(self.offer(take))
    }

    fn buffer_bytes(&self) -> usize {
        BUFFER_BYTES
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.session.stream.set_read_timeout(timeout)
    }
}

impl Read for TlsReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        let mut filled = 0;
        self.offer(&mut |piece| {
            let length = piece.len().min(into.len() - filled);
            into[filled..filled + length].copy_from_slice(&piece[..length]);
            filled += length;
            length
        })
    }
}

/// The writing half.
#[derive(Debug)]
struct TlsWriter {
    session: Arc<TlsSession>,
    finished: bool,
}

impl Transmit for TlsWriter {
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.session.sending().timeout = timeout;
        Ok(())
    }

    /// Sends the closing message, then ends the stream.
    fn finish(&mut self) -> io::Result<()> {
        self.finished = true;
        self.session.send(|connection| {
            connection.send_close_notify();
            Ok(())
        })?;
        self.session.stream.shutdown(Shutdown::Write)
    }
}

impl Write for TlsWriter {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    /// Encrypts and sends up to [`SEND_BYTES`] of the slices.
    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
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

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for TlsWriter {
    fn drop(&mut self) {
        if !self.finished {
            // The closing message goes before the end of the stream.
            self.session.announce_end();
            // The end of a socket that is closed already needs no announcement.
            let _ = self.session.stream.shutdown(Shutdown::Write);
        }
    }
}
