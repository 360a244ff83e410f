//! Conversion of TLS, certificate and I/O errors.

use std::io;

use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError};
use time::OffsetDateTime;

use super::TransportError;
use crate::wrong_identity::WrongIdentity;

impl TransportError {
    /// Converts an I/O error of a channel. TLS errors inside it are reported by their cause.
    #[must_use]
    pub fn from_io(error: io::Error, peer: &str) -> Self {
        let peer = peer.to_owned();
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(tls) => Self::from_tls(tls.clone(), peer),
            None => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    Self::TimedOut { peer, what: "a read or write" }
                }
                _ => Self::Io { peer, source: error },
            },
        }
    }

    /// The peer speaks TLS for another application.
    pub(crate) fn other_protocol(peer: String) -> Self {
        Self::NotTls { peer, what: "TLS, but not vmferry's protocol inside".into() }
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
                Self::NotTls { peer, what: "a protocol that is not TLS".into() }
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
                    problem: format!("has been out of date since {day}, {ago} ago"),
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

/// The time from `from` to `to`, in a suitable unit.
fn distance(from: UnixTime, to: UnixTime) -> String {
    match to.as_secs().saturating_sub(from.as_secs()) {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

/// The date of a certificate's time.
fn date(time: UnixTime) -> String {
    i64::try_from(time.as_secs())
        .ok()
        .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok())
        .map_or_else(|| "an unknown date".into(), |time| time.date().to_string())
}
