//! The cases: method, place, cap and number of channels.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use super::orders::Transport;
use vmferry_net_lab::DESTINATION_ADDRESS;

/// A method to move a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// `tcp:`, published as method 1: neither encrypted nor authenticated.
    Plain,
    /// `tls:`, published as method 2.
    Tls,
    /// `grpc-ack:`, published as method 3: each chunk is sent after the previous one was
    /// acknowledged.
    GrpcAcknowledged,
    /// `grpc:`, published as method 4, fire and forget. Here it is streamed with a window.
    GrpcStreamed,
    /// `unix:`, which stays on one host.
    Unix,
    /// Yardstick: a plain copy over TCP.
    RawSocket,
    /// Yardstick: a plain copy over rustls.
    RawRustls,
}

impl Way {
    /// All methods in the order in which they take turns.
    pub const ALL: [Self; 7] = [
        Self::RawSocket,
        Self::Plain,
        Self::Unix,
        Self::RawRustls,
        Self::Tls,
        Self::GrpcStreamed,
        Self::GrpcAcknowledged,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::RawSocket => "raw socket",
            Self::RawRustls => "raw rustls",
            engine => engine.scheme().unwrap_or_default(),
        }
    }

    /// The scheme of the engine's address. Yardsticks have none.
    pub fn scheme(self) -> Option<&'static str> {
        match self {
            Self::Plain => Some("tcp"),
            Self::Tls => Some("tls"),
            Self::GrpcAcknowledged => Some("grpc-ack"),
            Self::GrpcStreamed => Some("grpc"),
            Self::Unix => Some("unix"),
            Self::RawSocket | Self::RawRustls => None,
        }
    }

    /// The transport that the destination listens on, with any free port.
    pub fn transport(self, place: Place, directory: &Path) -> Transport {
        let host = place.destination();
        match (self, self.scheme()) {
            (Self::RawSocket, _) => Transport::RawSocket(SocketAddr::new(host.into(), 0)),
            (Self::RawRustls, _) => Transport::RawRustls(SocketAddr::new(host.into(), 0)),
            (Self::Unix, _) => {
                Transport::Engine(format!("unix:{}", directory.join("socket").display()))
            }
            (_, scheme) => Transport::Engine(format!("{}:{host}:0", scheme.unwrap_or_default())),
        }
    }
}

/// The place of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Each side is in its own network namespace; a pair of virtual Ethernet interfaces joins them.
    Namespaces,
    /// Both sides use the loopback interface.
    Loopback,
}

impl Place {
    /// The name in tables and ratio names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Loopback => "loopback",
        }
    }

    /// The destination's address.
    pub fn destination(self) -> Ipv4Addr {
        match self {
            Self::Namespaces => DESTINATION_ADDRESS,
            Self::Loopback => Ipv4Addr::LOCALHOST,
        }
    }
}

/// The cap over all channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// 350 MB/s, as published.
    Capped,
    /// No cap.
    Uncapped,
}

impl Link {
    /// The name in tables and ratio names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Capped => "capped",
            Self::Uncapped => "uncapped",
        }
    }
}

/// A measured case. The method is the last field, so that sorted cases let the methods take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Case {
    /// The place of the two sides.
    pub place: Place,
    /// The cap.
    pub link: Link,
    /// The number of data channels.
    pub channels: u8,
    /// The method.
    pub way: Way,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, link, channels, way } = self;
        write!(f, "{}, {}, {channels} channels, {}", place.name(), link.name(), way.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn way_transport_names_the_listen_address() {
        let at = |way: Way, place| match way.transport(place, Path::new("/run/b")) {
            Transport::Engine(address) => address,
            other => format!("{other:?}"),
        };
        assert_eq!(at(Way::Tls, Place::Namespaces), "tls:10.77.7.2:0");
        assert_eq!(at(Way::GrpcAcknowledged, Place::Loopback), "grpc-ack:127.0.0.1:0");
        assert_eq!(at(Way::Unix, Place::Loopback), "unix:/run/b/socket");
        assert_eq!(at(Way::RawSocket, Place::Loopback), "RawSocket(127.0.0.1:0)");
    }
}
