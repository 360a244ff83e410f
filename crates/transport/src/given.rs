//! Connected sockets from the caller, in place of an address.
//!
//! The process that starts vmferry connects both ends in its own way and passes the descriptors on.
//! This crate has no unsafe code, so it turns a descriptor number into an owned descriptor with
//! `pidfd_getfd`, which duplicates one of the process's own descriptors. Both descriptors refer to
//! the same connection, and closing a channel shuts the connection down for both.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketType, getpeername, recv, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::error::TransportError;
use crate::stream::Stream;

/// Connected sockets, used in order. Clones share them.
#[derive(Clone)]
pub struct GivenSockets(Arc<Mutex<VecDeque<GivenSocket>>>);

/// A socket with the number under which it was given.
enum GivenSocket {
    /// Not opened yet.
    Number(RawFd),
    Socket(RawFd, Stream),
}

impl fmt::Debug for GivenSockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = self.0.lock().iter().map(GivenSocket::number).collect::<Vec<_>>();
        f.debug_tuple("GivenSockets").field(&numbers).finish()
    }
}

impl GivenSocket {
    fn number(&self) -> RawFd {
        match self {
            Self::Number(number) | Self::Socket(number, _) => *number,
        }
    }
}

impl GivenSockets {
    /// Sockets by their numbers in this process. They are opened on first use.
    pub fn numbered(numbers: &[RawFd]) -> Self {
        Self(Arc::new(Mutex::new(numbers.iter().copied().map(GivenSocket::Number).collect())))
    }

    /// Sockets owned by the caller.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`] if one is not a connected stream socket.
    pub fn owned(sockets: impl IntoIterator<Item = OwnedFd>) -> Result<Self, TransportError> {
        let sockets = sockets.into_iter().map(|socket| {
            let number = socket.as_raw_fd();
            Ok(GivenSocket::Socket(number, checked(number, socket)?))
        });
        Ok(Self(Arc::new(Mutex::new(sockets.collect::<Result<_, _>>()?))))
    }

    /// The sockets' numbers.
    pub fn numbers(&self) -> Vec<RawFd> {
        self.0.lock().iter().map(GivenSocket::number).collect()
    }

    /// Opens and checks all sockets.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`] if one is not a connected stream socket.
    pub fn open(&self) -> Result<(), TransportError> {
        for given in &mut *self.0.lock() {
            if let GivenSocket::Number(number) = *given {
                *given = GivenSocket::Socket(number, checked(number, duplicate(number)?)?);
            }
        }
        Ok(())
    }

    /// Takes the next socket; `None` if all were used.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn next(&self) -> Result<Option<(RawFd, Stream)>, TransportError> {
        self.open()?;
        Ok(self.0.lock().pop_front().and_then(|given| match given {
            GivenSocket::Socket(number, stream) => Some((number, stream)),
            GivenSocket::Number(_) => None,
        }))
    }

    /// Waits until a peer has sent data on one of the sockets, and takes that socket. Sockets that
    /// their peers have closed are dropped. Returns `None` when `closed` is readable.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn next_speaking(&self, closed: impl AsFd) -> io::Result<Option<(RawFd, Stream)>> {
        let mut sockets = self.0.lock();
        loop {
            let mut ready = vec![PollFd::new(&closed, PollFlags::IN)];
            ready.extend(sockets.iter().filter_map(|given| match given {
                GivenSocket::Socket(_, stream) => {
                    Some(PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN))
                }
                GivenSocket::Number(_) => None,
            }));
            match poll(&mut ready, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
            if !ready[0].revents().is_empty() {
                return Ok(None);
            }
            let Some(index) = ready[1..].iter().position(|socket| !socket.revents().is_empty())
            else {
                continue;
            };
            drop(ready);
            if let Some(GivenSocket::Socket(number, stream)) = sockets.remove(index)
                && has_bytes(&stream)
            {
                return Ok(Some((number, stream)));
            }
        }
    }
}

/// Whether data can be read, and not only the end.
fn has_bytes(stream: &Stream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(recv(stream, &mut [0; 1][..], flags), Ok((1.., _)))
}

fn duplicate(number: RawFd) -> Result<OwnedFd, TransportError> {
    let failed = |errno: Errno| TransportError::Descriptor {
        number,
        problem: if errno == Errno::BADF { "is not open" } else { "can't be duplicated" },
        source: Some(errno.into()),
    };
    let ourselves = pidfd_open(getpid(), PidfdFlags::empty()).map_err(failed)?;
    pidfd_getfd(ourselves, number, PidfdGetfdFlags::empty()).map_err(failed)
}

/// Duplicates one of this process's descriptors, if it is a connected stream socket. The duplicate
/// can be passed to a [`Dialer`](crate::Dialer), a [`Listener`](crate::Listener) or another
/// process.
///
/// # Errors
/// [`TransportError::Descriptor`].
pub fn connected_socket(number: RawFd) -> Result<OwnedFd, TransportError> {
    let descriptor = duplicate(number)?;
    check(number, &descriptor)?;
    Ok(descriptor)
}

/// The descriptor as a stream, if it is a connected stream socket.
///
/// # Errors
/// [`TransportError::Descriptor`].
pub(crate) fn connected(descriptor: OwnedFd) -> Result<Stream, TransportError> {
    checked(descriptor.as_raw_fd(), descriptor)
}

fn checked(number: RawFd, descriptor: OwnedFd) -> Result<Stream, TransportError> {
    let family = check(number, &descriptor)?;
    let unusable = |error| TransportError::Descriptor {
        number,
        problem: "can't be used",
        source: Some(error),
    };
    // `UnixStream` works for stream sockets of all other families.
    if matches!(family, AddressFamily::INET | AddressFamily::INET6) {
        return Stream::of_tcp(TcpStream::from(descriptor)).map_err(unusable);
    }
    let stream = UnixStream::from(descriptor);
    stream.set_nonblocking(false).map_err(unusable)?;
    Ok(Stream::Unix(stream))
}

/// Checks that the descriptor is a connected stream socket. Returns its family.
fn check(number: RawFd, descriptor: &OwnedFd) -> Result<AddressFamily, TransportError> {
    let refused = |problem, source| TransportError::Descriptor { number, problem, source };
    let failed = |errno: Errno| match errno {
        Errno::NOTSOCK => refused("is not a socket", None),
        Errno::NOTCONN => refused("is not connected", None),
        errno => refused("can't be used", Some(errno.into())),
    };
    if sockopt::socket_type(descriptor).map_err(failed)? != SocketType::STREAM {
        return Err(refused("is not a stream socket", None));
    }
    getpeername(descriptor).map_err(failed)?;
    sockopt::socket_domain(descriptor).map_err(failed)
}
