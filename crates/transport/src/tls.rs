//! TLS for the two halves of a channel.
//!
//! One rustls connection serves both directions. It is protected by a lock that no thread holds
//! while it waits for the network. The reading half first receives ciphertext into its own buffer.
//! The writing half sends what the network accepts at once, and waits for it without the lock.
//! Records leave the connection in the order in which they were encrypted, because only the holder
//! of the sending lock sends. Lock order: sending, then connection. The reading half never waits
//! for the sending lock: otherwise two peers that wait for their own writers could deadlock.

use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustls::Connection;

use crate::channel::PeerIdentity;
use crate::stream::Stream;
use crate::transport::{Close, Receive, Transmit, Transport};

/// Maximum number of ciphertext bytes per receive call. A frame of 256 KiB takes one or two calls.
const RECEIVE_BYTES: usize = 256 << 10;

/// Size of the read-ahead buffer for a frame's head. The pages are read in place.
const BUFFER_BYTES: usize = 1 << 10;

/// Maximum number of plaintext bytes encrypted and sent at once: three full records. They fit the
/// longest segment of Linux, 64 KiB with headers, so they are sent while they are still in the
/// cache. Measured with `vmferry-bench engine`: smaller and larger sizes are slower.
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
    /// How long to wait while the network accepts nothing.
    timeout: Option<Duration>,
    /// Records were lost or sent in part, so the peer could not decrypt anything that follows.
    torn: bool,
}

/// The peer at `address`, identified by the certificate from the handshake.
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
    /// A session after its handshake.
    pub fn new(stream: Arc<Stream>, connection: Connection) -> Self {
        Self { stream, connection: Mutex::new(connection), sending: Mutex::default() }
    }

    /// The peer at `address`, identified by its certificate.
    pub fn peer(&self, address: String) -> PeerIdentity {
        peer_of(&self.connection.lock(), address)
    }

    /// The socket, for tests that misbehave.
    #[cfg(test)]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Changes the keys, as rustls does by itself after 2^24 records (about 256 GiB).
    #[cfg(test)]
    pub fn change_keys(&self) {
        self.connection.lock().refresh_traffic_keys().unwrap();
    }

    /// Calls `encrypt` to add plaintext or a `close_notify` to the connection, and sends the
    /// resulting records.
    fn send<T>(&self, encrypt: impl FnOnce(&mut Connection) -> io::Result<T>) -> io::Result<T> {
        let mut sending = self.sending.lock();
        sending.check()?;
        let result = encrypt(&mut self.connection.lock())?;
        while !self.send_now(&mut sending)? {
            let writable = self.stream.await_writable(sending.timeout);
            sending.torn = writable.is_err();
            writable?;
        }
        Ok(result)
    }

    /// Sends what the network accepts at once. Returns whether that was everything.
    fn send_now(&self, sending: &mut Sending) -> io::Result<bool> {
        let mut connection = self.connection.lock();
        while connection.wants_write() {
            match connection.write_tls(&mut NonblockingSocket(&self.stream)) {
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

    /// Sends final records, if the network accepts them at once.
    fn send_last(&self, sending: &mut Sending, say: impl FnOnce(&mut Connection)) {
        if sending.check().is_ok() {
            say(&mut self.connection.lock());
            // The next sender sees the error of a lost connection.
            let _ = self.send_now(sending);
        }
    }

    /// Sends `close_notify`, unless it was sent before. Does not wait: a peer must not delay the
    /// drop of a channel.
    fn announce_end(&self) {
        self.send_last(&mut self.sending.lock(), |connection| connection.send_close_notify());
    }

    /// Sends pending records of rustls, such as an alert. If the writing half is sending, its next
    /// records include them.
    fn answer(&self) {
        if let Some(mut sending) = self.sending.try_lock() {
            self.send_last(&mut sending, |_| ());
        }
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

/// A socket that sends only what the network accepts at once.
struct NonblockingSocket<'a>(&'a Stream);

impl Write for NonblockingSocket<'_> {
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
    /// The part of `received` that rustls has not consumed.
    pending: std::ops::Range<usize>,
    /// Why nothing more can be read after the data that is already decrypted.
    failure: Option<rustls::Error>,
}

impl TlsReader {
    fn new(session: Arc<TlsSession>) -> Self {
        let received = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { session, received, pending: 0..0, failure: None }
    }

    /// Decrypts and offers data to `take`, until more ciphertext is needed or `take` leaves some
    /// data. Returns `None` if nothing was available.
    fn decrypt(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<Option<usize>> {
        let mut connection = self.session.connection.lock();
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
                connection = self.session.connection.lock();
            }
            if let Err(error) = processed {
                self.failure = Some(error);
                // The records before the bad one may still hold data.
                self.pending = 0..0;
            }
        }
    }

    /// Offers received data to `take`. Waits if there is none.
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
                // Without `close_notify`, an attacker may have cut the link.
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
        self.session.sending.lock().timeout = timeout;
        Ok(())
    }

    /// Sends `close_notify` and shuts the stream down.
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
            // Sends `close_notify` before the end of the stream.
            self.session.announce_end();
            // An error means that the socket is already closed.
            let _ = self.session.stream.shutdown(Shutdown::Write);
        }
    }
}
