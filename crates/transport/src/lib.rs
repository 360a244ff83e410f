//! Channels between two hosts.
//!
//! A [`Dialer`] connects to a [`Listener`] over TCP, a Unix socket, sockets that the caller has
//! connected, or mutually authenticated TLS 1.3, optionally with gRPC inside it (feature `grpc`).
//! Both get a [`Channel`]: a byte stream whose two halves can be used in two threads at the same
//! time. A [`RateLimiter`] limits the total rate of several channels. [`pki`] creates the
//! certificates. A VMM with its own transport implements [`Transport`] and builds channels from it.
//!
//! I/O blocks the calling thread, and every wait can be limited. On a TLS channel, an end that the
//! peer did not announce is an error, so that a cut link cannot look like the end of the data.

#![forbid(unsafe_code)]

mod address;
mod channel;
mod dial;
mod error;
mod file_version;
mod given;
#[cfg(feature = "grpc")]
mod grpc;
mod handshake;
mod identity;
mod listen;
mod passed;
pub mod pki;
mod plain;
mod rate;
mod recording;
mod secret;
mod stream;
mod ticket;
mod tls;
mod transport;
mod unix;
mod wrong_identity;

#[cfg(test)]
mod tests;

pub use address::{Address, AddressError, GrpcMode};
pub use channel::{Channel, ChannelCloser, ChannelReader, ChannelWriter, PeerIdentity};
pub use dial::Dialer;
pub use error::TransportError;
pub use file_version::FileVersion;
pub use given::connected_socket;
pub use identity::{
    IdentityFiles, TlsIdentity, certificates_of, common_name_of, names_of, next_update_of,
    revocation_lists_of, validity_of,
};
pub use listen::{Listener, ListenerCloser, Pending};
pub use passed::pass_socket;
pub use rate::RateLimiter;
pub use recording::{
    Direction, RECORDING_HEADER_BYTES, RECORDING_MAGIC, Recorder, RecordingHeader, RecordingSide,
    finish_recordings,
};
pub use ticket::{TICKET_BYTES, Ticket};
pub use transport::{Close, Receive, Transmit, Transport};
pub use unix::{SocketFile, connect as connect_unix, listen as listen_unix};
