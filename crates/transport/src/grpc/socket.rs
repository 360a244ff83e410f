//! TLS on a socket, for tasks. The handshake is done: [`shake_hands`](crate::handshake) did it in a
//! thread, as for every other transport, and gave the same errors.

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

/// Ciphertext that is received in one call.
const RECEIVE_BYTES: usize = 256 << 10;

/// A TLS session, as hyper reads and writes it.
pub struct TlsSocket {
    socket: TcpStream,
    connection: Connection,
    received: Box<[u8]>,
    /// The part of `received` that rustls has not taken.
    pending: Range<usize>,
    /// Plaintext that was encrypted since the socket last had all of it.
    waiting_bytes: usize,
    /// Why nothing more can be read, once what was decrypted before is handed out.
    failure: Option<rustls::Error>,
    flow: Arc<Flow>,
}

impl TlsSocket {
    /// A session whose handshake is done, on a socket that does not block. `flow` hears when the
    /// system has taken what was written.
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

    /// Sends until nothing is left.
    fn poll_drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut AtOnce(&self.socket)) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.socket.poll_write_ready(context))?;
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        self.waiting_bytes = 0;
        Poll::Ready(Ok(()))
    }

    /// Decrypts what was received, until there is plaintext. False if more must be received.
    fn decrypt(&mut self, context: &mut Context<'_>) -> io::Result<bool> {
        while !self.pending.is_empty() {
            let mut fresh = &self.received[self.pending.clone()];
            self.pending.start += self.connection.read_tls(&mut fresh)?;
            let processed = self.connection.process_new_packets();
            if processed.is_err() || self.connection.wants_write() {
                // An alert, or the answer to a key update. What does not go now goes with the next
                // write.
                let _ = self.poll_drain(context);
            }
            let state = match processed {
                Ok(state) => state,
                Err(error) => {
                    // The records before the bad one may have brought something.
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

/// A socket that is asked for no more than it takes at once.
struct AtOnce<'a>(&'a TcpStream);

impl io::Write for AtOnce<'_> {
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
        self.noted(polled)
    }
}

impl TlsSocket {
    /// HTTP/2 keeps no more of an error than its text, so it is noted here.
    fn noted<T>(&self, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
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
                // Without the peer's closing message somebody may have cut the link.
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
        self.noted(polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.poll_drain(context);
        if let Poll::Ready(Ok(())) = polled {
            self.flow.note_flushed();
        }
        self.noted(polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connection.send_close_notify();
        ready!(self.poll_drain(context))?;
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

impl TlsSocket {
    /// Encrypts a batch; it leaves when it is big, or at the flush.
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
