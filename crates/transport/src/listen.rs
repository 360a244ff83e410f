//! Waiting for sources.

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
use crate::plain::Plain;
use crate::recording::Recorder;
use crate::stream::Stream;
use crate::tls::{Tls, TlsSession, peer_of};
use crate::transport::Close;
use crate::unix::{self, SocketFile};

/// A listening socket. A Unix socket's file is removed when it is dropped.
///
/// ```
/// use vmferry_transport::{Address, Listener};
///
/// let listener = Listener::bind(&"tcp:127.0.0.1:0".parse()?, None)?;
/// let Address::Tcp { port, .. } = listener.local_address() else { unreachable!() };
/// assert_ne!(*port, 0, "a real one was chosen");
///
/// let closer = listener.closer(); // For another thread.
/// closer.close();
/// assert!(listener.accept()?.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Listener {
    door: Door,
    address: Address,
    tls: Option<(Over, Arc<TlsIdentity>)>,
    recorder: Option<Recorder>,
    closed: Arc<OwnedFd>,
}

/// What is spoken within TLS.
#[derive(Clone, Copy, Debug)]
enum Over {
    Tls,
    #[cfg(feature = "grpc")]
    Grpc,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    /// The file goes first: while somebody listens no rival puts another one in its place.
    Unix {
        _file: SocketFile,
        listener: UnixListener,
    },
}

/// Where connections come from.
#[derive(Debug)]
enum Door {
    Listening(Socket),
    /// They are connected already.
    Given(GivenSockets),
}

impl Listener {
    /// Listens. The socket file of a listener that died is replaced, that of a living one is not.
    ///
    /// # Errors
    /// [`TransportError::AddressInUse`], [`TransportError::NoIdentity`] for `tls:` and `grpc:` without one, or
    /// what the system says.
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
            Address::Tls { .. } => Some((Over::Tls, tls.ok_or(TransportError::NoIdentity)?)),
            #[cfg(feature = "grpc")]
            Address::Grpc { .. } => Some((Over::Grpc, tls.ok_or(TransportError::NoIdentity)?)),
            _ => None,
        };
        let (door, bound) = match address {
            Address::Fd(numbers) => {
                let sockets = GivenSockets::numbered(numbers);
                sockets.open()?;
                (Door::Given(sockets), address.clone())
            }
            Address::Unix(path) => {
                let (listener, file) = unix::listen(path).map_err(failed)?;
                let socket = Socket::Unix { listener, _file: file };
                (Door::Listening(socket), address.clone())
            }
            Address::Tcp { host, port }
            | Address::Tls { host, port }
            | Address::Grpc { host, port, .. } => {
                let addresses = resolve(host, *port, &name)?;
                let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?.port();
                let host = host.clone();
                let bound = match address {
                    Address::Grpc { way, .. } => Address::Grpc { host, port, way: *way },
                    Address::Tls { .. } => Address::Tls { host, port },
                    _ => Address::Tcp { host, port },
                };
                (Door::Listening(Socket::Tcp(listener)), bound)
            }
        };
        if let Door::Listening(socket) = &door {
            socket.set_nonblocking().map_err(failed)?;
        }
        Self::new(door, bound, tls).map_err(failed)
    }

    /// A listener whose channels are these connected stream sockets, each accepted when its peer
    /// says something.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`], or what the system says.
    pub fn over(sockets: impl IntoIterator<Item = OwnedFd>) -> Result<Self, TransportError> {
        let sockets = GivenSockets::owned(sockets)?;
        let address = Address::Fd(sockets.numbers());
        let name = address.to_string();
        Self::new(Door::Given(sockets), address, None)
            .map_err(|source| TransportError::Listen { address: name, source })
    }

    fn new(
        door: Door,
        address: Address,
        tls: Option<(Over, Arc<TlsIdentity>)>,
    ) -> io::Result<Self> {
        let closed = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { door, address, tls, recorder: None, closed: Arc::new(closed) })
    }

    /// Records what the channels carry that are accepted from now on.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
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
        let socket = match &self.door {
            Door::Listening(socket) => socket,
            Door::Given(sockets) => {
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
                PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(failed(errno.into())),
            }
            if !ready[0].revents().is_empty() {
                return Ok(None);
            }
            match socket.accept() {
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
    tls: Option<(Over, Arc<TlsIdentity>)>,
    recorder: Option<Recorder>,
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

    /// Authenticates both sides on a `tls:` or `grpc:` listener, and waits for the call on the
    /// latter, within `timeout`; nothing to do on others.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn handshake(mut self, timeout: Duration) -> Result<Channel, TransportError> {
        let recorder = self.recorder.take();
        self.authenticate(timeout).map(|channel| channel.recorded(recorder.as_ref()))
    }

    fn authenticate(self, timeout: Duration) -> Result<Channel, TransportError> {
        let Some((over, identity)) = self.tls else {
            let mut peer = PeerIdentity::anonymous(self.peer);
            peer.uid = self.stream.peer_uid();
            return Ok(Channel::new(Plain(self.stream), peer));
        };
        let protocol = match over {
            Over::Tls => ALPN,
            #[cfg(feature = "grpc")]
            Over::Grpc => grpc::ALPN,
        };
        #[cfg(feature = "grpc")]
        let deadline = Instant::now() + timeout;
        let connection = ServerConnection::new(identity.server_config(protocol))
            .map_err(|error| TransportError::from_tls(error, self.peer.clone()))?;
        let connection = Connection::Server(connection);
        let connection = shake_hands(&self.stream, connection, protocol, &self.peer, timeout)?;
        let peer = peer_of(&connection, self.peer);
        Ok(match over {
            Over::Tls => {
                let session = TlsSession::new(self.stream, connection);
                Channel::new(Tls(Arc::new(session)), peer)
            }
            #[cfg(feature = "grpc")]
            Over::Grpc => {
                let call = grpc::answer(self.stream, connection, &peer.address, deadline)?;
                Channel::new(call, peer)
            }
        })
    }
}
