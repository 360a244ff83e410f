//! A bare socket: neither encrypted nor authenticated.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::stream::Stream;
use crate::transport::{Close, Receive, Transmit, Transport};

/// Size of the read-ahead buffer: enough for a frame's head in one call, and so small that hardly
/// any page bytes are copied twice.
const BUFFER_BYTES: usize = 1 << 10;

/// Maximum number of bytes per send call. It fits the longest segment of Linux, 64 KiB with
/// headers, so the bytes are sent while they are still in the cache. Measured with `vmferry-bench
/// engine`: larger calls fill the queue first and are slower.
const SEND_BYTES: usize = 60 << 10;

/// Maximum number of slices per send call.
const SLICES: usize = 16;

/// A connection over a bare socket.
#[derive(Debug)]
pub struct Plain(pub Arc<Stream>);

impl Transport for Plain {
    fn closer(&self) -> Arc<dyn Close> {
        Arc::clone(&self.0) as Arc<dyn Close>
    }

    fn split(self: Box<Self>) -> (Box<dyn Receive>, Box<dyn Transmit>) {
        let reader = PlainReader(Arc::clone(&self.0));
        (Box::new(reader), Box::new(PlainWriter(self.0)))
    }
}

impl Close for Stream {
    fn close(&self) {
        // An error means that the socket is already closed.
        let _ = self.shutdown(Shutdown::Both);
    }
}

#[derive(Debug)]
struct PlainReader(Arc<Stream>);

impl Receive for PlainReader {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn buffer_bytes(&self) -> usize {
        BUFFER_BYTES
    }

    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(timeout)
    }
}

impl Read for PlainReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self.0).read(into)
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&*self.0).read_vectored(into)
    }
}

#[derive(Debug)]
struct PlainWriter(Arc<Stream>);

impl Transmit for PlainWriter {
    fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.set_write_timeout(timeout)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.0.shutdown(Shutdown::Write)
    }
}

impl Write for PlainWriter {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        (&*self.0).write(&from[..from.len().min(SEND_BYTES)])
    }

    /// Sends up to [`SEND_BYTES`] of the slices.
    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let (mut used, mut left) = (0, SEND_BYTES);
        for (slice, from) in slices.iter_mut().zip(from) {
            *slice = IoSlice::new(&from[..from.len().min(left)]);
            left -= slice.len();
            used += 1;
            if left == 0 {
                break;
            }
        }
        (&*self.0).write_vectored(&slices[..used])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for PlainWriter {
    fn drop(&mut self) {
        // An error means that the socket is already closed.
        let _ = self.finish();
    }
}
