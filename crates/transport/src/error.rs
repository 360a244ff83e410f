//! Errors of the transport, with advice.

mod convert;

use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// An error of the transport, with the next step for the user.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The host name cannot be resolved.
    #[error("no address is known for {address}: check the name")]
    Resolve {
        /// The requested address.
        address: String,
        /// The resolver's error.
        #[source]
        source: io::Error,
    },
    /// The connection failed.
    #[error(
        "can't connect to {address}: check that `vmferry receive` listens there and that no \
        firewall blocks it"
    )]
    Connect {
        /// The address.
        address: String,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// Another process already listens on the address.
    #[error(
        "{address} is in use: stop the process that listens there, or choose another port or path"
    )]
    AddressInUse {
        /// The address.
        address: String,
    },
    /// The operating system does not allow listening on the address.
    #[error("can't listen on {address}: choose an address of this host that you may use")]
    Listen {
        /// The address.
        address: String,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The peer took too long.
    #[error(
        "{peer} did not finish {what} in time: check that it runs, and the network between the \
        hosts"
    )]
    TimedOut {
        /// The peer.
        peer: String,
        /// The step that timed out.
        what: &'static str,
    },
    /// TLS was requested without a certificate.
    #[error(
        "tls: and grpc: need this host's certificate, key and authority: make them with `vmferry \
        pki`"
    )]
    NoIdentity,
    /// The peer's certificate is from an untrusted authority.
    #[error(
        "{peer} has a certificate of an authority that this host does not trust: use certificates \
        of the same authority, or trust that authority here too"
    )]
    UnknownIssuer {
        /// The peer.
        peer: String,
    },
    /// The peer's certificate has expired or is not valid yet.
    #[error(
        "the certificate of {peer} {when}: issue a new one with `vmferry pki issue`, and check \
        both clocks"
    )]
    Expired {
        /// The peer.
        peer: String,
        /// A text such as `expired on 2026-05-01` or `is not valid before 2026-05-01`.
        when: String,
    },
    /// The peer's certificate is for another name.
    #[error(
        "the certificate of {peer} is for {presented}, not for {expected}: issue it for that \
        address, or expect one of its names"
    )]
    NameMismatch {
        /// The peer.
        peer: String,
        /// The expected name.
        expected: String,
        /// The names in the certificate.
        presented: String,
    },
    /// The peer's certificate does not have the expected URI.
    #[error(
        "the certificate of {peer} is for {presented}, not for {expected}: check the address, or \
        which URI is expected"
    )]
    IdentityMismatch {
        /// The peer.
        peer: String,
        /// The expected URI.
        expected: String,
        /// The names in the certificate.
        presented: String,
    },
    /// The peer's certificate is on its authority's revocation list.
    #[error(
        "the certificate of {peer} was revoked by its authority: to trust that host again, issue a \
        new one with `vmferry pki issue`"
    )]
    Revoked {
        /// The peer.
        peer: String,
    },
    /// No revocation list of the peer's authority is valid now.
    #[error(
        "the revocation list for the certificate of {peer} {problem}: renew it with `vmferry pki \
        revoke` and copy it here"
    )]
    RevocationList {
        /// The peer.
        peer: String,
        /// The problem with the list.
        problem: String,
    },
    /// The expected name of the certificate is not a valid name.
    #[error("`{name}` is not a DNS name or IP address: expect another name")]
    ServerName {
        /// The name.
        name: String,
    },
    /// The peer sent no certificate.
    #[error("{peer} has sent no certificate: every vmferry host needs one")]
    NoCertificate {
        /// The peer.
        peer: String,
    },
    /// The peer rejects this host's certificate.
    #[error(
        "{peer} does not accept this host's certificate ({why}): check its authority and dates \
        there"
    )]
    RejectedByPeer {
        /// The peer.
        peer: String,
        /// The alert in words.
        why: String,
    },
    /// The peer does not speak TLS, or not with vmferry's protocol.
    #[error("{peer} speaks {what}, and this side expects vmferry over TLS: use tls: on both sides")]
    NotTls {
        /// The peer.
        peer: String,
        /// What the peer seems to speak.
        what: String,
    },
    /// The connection ended during the TLS handshake, as with a `tcp:` listener.
    #[error(
        "{peer} closed the connection during the TLS handshake: check that it uses tls: too, and \
        what it says"
    )]
    HandshakeCut {
        /// The peer.
        peer: String,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The peer refuses the gRPC call.
    #[error(
        "{peer} refuses the gRPC call ({why}): check that `vmferry receive` listens there on \
        grpc:, and check the proxies in between"
    )]
    CallRefused {
        /// The peer.
        peer: String,
        /// The peer's status in words.
        why: String,
    },
    /// An authenticated peer requests another service on the gRPC port.
    #[error(
        "{peer} speaks {what}, and this side serves vmferry.v1.Transport: use grpc: or grpc-ack: \
        there"
    )]
    NotOurCall {
        /// The peer.
        peer: String,
        /// What the peer requests.
        what: String,
    },
    /// A descriptor of `fd:` is unusable.
    #[error("descriptor {number} {problem}: fd: takes connected stream sockets")]
    Descriptor {
        /// The number.
        number: RawFd,
        /// The problem.
        problem: &'static str,
        /// The operating system's error.
        #[source]
        source: Option<io::Error>,
    },
    /// All sockets of `fd:` have been used.
    #[error(
        "{address} has no socket left: give one for the control channel, one for each data \
        channel, and spare ones for channels that are reestablished"
    )]
    NoDescriptorLeft {
        /// The address.
        address: String,
    },
    /// The build has no gRPC.
    #[error(
        "this build can't use {address}: build vmferry with the cargo feature `grpc`, or use tls:"
    )]
    NoGrpc {
        /// The address.
        address: String,
    },
    /// Any other TLS error.
    #[error("TLS with {peer} failed: make new certificates on one authority if this persists")]
    Tls {
        /// The peer.
        peer: String,
        /// The error of rustls.
        #[source]
        source: rustls::Error,
    },
    /// A certificate or key file is unusable.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// The problem, and what to do.
        problem: String,
    },
    /// A channel failed.
    #[error("the connection with {peer} failed{}", ended(source))]
    Io {
        /// The peer.
        peer: String,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
}

fn ended(error: &io::Error) -> &'static str {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    match error.kind() {
        UnexpectedEof | ConnectionReset | BrokenPipe => {
            " (it closed the connection before it had answered; does one side use tls: and the \
            other tcp:?)"
        }
        _ => ": check the network between the hosts",
    }
}

impl TransportError {
    /// Whether the cause is missing trust.
    #[must_use]
    pub fn is_authentication(&self) -> bool {
        matches!(
            self,
            Self::NoIdentity
                | Self::UnknownIssuer { .. }
                | Self::Expired { .. }
                | Self::NameMismatch { .. }
                | Self::IdentityMismatch { .. }
                | Self::Revoked { .. }
                | Self::RevocationList { .. }
                | Self::NoCertificate { .. }
                | Self::RejectedByPeer { .. }
                | Self::NotTls { .. }
                | Self::Tls { .. }
                | Self::File { .. }
        )
    }
}
