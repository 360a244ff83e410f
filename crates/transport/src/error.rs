//! What goes wrong on the way, and what to do about it.

use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;

use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError};
use time::OffsetDateTime;

use crate::wrong_identity::WrongIdentity;

/// An error of the transport, with its next step.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// A name that no address is known for.
    #[error("no address is known for {address}: check the name")]
    Resolve {
        /// The address asked for.
        address: String,
        /// What the resolver said.
        #[source]
        source: io::Error,
    },
    /// Nobody answers there.
    #[error(
        "can't connect to {address}: check that `vmferry receive` listens there and that no firewall is between"
    )]
    Connect {
        /// The address.
        address: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Someone listens there already.
    #[error("{address} is in use: end whoever listens there, or choose another port or path")]
    AddressInUse {
        /// The address.
        address: String,
    },
    /// The system does not let us listen there.
    #[error("can't listen on {address}: choose an address of this host that you may use")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The peer took too long.
    #[error(
        "{peer} did not finish {what} in time: check that it runs, and the network between the hosts"
    )]
    TimedOut {
        /// The peer.
        peer: String,
        /// What was awaited.
        what: &'static str,
    },
    /// TLS is asked for, and no certificate was given.
    #[error(
        "tls: and grpc: need this host's certificate, key and authority: make them with `vmferry pki`"
    )]
    NoIdentity,
    /// The peer's certificate is from an authority that we don't trust.
    #[error(
        "{peer} has a certificate of an authority that this host does not trust: use certificates of the same authority, or trust that authority here too"
    )]
    UnknownIssuer {
        /// The peer.
        peer: String,
    },
    /// The peer's certificate is out of date.
    #[error(
        "the certificate of {peer} {when}: issue a new one with `vmferry pki issue`, and check both clocks"
    )]
    Expired {
        /// The peer.
        peer: String,
        /// Such as `expired on 2026-05-01` or `is not valid before 2026-05-01`.
        when: String,
    },
    /// The peer's certificate is for another name.
    #[error(
        "the certificate of {peer} is for {presented}, not for {expected}: issue it for that address, or expect one of its names"
    )]
    NameMismatch {
        /// The peer.
        peer: String,
        /// The name that was asked for.
        expected: String,
        /// The names in the certificate.
        presented: String,
    },
    /// The peer's certificate has another URI than the one that was asked for.
    #[error(
        "the certificate of {peer} is for {presented}, not for {expected}: check the address, or which URI is expected"
    )]
    IdentityMismatch {
        /// The peer.
        peer: String,
        /// The URI that was asked for.
        expected: String,
        /// The names in the certificate.
        presented: String,
    },
    /// The peer's certificate is on its authority's revocation list.
    #[error(
        "the certificate of {peer} was revoked by its authority: issue a new one with `vmferry pki issue` if that host is to be trusted again"
    )]
    Revoked {
        /// The peer.
        peer: String,
    },
    /// No revocation list of the peer's authority says anything about now.
    #[error(
        "the revocation list for the certificate of {peer} {problem}: renew it with `vmferry pki revoke` and copy it here"
    )]
    RevocationList {
        /// The peer.
        peer: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The name that the certificate is to have is none.
    #[error("`{name}` is no DNS name or IP address: expect another name")]
    ServerName {
        /// What was given.
        name: String,
    },
    /// The peer has sent no certificate.
    #[error("{peer} has sent no certificate: every vmferry host needs one")]
    NoCertificate {
        /// The peer.
        peer: String,
    },
    /// The peer does not accept our certificate.
    #[error(
        "{peer} does not accept this host's certificate ({why}): check its authority and dates there"
    )]
    RejectedByPeer {
        /// The peer.
        peer: String,
        /// The alert, in words.
        why: String,
    },
    /// The peer does not speak TLS, or not our kind.
    #[error("{peer} speaks {what}, and this side expects vmferry over TLS: use tls: on both sides")]
    NotTls {
        /// The peer.
        peer: String,
        /// What it speaks, as far as can be seen.
        what: String,
    },
    /// The connection ended in the midst of the TLS handshake: a `tcp:` listener does that.
    #[error(
        "{peer} closed the connection during the TLS handshake: check that it uses tls: too, and what it says"
    )]
    HandshakeCut {
        /// The peer.
        peer: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The peer does not take our gRPC call.
    #[error(
        "{peer} refuses the gRPC call ({why}): check that `vmferry receive` listens there on grpc:, and the proxies between"
    )]
    CallRefused {
        /// The peer.
        peer: String,
        /// Its status, in words.
        why: String,
    },
    /// An authenticated peer wants something else of a gRPC port.
    #[error(
        "{peer} speaks {what}, and this side serves vmferry.v1.Transport: use grpc: or grpc-ack: there"
    )]
    NotOurCall {
        /// The peer.
        peer: String,
        /// What it wants, as far as can be seen.
        what: String,
    },
    /// A descriptor of `fd:` is unusable.
    #[error("descriptor {number} {problem}: fd: takes connected stream sockets")]
    Descriptor {
        /// The number.
        number: RawFd,
        /// What is wrong with it.
        problem: &'static str,
        /// What the system said.
        #[source]
        source: Option<io::Error>,
    },
    /// All sockets of `fd:` are in use or were used.
    #[error(
        "{address} has no socket left: give one for the control channel, one for each data channel, and spare ones for channels that are made anew"
    )]
    NoDescriptorLeft {
        /// The address.
        address: String,
    },
    /// gRPC was left out.
    #[error(
        "this build can't use {address}: build vmferry with the cargo feature `grpc`, or use tls:"
    )]
    NoGrpc {
        /// The address.
        address: String,
    },
    /// TLS failed in another way.
    #[error("TLS with {peer} failed: make new certificates on one authority if this persists")]
    Tls {
        /// The peer.
        peer: String,
        /// What rustls said.
        #[source]
        source: rustls::Error,
    },
    /// A certificate or key file is unusable.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A channel failed.
    #[error("the connection with {peer} failed{}", ended(source))]
    Io {
        /// The peer.
        peer: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

fn ended(error: &io::Error) -> &'static str {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    match error.kind() {
        UnexpectedEof | ConnectionReset | BrokenPipe => {
            " (it closed the connection before it had answered; does one side use tls: and the other tcp:?)"
        }
        _ => ": check the network between the hosts",
    }
}

