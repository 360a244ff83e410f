//! Connecting to a destination.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection};

use crate::address::Address;
use crate::channel::{Channel, PeerIdentity};
use crate::error::TransportError;
use crate::given::GivenSockets;
#[cfg(feature = "grpc")]
use crate::grpc;
use crate::handshake::shake_hands;
use crate::identity::{ALPN, TlsIdentity};
use crate::plain::Plain;
use crate::recording::Recorder;
use crate::stream::Stream;
use crate::ticket::Ticket;
#[cfg(feature = "grpc")]
use crate::tls::peer_of;
use crate::tls::{Tls, TlsSession};
use crate::unix;

/// Opens channels to one destination.
///
/// ```
/// use std::io::{Read, Write};
/// use std::os::unix::net::UnixStream;
/// use std::time::Duration;
///
/// use vmferry_transport::{Dialer, Listener};
///
/// // Sockets of the caller; `Dialer::new` connects to an address.
/// let (here, there) = UnixStream::pair()?;
/// let dialer = Dialer::over([here.into()])?;
/// let listener = Listener::over([there.into()])?;
///
/// let (_reader, mut writer) = dialer.connect()?.split();
/// writer.write_all(b"hello")?;
/// writer.finish()?;
///
/// let pending = listener.accept()?.expect("the listener is open");
/// let (mut reader, _writer) = pending.handshake(Duration::from_secs(10))?.split();
/// let mut text = String::new();
/// reader.read_to_string(&mut text)?;
/// assert_eq!(text, "hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Dialer {
    /// The destination's address.
    pub address: Address,
    /// This host's identity, for `tls:` and `grpc:`.
    pub tls: Option<Arc<TlsIdentity>>,
    /// The name that the destination's certificate must have; the address's host by default.
    pub server_name: Option<String>,
    /// The URI that the destination's certificate must have, such as `spiffe://vmferry/host/b`. No
    /// other name is then required. Default none.
    pub destination_id: Option<String>,
    /// Time limit for each of: the connection, the TLS handshake, and the gRPC call. The system's
    /// resolver limits name resolution.
    pub connect_timeout: Duration,
    /// The IP addresses of the destination's host, if the caller has resolved its name. If empty,
    /// the name is resolved for each channel. Default empty.
    pub known_addresses: Vec<IpAddr>,
    /// Records the content of the channels. Default none.
    pub recorder: Option<Recorder>,
    /// Which receiver the channels are for, if several are behind one TCP port. Default none.
    pub ticket: Option<Ticket>,
    /// The sockets of `fd:`.
    given: GivenSockets,
}

impl Dialer {
    /// A dialer with a time limit of 10 s.
    #[must_use]
    pub fn new(address: Address, tls: Option<Arc<TlsIdentity>>) -> Self {
        let given = match &address {
            Address::Fd(numbers) => GivenSockets::numbered(numbers),
            _ => GivenSockets::numbered(&[]),
        };
        Self {
            address,
            tls,
            server_name: None,
            destination_id: None,
            connect_timeout: Duration::from_secs(10),
            known_addresses: Vec::new(),
            recorder: None,
            ticket: None,
            given,
        }
    }

    /// A dialer that uses these connected stream sockets, in order.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`].
    pub fn over(sockets: impl IntoIterator<Item = OwnedFd>) -> Result<Self, TransportError> {
        let given = GivenSockets::owned(sockets)?;
        Ok(Self { given: given.clone(), ..Self::new(Address::Fd(given.numbers()), None) })
    }

    /// Connects. Over `tls:` and `grpc:`, also authenticates both sides.
    ///
    /// # Errors
    /// See [`TransportError`].
    pub fn connect(&self) -> Result<Channel, TransportError> {
        self.reach().map(|channel| channel.recorded(self.recorder.as_ref()))
    }

