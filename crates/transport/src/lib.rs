//! Channels between two hosts.
//!
//! A [`Dialer`] reaches a [`Listener`] over TCP, a Unix socket, sockets that the caller has
//! connected, or TLS 1.3 with both sides authenticated, bare or with gRPC in it (feature `grpc`), and both get a [`Channel`]: a byte stream whose two halves work in two threads
//! at the same time. A [`RateLimiter`] caps what several channels send together, and [`pki`] makes
//! the certificates. A VMM with a transport of its own makes channels of a [`Transport`].
//!
//! I/O blocks, in threads; every wait can be bounded. The end of a TLS channel that its peer did
//! not announce is an error: a cut link must not look like the end of the data.

#![forbid(unsafe_code)]

mod address;
mod channel;
mod dial;
mod error;
mod given;
#[cfg(feature = "grpc")]
mod grpc;
mod handshake;
mod identity;
mod listen;
pub mod pki;
mod plain;
mod rate;
mod recording;
mod secret;
mod stamp;
mod stream;
mod tls;
mod transport;
mod unix;
mod wrong_identity;

#[cfg(test)]
mod tests;

pub use address::{Address, AddressError, GrpcWay};
pub use channel::{Channel, ChannelCloser, ChannelReader, ChannelWriter, PeerIdentity};
pub use dial::Dialer;
pub use error::TransportError;
pub use given::connected_socket;
pub use identity::{
    IdentityFiles, TlsIdentity, certificates_of, names_of, next_update_of, revocation_lists_of,
    validity_of,
};
pub use listen::{Listener, ListenerCloser, Pending};
pub use rate::RateLimiter;
pub use recording::{
    Direction, RECORDING_HEADER_BYTES, RECORDING_MAGIC, Recorder, RecordingHeader, RecordingSide,
    finish_recordings,
};
pub use stamp::FileStamp;
pub use transport::{Close, Receive, Transmit, Transport};
pub use unix::{SocketFile, connect as connect_unix, listen as listen_unix};