impl TransportError {
    /// Whether trust is what is missing.
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

    /// An I/O error on a channel: those that come from TLS are told by their cause.
    #[must_use]
    pub fn from_io(error: io::Error, peer: &str) -> Self {
        let peer = peer.to_owned();
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(tls) => Self::from_tls(tls.clone(), peer),
            None => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    Self::TimedOut { peer, what: "what was expected of it" }
                }
                _ => Self::Io { peer, source: error },
            },
        }
    }

    /// The peer speaks TLS for another application.
    pub(crate) fn other_protocol(peer: String) -> Self {
        Self::NotTls { peer, what: "TLS, but not vmferry's protocol within".into() }
    }

    pub(crate) fn from_tls(error: rustls::Error, peer: String) -> Self {
        use rustls::Error as Tls;
        match error {
            Tls::InvalidCertificate(reason) => Self::from_certificate(reason, peer),
            Tls::InvalidCertRevocationList(reason) => {
                Self::RevocationList { peer, problem: format!("can't be used ({reason:?})") }
            }
            Tls::NoApplicationProtocol => Self::other_protocol(peer),
            Tls::NoCertificatesPresented => Self::NoCertificate { peer },
            Tls::AlertReceived(alert) => match alert {
                AlertDescription::CertificateExpired => {
                    Self::RejectedByPeer { peer, why: "it has expired".into() }
                }
                AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                    let why = "unknown authority, or its revocation list is out of date there";
                    Self::RejectedByPeer { peer, why: why.into() }
                }
                AlertDescription::CertificateRevoked => {
                    Self::RejectedByPeer { peer, why: "it was revoked".into() }
                }
                AlertDescription::CertificateRequired => {
                    Self::RejectedByPeer { peer, why: "none was sent".into() }
                }
                AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateUnknown
                | AlertDescription::AccessDenied => {
                    Self::RejectedByPeer { peer, why: format!("{alert:?}") }
                }
                AlertDescription::NoApplicationProtocol => Self::other_protocol(peer),
                _ => Self::Tls { peer, source: Tls::AlertReceived(alert) },
            },
            Tls::InvalidMessage(_) => {
                Self::NotTls { peer, what: "something whose records are not TLS".into() }
            }
            other => Self::Tls { peer, source: other },
        }
    }

    fn from_certificate(error: CertificateError, peer: String) -> Self {
        match error {
            CertificateError::Expired => Self::Expired { peer, when: "has expired".into() },
            CertificateError::ExpiredContext { time, not_after } => {
                let (day, ago) = (date(not_after), distance(not_after, time));
                let when = format!("expired on {day}, {ago} ago by this host's clock");
                Self::Expired { peer, when }
            }
            CertificateError::NotValidYet => {
                Self::Expired { peer, when: "is not valid yet".into() }
            }
            CertificateError::NotValidYetContext { time, not_before } => {
                let (day, ahead) = (date(not_before), distance(time, not_before));
                let when =
                    format!("is not valid before {day}, {ahead} from now by this host's clock");
                Self::Expired { peer, when }
            }
            CertificateError::Revoked => Self::Revoked { peer },
            CertificateError::ExpiredRevocationListContext { time, next_update } => {
                let (day, ago) = (date(next_update), distance(next_update, time));
                Self::RevocationList {
                    peer,
                    problem: format!("is out of date since {day}, {ago} ago"),
                }
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                Self::UnknownIssuer { peer }
            }
            CertificateError::NotValidForName => Self::NameMismatch {
                peer,
                expected: "the name asked for".into(),
                presented: "another name".into(),
            },
            CertificateError::NotValidForNameContext { expected, presented } => {
                Self::NameMismatch {
                    peer,
                    expected: expected.to_str().into_owned(),
                    presented: presented.join(", "),
                }
            }
            CertificateError::Other(other) => match other.0.downcast_ref::<WrongIdentity>() {
                Some(WrongIdentity { expected, presented }) => Self::IdentityMismatch {
                    peer,
                    expected: expected.clone(),
                    presented: presented.join(", "),
                },
                None => {
                    let source = rustls::Error::InvalidCertificate(CertificateError::Other(other));
                    Self::Tls { peer, source }
                }
            },
            other => Self::Tls { peer, source: rustls::Error::InvalidCertificate(other) },
        }
    }
}

/// How much later the second time is, in the unit that says it best.
fn distance(from: UnixTime, to: UnixTime) -> String {
    match to.as_secs().saturating_sub(from.as_secs()) {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

/// The day of a certificate's date.
fn date(time: UnixTime) -> String {
    i64::try_from(time.as_secs())
        .ok()
        .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok())
        .map_or_else(|| "a day beyond the calendar".into(), |time| time.date().to_string())
}