    fn reach(&self) -> Result<Channel, TransportError> {
        let name = self.address.to_string();
        if let Some(expected) = &self.destination_id
            && !matches!(self.address, Address::Tls { .. } | Address::Grpc { .. })
        {
            return Err(TransportError::IdentityMismatch {
                peer: name,
                expected: expected.clone(),
                presented: "no name, because it has no certificate without TLS".into(),
            });
        }
        match &self.address {
            Address::Unix(path) => {
                let stream = unix::connect(path, self.connect_timeout)
                    .map_err(|source| TransportError::Connect { address: name.clone(), source })?;
                let stream = Stream::Unix(stream);
                let mut peer = PeerIdentity::anonymous(name);
                peer.uid = stream.peer_uid();
                Ok(Channel::new(Plain(Arc::new(stream)), peer))
            }
            Address::Fd(_) => match self.given.next()? {
                Some((number, stream)) => {
                    let mut peer = PeerIdentity::anonymous(format!("fd:{number}"));
                    peer.uid = stream.peer_uid();
                    Ok(Channel::new(Plain(Arc::new(stream)), peer))
                }
                None => Err(TransportError::NoDescriptorLeft { address: name }),
            },
            Address::Passed(_) => {
                let source = std::io::ErrorKind::Unsupported.into();
                Err(TransportError::Connect { address: name, source })
            }
            Address::Tcp { host, port } => {
                let stream = self.tcp(host, *port, &name)?;
                Ok(Channel::new(Plain(stream), PeerIdentity::anonymous(name)))
            }
            Address::Tls { host, port } => {
                let (stream, connection) = self.tls(host, *port, ALPN, &name)?;
                let session = TlsSession::new(stream, connection);
                let peer = session.peer(name);
                Ok(Channel::new(Tls(Arc::new(session)), peer))
            }
            #[cfg(feature = "grpc")]
            Address::Grpc { host, port, mode } => {
                let (stream, connection) = self.tls(host, *port, grpc::ALPN, &name)?;
                let peer = peer_of(&connection, name);
                let authority = grpc::authority(self.server_name.as_ref().unwrap_or(host), *port);
                let call = grpc::call(
                    stream,
                    connection,
                    *mode,
                    &authority,
                    &peer.address,
                    Instant::now() + self.connect_timeout,
                )?;
                Ok(Channel::new(call, peer))
            }
            #[cfg(not(feature = "grpc"))]
            Address::Grpc { .. } => Err(TransportError::NoGrpc { address: name }),
        }
    }

    /// Opens a socket and a TLS session on it for an application protocol.
    fn tls(
        &self,
        host: &str,
        port: u16,
        protocol: &[u8],
        name: &str,
    ) -> Result<(Arc<Stream>, Connection), TransportError> {
        let identity = self.tls.as_ref().ok_or(TransportError::NoIdentity)?;
        let config = identity.client_config(protocol, self.destination_id.as_deref());
        let stream = self.tcp(host, port, name)?;
        let wanted = self.server_name.as_deref().unwrap_or_else(|| without_zone(host));
        let server = ServerName::try_from(wanted.to_owned())
            .map_err(|_| TransportError::ServerName { name: wanted.to_owned() })?;
        let connection = ClientConnection::new(config, server)
            .map_err(|error| TransportError::from_tls(error, name.to_owned()))?;
        let connection = Connection::Client(connection);
        let connection = shake_hands(&stream, connection, protocol, name, self.connect_timeout)?;
        Ok((stream, connection))
    }

    fn tcp(&self, host: &str, port: u16, name: &str) -> Result<Arc<Stream>, TransportError> {
        let deadline = Instant::now() + self.connect_timeout;
        let mut failure = std::io::ErrorKind::AddrNotAvailable.into();
        let addresses = if self.known_addresses.is_empty() {
            resolve(host, port, name)?
        } else {
            self.known_addresses.iter().map(|ip| SocketAddr::new(*ip, port)).collect()
        };
        let count = addresses.len() as u32;
        for (number, address) in (0..).zip(addresses) {
            // An address that does not answer must not use up the time of the others.
            let left = deadline.saturating_duration_since(Instant::now()) / (count - number);
            if left.is_zero() {
                break;
            }
            let connected = TcpStream::connect_timeout(&address, left).and_then(Stream::of_tcp);
            let begun = connected.and_then(|stream| match self.ticket {
                Some(ticket) => ticket.send(&stream).map(|()| stream),
                None => Ok(stream),
            });
            match begun {
                Ok(stream) => return Ok(Arc::new(stream)),
                Err(error) => failure = error,
            }
        }
        Err(TransportError::Connect { address: name.to_owned(), source: failure })
    }
}

