//! TLS under the two halves of a channel.
//!
//! One rustls connection serves both directions and stands behind a lock, which nobody holds
//! while it waits for the network: the reading half receives ciphertext into a buffer of its own
//! first, the writing half encrypts into one and then sends. Records must be sent in the order
//! in which they were encrypted, so whoever encrypts holds the sending buffer's lock until they
//! are out. Lock order: sending buffer, then connection. The reading half never waits for the
//! sending buffer: two peers that wait for their own writers would wait for each other.

use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use rustls::Connection;

use crate::channel::PeerIdentity;
use crate::stream::Stream;
use crate::transport::{Close, Receive, Transmit, Transport};

/// Ciphertext that is received in one call. A frame of 256 KiB comes in one or two.
const RECEIVE_BYTES: usize = 256 << 10;

/// Plaintext that is encrypted and sent in one go: long enough that the system call does not
/// count, short enough to stay in the second-level cache.
const SEND_BYTES: usize = 256 << 10;

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

#[derive(Debug)]
struct Sending {
    /// Records about to be sent; between calls, what the network did not take of the last words.
    ciphertext: Vec<u8>,
    /// Records were lost, or sent in part: nothing that follows would make sense to the peer.
    torn: bool,
}

/// The peer at this address, by the certificate that it has shown in the handshake.
pub fn peer_of(connection: &Connection, address: String) -> PeerIdentity {
    let certificates = connection.peer_certificates().unwrap_or_default();
    let names = certificates.first().map(crate::identity::names_of).unwrap_or_default();
    let group = connection.negotiated_key_exchange_group();
    let key_exchange = group.map(|group| format!("{:?}", group.name()));
    PeerIdentity::authenticated(address, names, key_exchange)
}

impl TlsSession {
    /// A session whose handshake is done.
    pub fn new(stream: Arc<Stream>, connection: Connection) -> Self {
        let ciphertext = Vec::with_capacity(SEND_BYTES + (8 << 10));
        let sending = Mutex::new(Sending { ciphertext, torn: false });
        Self { stream, connection: Mutex::new(connection), sending }
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

    /// Lets `encrypt` put plaintext (or a closing message) into the connection, and sends what
    /// comes of it.
    fn send<T>(&self, encrypt: impl FnOnce(&mut Connection) -> io::Result<T>) -> io::Result<T> {
        let mut sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let result = self.encrypt(&mut sending, encrypt)?;
        let sent = (&*self.stream).write_all(&sending.ciphertext);
        sending.torn = sent.is_err();
        sending.ciphertext.clear();
        sent.map(|()| result)
    }

    /// Sends the last words if the network takes them at once.
    fn send_last(&self, sending: &mut Sending, say: impl FnOnce(&mut Connection)) {
        let said = self.encrypt(sending, |connection| {
            say(connection);
            Ok(())
        });
        if said.is_err() || sending.ciphertext.is_empty() {
            return;
        }
        match self.stream.send_now(&sending.ciphertext) {
            Ok(sent) => drop(sending.ciphertext.drain(..sent)),
            Err(error) => sending.torn = error.kind() != io::ErrorKind::WouldBlock,
        }
    }

    /// Says that nothing follows, unless that was said before. Does not wait: whoever drops a
    /// channel must not be held up by its peer.
    fn announce_end(&self) {
        let mut sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        self.send_last(&mut sending, |connection| connection.send_close_notify());
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

    fn encrypt<T>(
        &self,
        sending: &mut Sending,
        encrypt: impl FnOnce(&mut Connection) -> io::Result<T>,
    ) -> io::Result<T> {
        if sending.torn {
            let text = "an earlier write failed in the middle of a TLS record";
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, text));
        }
        let mut connection = self.connection();
        let result = encrypt(&mut connection)?;
        while connection.wants_write() {
            connection.write_tls(&mut sending.ciphertext)?;
        }
        Ok(result)
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
    ended: bool,
    /// Why nothing more can be read, once what was decrypted before is handed out.
    failure: Option<rustls::Error>,
}

impl TlsReader {
    fn new(session: Arc<TlsSession>) -> Self {
        let received = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { session, received, pending: 0..0, ended: false, failure: None }
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
        Ok(filled)
    }
}

impl Receive for TlsReader {
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.session.stream.set_read_timeout(timeout)
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

/// The writing half.
#[derive(Debug)]
struct TlsWriter {
    session: Arc<TlsSession>,
    finished: bool,
}

impl Transmit for TlsWriter {
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.session.stream.set_write_timeout(timeout)
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
