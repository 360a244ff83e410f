//! Accepting connections from sources.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;
#[cfg(feature = "grpc")]
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustls::{Connection, ServerConnection};

use crate::address::Address;
use crate::channel::{Channel, ChannelCloser, PeerIdentity};
use crate::dial::resolve;
use crate::error::TransportError;
use crate::given::GivenSockets;
#[cfg(feature = "grpc")]
use crate::grpc;
use crate::handshake::shake_hands;
use crate::identity::{ALPN, TlsIdentity};
use crate::passed::PassedSockets;
use crate::plain::Plain;
use crate::recording::Recorder;
use crate::stream::Stream;
use crate::tls::{Tls, TlsSession, peer_of};
use crate::transport::Close;
use crate::unix::{self, SocketFile};

/// A listening socket. Dropping it removes the file of a Unix socket.
///
/// ```
/// use vmferry_transport::{Address, Listener};
///
/// let listener = Listener::bind(&"tcp:127.0.0.1:0".parse()?, None)?;
/// let Address::Tcp { port, .. } = listener.local_address() else { unreachable!() };
/// assert_ne!(*port, 0, "the system chose a port");
///
/// let closer = listener.closer(); // For another thread.
/// closer.close();
/// assert!(listener.accept()?.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Listener {
    incoming: Incoming,
    address: Address,
    tls: Option<(InnerProtocol, Arc<TlsIdentity>)>,
    recorder: Option<Recorder>,
    closed: Arc<OwnedFd>,
}

/// The protocol inside TLS.
#[derive(Clone, Copy, Debug)]
enum InnerProtocol {
    Tls,
    #[cfg(feature = "grpc")]
    Grpc,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    /// The file is dropped first: while the socket listens, no other process replaces the file.
    Unix {
        _file: SocketFile,
        listener: UnixListener,
    },
}

/// The source of connections.
#[derive(Debug)]
enum Incoming {
    Listening(Socket),
    /// Sockets that are already connected.
    Given(GivenSockets),
    /// Sockets that another process accepts.
    Passed(PassedSockets),
}

