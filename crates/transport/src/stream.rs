//! A connected TCP or Unix socket.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use socket2::{SockRef, TcpKeepalive};

/// Limit of unsent bytes in a TCP socket. With more, the bytes would leave the caches before they
/// are sent. It does not limit the bytes in flight, so a long link is still filled. Measured with
/// `vmferry-bench socket`.
const UNSENT_BYTES: u32 = 256 << 10;

/// How long nothing may arrive before the kernel asks whether the peer is there, and how often it
/// asks. A channel on which nothing is sent would otherwise never notice that a firewall has
/// forgotten it, and a lane on which a guest requests pages is idle for as long as it needs none.
/// Without an answer the channel is lost after 20 s.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(5), Duration::from_secs(3), 5);

/// A TCP or Unix stream. Reading and writing need only a shared reference.
#[derive(Debug)]
pub enum Stream {
    /// TCP.
    Tcp(TcpStream),
    /// Unix.
    Unix(UnixStream),
}

impl Stream {
    /// A connected TCP stream, configured for frames: blocking, without Nagle's algorithm, with a
    /// limit of unsent bytes, and with keepalive.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn of_tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        socket.set_tcp_notsent_lowat(UNSENT_BYTES)?;
        let (time, interval, retries) = KEEPALIVE;
        let keepalive = TcpKeepalive::new().with_time(time).with_interval(interval);
        socket.set_tcp_keepalive(&keepalive.with_retries(retries))?;
        Ok(Self::Tcp(stream))
    }

    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
            Self::Unix(stream) => stream.set_read_timeout(timeout),
        }
    }

    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_write_timeout(timeout),
            Self::Unix(stream) => stream.set_write_timeout(timeout),
        }
    }

    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        }
    }

    /// Sends as much as the system accepts without blocking.
    ///
    /// # Errors
    /// The operating system's error; [`WouldBlock`](io::ErrorKind::WouldBlock) if it accepts
    /// nothing.
    pub fn send_now(&self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(sendmsg(self, from, &mut SendAncillaryBuffer::default(), flags)?)
    }

    /// Waits until the socket is writable. A closed connection counts as writable: the next send
    /// returns its error.
    ///
    /// # Errors
    /// [`TimedOut`](io::ErrorKind::TimedOut), or the operating system's error.
    pub fn await_writable(&self, timeout: Option<Duration>) -> io::Result<()> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            let left = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(self, PollFlags::OUT)], left.as_ref()) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The peer's address, for people.
    pub fn peer_name(&self) -> String {
        match self {
            Self::Tcp(stream) => {
                stream.peer_addr().map_or_else(|_| "the peer".into(), |address| address.to_string())
            }
            Self::Unix(_) => "the peer on the Unix socket".into(),
        }
    }
}

impl Stream {
    /// The user ID of the process at the other end of a Unix socket.
    pub fn peer_uid(&self) -> Option<u32> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(stream) => {
                let credentials = rustix::net::sockopt::socket_peercred(stream).ok()?;
                Some(credentials.uid.as_raw())
            }
        }
    }

    /// The IP address of the other end of a TCP connection.
    pub fn peer_ip(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(stream) => stream.peer_addr().ok().map(|address| address.ip().to_canonical()),
            Self::Unix(_) => None,
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for &Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read(into),
            Stream::Unix(stream) => (&mut &*stream).read(into),
        }
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read_vectored(into),
            Stream::Unix(stream) => (&mut &*stream).read_vectored(into),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).write(from),
            Stream::Unix(stream) => (&mut &*stream).write(from),
        }
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).write_vectored(from),
            Stream::Unix(stream) => (&mut &*stream).write_vectored(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
