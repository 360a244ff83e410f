//! The two halves of a channel over a call.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};

use super::failure::Failure;
use super::flow::Flow;
use crate::stream::Stream;
use crate::transport::{Close, Receive, Transmit, Transport};

/// A call that carries a channel.
#[derive(Debug)]
pub struct Call {
    halves: Option<(CallReader, CallWriter)>,
    closer: Arc<Closer>,
}

impl Call {
    /// A call whose tasks serve `flow` over `stream`.
    pub fn new(flow: Arc<Flow>, stream: Arc<Stream>) -> Self {
        let reader = CallReader { flow: Arc::clone(&flow), piece: Bytes::new(), timeout: None };
        let writer = CallWriter { flow: Arc::clone(&flow), timeout: None };
        Self { halves: Some((reader, writer)), closer: Arc::new(Closer { flow, stream }) }
    }
}

#[cfg(test)]
impl Call {
    /// The flow, for tests that misbehave.
    pub fn flow(&self) -> &Flow {
        &self.closer.flow
    }
}

impl Transport for Call {
    fn closer(&self) -> Arc<dyn Close> {
        Arc::clone(&self.closer) as Arc<dyn Close>
    }

    fn split(mut self: Box<Self>) -> (Box<dyn Receive>, Box<dyn Transmit>) {
        let (reader, writer) = self.halves.take().expect("a call is split once");
        (Box::new(reader), Box::new(writer))
    }
}

#[derive(Debug)]
struct Closer {
    flow: Arc<Flow>,
    stream: Arc<Stream>,
}

impl Close for Closer {
    fn close(&self) {
        // The tasks see the closed socket and end. The peer sees a cut link, as with the other
        // transports. An error means that the socket is already closed.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.flow.fail(Failure::Closed);
    }
}

#[derive(Debug)]
struct CallReader {
    flow: Arc<Flow>,
    /// The rest of the piece received last.
    piece: Bytes,
    timeout: Option<Duration>,
}

impl Receive for CallReader {
    fn read_in_place(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> Option<io::Result<usize>> {
        Some(self.offer(take))
    }

    /// Enough for a frame's head. The pages are read in place.
    fn buffer_bytes(&self) -> usize {
        1 << 10
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.timeout = timeout;
        Ok(())
    }
}

impl CallReader {
    fn offer(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize> {
        if self.piece.is_empty() {
            self.piece = self.flow.receive(self.timeout)?;
        }
        let mut taken = 0;
        while !self.piece.is_empty() {
            let length = take(&self.piece).min(self.piece.len());
            self.piece.advance(length);
            taken += length;
            if !self.piece.is_empty() {
                break;
            }
            self.piece = self.flow.receive_now().unwrap_or_default();
        }
        self.flow.note_read(taken, self.piece.is_empty());
        Ok(taken)
    }

    /// Copies available bytes until `into` is full.
    fn take(&mut self, into: &mut [u8]) -> usize {
        let mut filled = 0;
        while filled < into.len() {
            if self.piece.is_empty() {
                match self.flow.receive_now() {
                    Some(piece) => self.piece = piece,
                    None => break,
                }
            }
            let length = self.piece.len().min(into.len() - filled);
            self.piece.copy_to_slice(&mut into[filled..filled + length]);
            filled += length;
        }
        filled
    }
}

impl Read for CallReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(into)])
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if into.iter().all(|slice| slice.is_empty()) {
            return Ok(0);
        }
        if self.piece.is_empty() {
            self.piece = self.flow.receive(self.timeout)?;
        }
        let mut filled = 0;
        for slice in into {
            let taken = self.take(slice);
            filled += taken;
            if taken < slice.len() {
                break;
            }
        }
        self.flow.note_read(filled, self.piece.is_empty());
        Ok(filled)
    }
}

impl Drop for CallReader {
    fn drop(&mut self) {
        self.flow.drop_reader();
    }
}

#[derive(Debug)]
struct CallWriter {
    flow: Arc<Flow>,
    timeout: Option<Duration>,
}

impl Transmit for CallWriter {
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.timeout = timeout;
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.flow.finish(self.timeout)
    }
}

impl Write for CallWriter {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flow.send(from, self.timeout)
    }

    /// Waits until the operating system has accepted the written data. The process may exit after
    /// that.
    fn flush(&mut self) -> io::Result<()> {
        self.flow.flush(self.timeout)
    }
}

impl Drop for CallWriter {
    fn drop(&mut self) {
        self.flow.drop_writer();
    }
}
