//! Connected sockets that the caller gives, instead of an address to connect to.
//!
//! A process that starts vmferry connects both ends by whatever means it has, and hands the
//! descriptors down. This crate has no unsafe code, so a number becomes a descriptor by asking the
//! kernel for a duplicate of one of our own: `pidfd_getfd`. Both name the same connection, and
//! closing a channel ends it for both.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketType, getpeername, recv, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

use crate::error::TransportError;
use crate::stream::Stream;

/// Connected sockets, used in order; clones share them.
#[derive(Clone)]
pub struct GivenSockets(Arc<Mutex<VecDeque<Given>>>);

/// A socket by the number that it was given under.
enum Given {
    /// Not looked at yet.
    Number(RawFd),
    Socket(RawFd, Stream),
}

impl fmt::Debug for GivenSockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = self.lock().iter().map(Given::number).collect::<Vec<_>>();
        f.debug_tuple("GivenSockets").field(&numbers).finish()
    }
}

impl Given {
    fn number(&self) -> RawFd {
        match self {
            Self::Number(number) | Self::Socket(number, _) => *number,
        }
    }
}

impl GivenSockets {
    /// Sockets by their numbers in this process, looked at when they are first needed.
    pub fn numbered(numbers: &[RawFd]) -> Self {
        Self(Arc::new(Mutex::new(numbers.iter().copied().map(Given::Number).collect())))
    }

    /// Sockets that the caller owned.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`] if one is no connected stream socket.
    pub fn owned(sockets: impl IntoIterator<Item = OwnedFd>) -> Result<Self, TransportError> {
        let sockets = sockets.into_iter().map(|socket| {
            let number = socket.as_raw_fd();
            Ok(Given::Socket(number, checked(number, socket)?))
        });
        Ok(Self(Arc::new(Mutex::new(sockets.collect::<Result<_, _>>()?))))
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Given>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Their numbers.
    pub fn numbers(&self) -> Vec<RawFd> {
        self.lock().iter().map(Given::number).collect()
    }

    /// Looks at all of them.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`] if one is no connected stream socket.
    pub fn open(&self) -> Result<(), TransportError> {
        for given in &mut *self.lock() {
            if let Given::Number(number) = *given {
                *given = Given::Socket(number, checked(number, duplicate(number)?)?);
            }
        }
        Ok(())
    }

    /// The next one.
    ///
    /// # Errors
    /// As [`open`](Self::open); `None` if all are used.
    pub fn next(&self) -> Result<Option<(RawFd, Stream)>, TransportError> {
        self.open()?;
        Ok(self.lock().pop_front().and_then(|given| match given {
            Given::Socket(number, stream) => Some((number, stream)),
            Given::Number(_) => None,
        }))
    }

    /// Waits until a peer has said something on one of them, and takes that; sockets that their
    /// peers have closed are dropped. `None` when `closed` is readable.
    ///
    /// # Errors
    /// The system's.
    pub fn next_speaking(&self, closed: impl AsFd) -> io::Result<Option<(RawFd, Stream)>> {
        let mut sockets = self.lock();
        loop {
            let mut ready = vec![PollFd::new(&closed, PollFlags::IN)];
            ready.extend(sockets.iter().filter_map(|given| match given {
                Given::Socket(_, stream) => {
                    Some(PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN))
                }
                Given::Number(_) => None,
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
            if let Some(Given::Socket(number, stream)) = sockets.remove(index)
                && has_bytes(&stream)
            {
                return Ok(Some((number, stream)));
            }
        }
    }
}

/// Whether something can be read, and not only the end.
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

/// A duplicate of one of this process's descriptors, if it is a connected stream socket: to give it
/// to a [`Dialer`](crate::Dialer) or a [`Listener`](crate::Listener), or to another process.
///
/// # Errors
/// [`TransportError::Descriptor`].
pub fn connected_socket(number: RawFd) -> Result<OwnedFd, TransportError> {
    let descriptor = duplicate(number)?;
    check(number, &descriptor)?;
    Ok(descriptor)
}

/// The descriptor as a stream, if it is a connected stream socket.
fn checked(number: RawFd, descriptor: OwnedFd) -> Result<Stream, TransportError> {
    let family = check(number, &descriptor)?;
    let unusable = |error| TransportError::Descriptor {
        number,
        problem: "can't be used",
        source: Some(error),
    };
    // The other families' sockets are used through the calls that Unix sockets have.
    if matches!(family, AddressFamily::INET | AddressFamily::INET6) {
        return Stream::of_tcp(TcpStream::from(descriptor)).map_err(unusable);
    }
    let stream = UnixStream::from(descriptor);
    stream.set_nonblocking(false).map_err(unusable)?;
    Ok(Stream::Unix(stream))
}

/// Checks that it is a connected stream socket: its family.
fn check(number: RawFd, descriptor: &OwnedFd) -> Result<AddressFamily, TransportError> {
    let refused = |problem, source| TransportError::Descriptor { number, problem, source };
    let failed = |errno: Errno| match errno {
        Errno::NOTSOCK => refused("is no socket", None),
        Errno::NOTCONN => refused("is a socket that is not connected", None),
        errno => refused("can't be used", Some(errno.into())),
    };
    if sockopt::socket_type(descriptor).map_err(failed)? != SocketType::STREAM {
        return Err(refused("is no stream socket", None));
    }
    getpeername(descriptor).map_err(failed)?;
    sockopt::socket_domain(descriptor).map_err(failed)
}