impl Listener {
    /// Listens on `address`. Replaces the socket file of a listener that died, but never one in
    /// use.
    ///
    /// # Errors
    /// [`TransportError::AddressInUse`], [`TransportError::NoIdentity`] for `tls:` and `grpc:`
    /// without an identity, or the operating system's error.
    pub fn bind(address: &Address, tls: Option<Arc<TlsIdentity>>) -> Result<Self, TransportError> {
        let name = address.to_string();
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => TransportError::AddressInUse { address: name.clone() },
            _ => TransportError::Listen { address: name.clone(), source },
        };
        if cfg!(not(feature = "grpc")) && matches!(address, Address::Grpc { .. }) {
            return Err(TransportError::NoGrpc { address: name });
        }
        let tls = match address {
            Address::Tls { .. } => {
                Some((InnerProtocol::Tls, tls.ok_or(TransportError::NoIdentity)?))
            }
            #[cfg(feature = "grpc")]
            Address::Grpc { .. } => {
                Some((InnerProtocol::Grpc, tls.ok_or(TransportError::NoIdentity)?))
            }
            Address::Passed(_) => tls.map(|tls| (InnerProtocol::Tls, tls)),
            _ => None,
        };
        let (incoming, bound) = match address {
            Address::Passed(path) => {
                let sockets = PassedSockets::listen(path).map_err(failed)?;
                (Incoming::Passed(sockets), address.clone())
            }
            Address::Fd(numbers) => {
                let sockets = GivenSockets::numbered(numbers);
                sockets.open()?;
                (Incoming::Given(sockets), address.clone())
            }
            Address::Unix(path) => {
                let (listener, file) = unix::listen(path).map_err(failed)?;
                let socket = Socket::Unix { listener, _file: file };
                (Incoming::Listening(socket), address.clone())
            }
            Address::Tcp { host, port }
            | Address::Tls { host, port }
            | Address::Grpc { host, port, .. } => {
                let addresses = resolve(host, *port, &name)?;
                let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?.port();
                let host = host.clone();
                let bound = match address {
                    Address::Grpc { mode, .. } => Address::Grpc { host, port, mode: *mode },
                    Address::Tls { .. } => Address::Tls { host, port },
                    _ => Address::Tcp { host, port },
                };
                (Incoming::Listening(Socket::Tcp(listener)), bound)
            }
        };
        if let Incoming::Listening(socket) = &incoming {
            socket.set_nonblocking().map_err(failed)?;
        }
        Self::new(incoming, bound, tls).map_err(failed)
    }

    /// A listener over connected stream sockets. Each is accepted when its peer sends data.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`], or the operating system's error.
    pub fn over(sockets: impl IntoIterator<Item = OwnedFd>) -> Result<Self, TransportError> {
        let sockets = GivenSockets::owned(sockets)?;
        let address = Address::Fd(sockets.numbers());
        let name = address.to_string();
        Self::new(Incoming::Given(sockets), address, None)
            .map_err(|source| TransportError::Listen { address: name, source })
    }

    fn new(
        incoming: Incoming,
        address: Address,
        tls: Option<(InnerProtocol, Arc<TlsIdentity>)>,
    ) -> io::Result<Self> {
        let closed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { incoming, address, tls, recorder: None, closed: Arc::new(closed) })
    }

    /// Records the content of channels that are accepted from now on.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// The address, with the actual port in place of port 0.
    #[must_use]
    pub fn local_address(&self) -> &Address {
        &self.address
    }

    /// A handle that ends [`accept`](Self::accept) from any thread.
    #[must_use]
    pub fn closer(&self) -> ListenerCloser {
        ListenerCloser(Arc::clone(&self.closed))
    }

    /// Waits for a connection. Returns `Ok(None)` once the listener is closed.
    ///
    /// # Errors
    /// The operating system's error, such as too many open files. The listener stays usable.
    pub fn accept(&self) -> Result<Option<Pending>, TransportError> {
        let failed = |source| TransportError::Listen { address: self.address.to_string(), source };
        let (socket, accept): (BorrowedFd<'_>, &dyn Fn() -> io::Result<Stream>) =
            match &self.incoming {
                Incoming::Listening(socket) => (socket.as_fd(), &|| socket.accept()),
                Incoming::Passed(sockets) => (sockets.as_fd(), &|| sockets.accept()),
                Incoming::Given(sockets) => {
                    let given = sockets.next_speaking(&self.closed).map_err(failed)?;
                    return Ok(given.map(|(number, stream)| Pending {
                        stream: Arc::new(stream),
                        peer: format!("the peer on descriptor {number}"),
                        tls: None,
                        recorder: self.recorder.clone(),
                    }));
                }
            };
        loop {
            let mut ready = [
                PollFd::new(&self.closed, PollFlags::IN),
                PollFd::from_borrowed_fd(socket, PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(failed(errno.into())),
            }
            if !ready[0].revents().is_empty() {
                return Ok(None);
            }
            match accept() {
                Ok(stream) => {
                    let peer = stream.peer_name();
                    let stream = Arc::new(stream);
                    let (tls, recorder) = (self.tls.clone(), self.recorder.clone());
                    return Ok(Some(Pending { stream, peer, tls, recorder }));
                }
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

/// Whether the connection was closed before it was accepted, or another thread accepted it.
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
                Stream::of_tcp(stream)
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
    /// Closes the listener permanently.
    pub fn close(&self) {
        // Writing to an eventfd fails only when its counter is full, and then it is readable
        // anyway.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

/// An accepted connection before its handshake.
#[derive(Debug)]
pub struct Pending {
    stream: Arc<Stream>,
    peer: String,
    tls: Option<(InnerProtocol, Arc<TlsIdentity>)>,
    recorder: Option<Recorder>,
}

impl AsFd for Pending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Pending {
    pub(crate) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The peer's address, for people.
    #[must_use]
    pub fn peer_address(&self) -> String {
        self.peer.clone()
    }

    /// The peer's IP address, for counting; `None` for a Unix socket.
    #[must_use]
    pub fn peer_ip(&self) -> Option<IpAddr> {
        self.stream.peer_ip()
    }

    /// A handle that closes the connection from any thread, even during its handshake.
    #[must_use]
    pub fn closer(&self) -> ChannelCloser {
        ChannelCloser::new(Arc::clone(&self.stream) as Arc<dyn Close>)
    }

    /// Authenticates both sides on a `tls:` or `grpc:` listener, and on the latter also waits for
    /// the call, within `timeout`. Does nothing on other listeners.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn handshake(mut self, timeout: Duration) -> Result<Channel, TransportError> {
        let recorder = self.recorder.take();
        self.authenticate(timeout).map(|channel| channel.recorded(recorder.as_ref()))
    }

    fn authenticate(self, timeout: Duration) -> Result<Channel, TransportError> {
        let Some((inner, identity)) = self.tls else {
            let mut peer = PeerIdentity::anonymous(self.peer);
            peer.uid = self.stream.peer_uid();
            return Ok(Channel::new(Plain(self.stream), peer));
        };
        let protocol = match inner {
            InnerProtocol::Tls => ALPN,
            #[cfg(feature = "grpc")]
            InnerProtocol::Grpc => grpc::ALPN,
        };
        #[cfg(feature = "grpc")]
        let deadline = Instant::now() + timeout;
        let connection = ServerConnection::new(identity.server_config(protocol))
            .map_err(|error| TransportError::from_tls(error, self.peer.clone()))?;
        let connection = Connection::Server(connection);
        let connection = shake_hands(&self.stream, connection, protocol, &self.peer, timeout)?;
        let peer = peer_of(&connection, self.peer);
        Ok(match inner {
            InnerProtocol::Tls => {
                let session = TlsSession::new(self.stream, connection);
                Channel::new(Tls(Arc::new(session)), peer)
            }
            #[cfg(feature = "grpc")]
            InnerProtocol::Grpc => {
                let call = grpc::answer(self.stream, connection, &peer.address, deadline)?;
                Channel::new(call, peer)
            }
        })
    }
}
