//! TLS on a socket, for tasks. [`shake_hands`](crate::handshake) has done the handshake in a
//! thread, as for every other transport, with the same errors.

use std::io::{self, BufRead, IoSlice, Write as _};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use rustls::Connection;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::failure::Failure;
use super::flow::Flow;
use crate::tls::SEND_BYTES;

/// Maximum ciphertext per receive call.
const RECEIVE_BYTES: usize = 256 << 10;

/// A TLS session that hyper reads and writes.
pub struct TlsSocket {
    socket: TcpStream,
    connection: Connection,
    received: Box<[u8]>,
    /// The part of `received` that rustls has not consumed.
    pending: Range<usize>,
    /// Plaintext encrypted since the socket last accepted everything.
    waiting_bytes: usize,
    /// Why nothing more can be read after the data that is already decrypted.
    failure: Option<rustls::Error>,
    flow: Arc<Flow>,
}

impl TlsSocket {
    /// An established session on a nonblocking socket. Tells `flow` when the operating system has
    /// accepted all written data.
    pub fn new(socket: TcpStream, connection: Connection, flow: Arc<Flow>) -> Self {
        Self {
            socket,
            connection,
            received: vec![0; RECEIVE_BYTES].into(),
            pending: 0..0,
            waiting_bytes: 0,
            failure: None,
            flow,
        }
    }

    /// Sends until no records are left.
    fn poll_drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut NonblockingSocket(&self.socket)) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.socket.poll_write_ready(context))?;
                }
                Err(error) => return Poll::Ready(Err(self.reason(error))),
            }
        }
        self.waiting_bytes = 0;
        Poll::Ready(Ok(()))
    }

    /// Why a write has failed: what the peer said before it closed the connection, if it said
    /// anything. Its alert may have arrived and not have been read yet.
    fn reason(&mut self, error: io::Error) -> io::Error {
        loop {
            while !self.pending.is_empty() {
                let mut fresh = &self.received[self.pending.clone()];
                match self.connection.read_tls(&mut fresh) {
                    Ok(length) if length > 0 => self.pending.start += length,
                    // Its plaintext has to be read before.
                    _ => return error,
                }
                if let Err(reason) = self.connection.process_new_packets() {
                    self.failure = Some(reason.clone());
                    self.pending = 0..0;
                    return io::Error::other(reason);
                }
            }
            match self.socket.try_read(&mut self.received) {
                Ok(length) if length > 0 => self.pending = 0..length,
                _ => return error,
            }
        }
    }

    /// Decrypts received data until there is plaintext. Returns `false` if more must be received.
    fn decrypt(&mut self, context: &mut Context<'_>) -> io::Result<bool> {
        while !self.pending.is_empty() {
            let mut fresh = &self.received[self.pending.clone()];
            self.pending.start += self.connection.read_tls(&mut fresh)?;
            let processed = self.connection.process_new_packets();
            if processed.is_err() || self.connection.wants_write() {
                // An alert, or the answer to a key update. The next write sends the rest.
                let _ = self.poll_drain(context);
            }
            let state = match processed {
                Ok(state) => state,
                Err(error) => {
                    // The records before the bad one may hold data.
                    self.failure = Some(error);
                    self.pending = 0..0;
                    return Ok(true);
                }
            };
            if state.plaintext_bytes_to_read() > 0 || state.peer_has_closed() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// A socket that sends only what the operating system accepts at once.
struct NonblockingSocket<'a>(&'a TcpStream);

impl io::Write for NonblockingSocket<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.0.try_write(from)
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for TlsSocket {
    fn drop(&mut self) {
        self.flow.lose(Failure::Ended);
    }
}

impl Read for TlsSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = self.poll_decrypted(context, into);
        self.record_error(polled)
    }
}

impl TlsSocket {
    /// Records an error in the flow, because HTTP/2 keeps only its text.
    fn record_error<T>(&self, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if let Poll::Ready(Err(error)) = &polled {
            self.flow.lose(Failure::of_socket(error));
        }
        polled
    }

    fn poll_decrypted(
        &mut self,
        context: &mut Context<'_>,
        mut into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut filled = 0;
        while into.remaining() > 0 {
            match self.connection.reader().fill_buf() {
                Ok(plaintext) if !plaintext.is_empty() => {
                    let length = plaintext.len().min(into.remaining());
                    into.put_slice(&plaintext[..length]);
                    self.connection.reader().consume(length);
                    filled += length;
                    continue;
                }
                // The peer has announced its end.
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
            if self.failure.is_none() && self.decrypt(context)? {
                continue;
            }
            if filled > 0 {
                break;
            }
            if let Some(failure) = &self.failure {
                return Poll::Ready(Err(io::Error::other(failure.clone())));
            }
            let mut fresh = ReadBuf::new(&mut self.received);
            ready!(Pin::new(&mut self.socket).poll_read(context, &mut fresh))?;
            let length = fresh.filled().len();
            if length == 0 {
                // Without `close_notify`, an attacker may have cut the link.
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
            self.pending = 0..length;
        }
        Poll::Ready(Ok(()))
    }
}

impl Write for TlsSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(from)])
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = self.poll_encrypt(context, from);
        self.record_error(polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.poll_drain(context);
        if let Poll::Ready(Ok(())) = polled {
            self.flow.note_flushed();
        }
        self.record_error(polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connection.send_close_notify();
        ready!(self.poll_drain(context))?;
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

impl TlsSocket {
    /// Encrypts a batch. It is sent when it is large enough, or at the next flush.
    fn poll_encrypt(
        &mut self,
        context: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.waiting_bytes >= SEND_BYTES {
            ready!(self.poll_drain(context))?;
        }
        self.flow.note_unflushed();
        let mut taken = 0;
        for slice in from {
            let part = &slice[..slice.len().min(SEND_BYTES - taken)];
            self.connection.writer().write_all(part)?;
            taken += part.len();
        }
        self.waiting_bytes += taken;
        if self.waiting_bytes >= SEND_BYTES
            && let Poll::Ready(Err(error)) = self.poll_drain(context)
        {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(taken))
    }
}
