//! What is compared: ways, where, under which cap and over how many channels.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use super::orders::Transport;
use vmferry_net_lab::DESTINATION_ADDRESS;

/// A way to move a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// `tcp:`, published as way 1: neither encrypted nor authenticated.
    Plain,
    /// `tls:`, published as way 2.
    Tls,
    /// `grpc-ack:`, published as way 3: the next chunk leaves when the last was acknowledged.
    GrpcAcknowledged,
    /// `grpc:`, published as way 4, fire and forget: here streamed with a window.
    GrpcStreamed,
    /// `unix:`, which does not leave the host.
    Unix,
    /// Yardstick: nothing but a copy over TCP.
    RawSocket,
    /// Yardstick: nothing but a copy over rustls.
    RawRustls,
}

impl Way {
    /// All of them, in the order in which they take turns.
    pub const ALL: [Self; 7] = [
        Self::RawSocket,
        Self::Plain,
        Self::Unix,
        Self::RawRustls,
        Self::Tls,
        Self::GrpcStreamed,
        Self::GrpcAcknowledged,
    ];

    /// In tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::RawSocket => "raw socket",
            Self::RawRustls => "raw rustls",
            engine => engine.scheme().unwrap_or_default(),
        }
    }

    /// What the engine's addresses begin with; yardsticks have none.
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

    /// What the destination is to listen with at a place, on any free port.
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

/// Between what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Two network namespaces, joined by a pair of virtual Ethernet interfaces.
    Namespaces,
    /// Two processes on one host.
    Loopback,
}

impl Place {
    /// In tables and names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Loopback => "loopback",
        }
    }

    /// Where the destination is.
    pub fn destination(self) -> Ipv4Addr {
        match self {
            Self::Namespaces => DESTINATION_ADDRESS,
            Self::Loopback => Ipv4Addr::LOCALHOST,
        }
    }
}

/// A cap over all channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Link {
    /// As published: 350 MB/s.
    Capped,
    /// As fast as it goes.
    Uncapped,
}

impl Link {
    /// In tables and names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Capped => "capped",
            Self::Uncapped => "uncapped",
        }
    }
}

/// What is measured at a time. Ways come last, so that those that are compared take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Case {
    /// Between what.
    pub place: Place,
    /// The cap.
    pub link: Link,
    /// Data channels.
    pub channels: u8,
    /// The way.
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
    fn an_address_is_text_until_it_is_used() {
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