impl Address {
    /// Resolves the address's host for [`Dialer::known_addresses`] in another process. The result
    /// is empty if the address has no host, or if the host has link-local addresses with a scope
    /// (`fe80::1%eth0`): an [`IpAddr`] has no scope, so the other process must resolve such a host
    /// itself.
    ///
    /// # Errors
    /// [`TransportError::Resolve`].
    pub fn look_up(&self) -> Result<Vec<IpAddr>, TransportError> {
        match self {
            Self::Tcp { host, port } | Self::Tls { host, port } | Self::Grpc { host, port, .. } => {
                let found = resolve(host, *port, &self.to_string())?;
                Ok(without_scopes(&found))
            }
            Self::Unix(_) | Self::Passed(_) | Self::Fd(_) => Ok(Vec::new()),
        }
    }
}

/// The IP addresses, or none if one of them has a scope, which an [`IpAddr`] cannot express.
fn without_scopes(found: &[SocketAddr]) -> Vec<IpAddr> {
    let scoped = |address: &SocketAddr| matches!(address, SocketAddr::V6(v6) if v6.scope_id() != 0);
    if found.iter().any(scoped) { Vec::new() } else { found.iter().map(SocketAddr::ip).collect() }
}

/// All addresses of a host.
pub(crate) fn resolve(
    host: &str,
    port: u16,
    name: &str,
) -> Result<Vec<SocketAddr>, TransportError> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    // A numeric scope needs no resolver either.
    if let Ok(address) = format!("[{host}]:{port}").parse::<SocketAddrV6>() {
        return Ok(vec![address.into()]);
    }
    (host, port)
        .to_socket_addrs()
        .map(Iterator::collect)
        .map_err(|source| TransportError::Resolve { address: name.to_owned(), source })
}

/// An address without its zone, as in `fe80::1%eth0`: the zone is an interface of this host, and
/// not in the other host's certificate.
fn without_zone(host: &str) -> &str {
    match host.split_once('%') {
        Some((address, _)) if address.parse::<Ipv6Addr>().is_ok() => address,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looked_up(text: &str) -> Vec<IpAddr> {
        text.parse::<Address>().unwrap().look_up().unwrap()
    }

    /// The first address drops everything, as a broken path of one of two networks does.
    #[test]
    fn address_that_does_not_answer_leaves_time_for_the_next() {
        use socket2::{Domain, Socket, Type};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        // With its queue full, the kernel answers no further connection.
        let silent = SocketAddr::from(([127, 0, 0, 2], port));
        let full = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        full.bind(&silent.into()).unwrap();
        full.listen(0).unwrap();
        let _queued = TcpStream::connect(silent).unwrap();
        let mut dialer = Dialer::new(format!("tcp:127.0.0.1:{port}").parse().unwrap(), None);
        dialer.connect_timeout = Duration::from_secs(2);
        dialer.known_addresses = vec![silent.ip(), "127.0.0.1".parse().unwrap()];
        dialer.tcp("127.0.0.1", port, "both").unwrap();
        dialer.known_addresses.truncate(1);
        let alone = dialer.tcp("127.0.0.1", port, "the silent one").unwrap_err();
        assert!(alone.to_string().contains("the silent one"), "{alone}");
    }

    #[test]
    fn look_up_omits_scoped_addresses() {
        assert_eq!(looked_up("tcp:[fe80::1]:7001"), ["fe80::1".parse::<IpAddr>().unwrap()]);
        assert_eq!(looked_up("tcp:192.0.2.1:7001"), ["192.0.2.1".parse::<IpAddr>().unwrap()]);
        // The loopback interface has the same name and number in every network namespace.
        for host in ["fe80::1%lo", "fe80::1%1"] {
            let resolved = resolve(host, 7001, host).unwrap();
            let scoped = SocketAddrV6::new("fe80::1".parse().unwrap(), 7001, 0, 1);
            assert_eq!(resolved[0], SocketAddr::V6(scoped), "{host}");
            assert!(looked_up(&format!("tcp:[{host}]:7001")).is_empty(), "{host}");
        }
        let mixed = ["192.0.2.1:1", "[fe80::1%3]:1"].map(|text| text.parse().unwrap());
        assert!(
            without_scopes(&mixed).is_empty(),
            "an address without its scope must not be tried"
        );
        assert_eq!(without_scopes(&mixed[..1]).len(), 1);
    }
}
