//! Waiting for sources.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustls::{Connection, ServerConnection};

use crate::address::Address;
use crate::channel::{Channel, ChannelCloser, PeerIdentity};
use crate::dial::resolve;
use crate::error::TransportError;
use crate::handshake::shake_hands;
use crate::identity::{ALPN, TlsIdentity};
use crate::plain::Plain;
use crate::stream::Stream;
use crate::tls::{Tls, TlsSession};
use crate::transport::Close;
use crate::unix::{self, SocketFile};

/// A listening socket. A Unix socket's file is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    address: Address,
    tls: Option<Arc<TlsIdentity>>,
    closed: Arc<OwnedFd>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    /// The file goes when the socket goes.
    Unix {
        listener: UnixListener,
        _file: SocketFile,
    },
}

impl Listener {
    /// Listens. The socket file of a listener that died is replaced, that of a living one is not.
    ///
    /// # Errors
    /// [`TransportError::AddressInUse`], [`TransportError::NoIdentity`] for `tls:` without one, or
    /// what the system says.
    pub fn bind(address: &Address, tls: Option<Arc<TlsIdentity>>) -> Result<Self, TransportError> {
        let name = address.to_string();
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => TransportError::AddressInUse { address: name.clone() },
            _ => TransportError::Listen { address: name.clone(), source },
        };
        if matches!(address, Address::Tls { .. }) && tls.is_none() {
            return Err(TransportError::NoIdentity);
        }
        let (socket, bound) = match address {
            Address::Unix(path) => {
                let (listener, file) = unix::listen(path).map_err(failed)?;
                (Socket::Unix { listener, _file: file }, address.clone())
            }
            Address::Tcp { host, port } | Address::Tls { host, port } => {
                let addresses = resolve(host, *port, &name)?;
                let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?.port();
                let host = host.clone();
                let bound = match address {
                    Address::Tcp { .. } => Address::Tcp { host, port },
                    _ => Address::Tls { host, port },
                };
                (Socket::Tcp(listener), bound)
            }
        };
        socket.set_nonblocking().map_err(failed)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let closed = eventfd(0, flags).map_err(|errno| failed(errno.into()))?;
        let tls = tls.filter(|_| matches!(address, Address::Tls { .. }));
        Ok(Self { socket, address: bound, tls, closed: Arc::new(closed) })
    }

    /// Where it listens; port 0 has become a real one.
    #[must_use]
    pub fn local_address(&self) -> &Address {
        &self.address
    }

    /// Ends [`accept`](Self::accept) from any thread.
    #[must_use]
    pub fn closer(&self) -> ListenerCloser {
        ListenerCloser(Arc::clone(&self.closed))
    }

    /// Waits for a connection. `Ok(None)` once it is closed.
    ///
    /// # Errors
    /// The system's, such as too many open files; the listener is still good.
    pub fn accept(&self) -> Result<Option<Pending>, TransportError> {
        let failed = |source| TransportError::Listen { address: self.address.to_string(), source };
        loop {
            let mut ready = [
                PollFd::new(&self.closed, PollFlags::IN),
                PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(failed(errno.into())),
            }
            if !ready[0].revents().is_empty() {
                return Ok(None);
            }
            match self.socket.accept() {
                Ok(stream) => {
                    let peer = stream.peer_name();
                    let stream = Arc::new(stream);
                    return Ok(Some(Pending { stream, peer, tls: self.tls.clone() }));
                }
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

/// The connection went away before it was accepted, or somebody else took it.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}

impl Socket {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener) => listener.set_nonblocking(true),
            Self::Unix { listener, .. } => listener.set_nonblocking(true),
        }
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix { listener, .. } => listener.as_fd(),
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }
            Self::Unix { listener, .. } => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Ok(Stream::Unix(stream))
            }
        }
    }
}

/// Ends a listener's wait from any thread.
#[derive(Clone, Debug)]
pub struct ListenerCloser(Arc<OwnedFd>);

impl ListenerCloser {
    /// Ends it, now and for good.
    pub fn close(&self) {
        // Adding to a counter that is not read fails only when it is full, and so ready.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

/// An accepted connection that has not said anything.
#[derive(Debug)]
pub struct Pending {
    stream: Arc<Stream>,
    peer: String,
    tls: Option<Arc<TlsIdentity>>,
}

impl AsFd for Pending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Pending {
    /// Where it comes from, for people.
    #[must_use]
    pub fn peer_address(&self) -> String {
        self.peer.clone()
    }

    /// Where it comes from, for counting; a Unix socket has no address.
    #[must_use]
    pub fn peer_ip(&self) -> Option<IpAddr> {
        self.stream.peer_ip()
    }

    /// Closes the connection from any thread, its handshake too.
    #[must_use]
    pub fn closer(&self) -> ChannelCloser {
        ChannelCloser::new(Arc::clone(&self.stream) as Arc<dyn Close>)
    }

    /// Authenticates both sides on a `tls:` listener, within `timeout`; nothing to do on others.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn handshake(self, timeout: Duration) -> Result<Channel, TransportError> {
        let Some(identity) = self.tls else {
            let mut peer = PeerIdentity::anonymous(self.peer);
            peer.uid = self.stream.peer_uid();
            return Ok(Channel::new(Plain(self.stream), peer));
        };
        let connection = ServerConnection::new(identity.server_config(ALPN))
            .map_err(|error| TransportError::from_tls(error, self.peer.clone()))?;
        let connection = Connection::Server(connection);
        let connection = shake_hands(&self.stream, connection, ALPN, &self.peer, timeout)?;
        let session = TlsSession::new(self.stream, connection);
        let peer = session.peer(self.peer);
        Ok(Channel::new(Tls(Arc::new(session)), peer))
    }
}
