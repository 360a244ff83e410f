//! Reasons for the end of a call.

use std::error::Error;
use std::fmt;
use std::io;

use tonic::Status;

/// Why nothing more can be read or written.
#[derive(Clone, Debug)]
pub enum Failure {
    /// This side closed the channel.
    Closed,
    /// A write timed out, so the stream is incomplete from there on.
    Torn,
    /// The peer, or a proxy in between, ended the call.
    Status(Status),
    /// TLS failed on this side, or the peer reported a TLS failure.
    Tls(rustls::Error),
    /// The call violated the rules of HTTP/2 or of this protocol.
    Protocol(String),
    /// The link was cut.
    Cut(String),
    /// The connection ended, and the reason is reported elsewhere.
    Ended,
}

impl Failure {
    /// Converts an error of the socket or its TLS session.
    pub fn of_socket(error: &io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(tls) => Self::Tls(tls.clone()),
            None if error.kind() == io::ErrorKind::UnexpectedEof => {
                Self::Cut("the other side closed the connection".into())
            }
            None => Self::Cut(error.to_string()),
        }
    }

    /// Converts an error of hyper, by its last cause. Errors of the socket have lost their cause by
    /// then.
    pub fn of_call(error: &(dyn Error + 'static)) -> Self {
        let mut last = error;
        while let Some(cause) = last.source() {
            last = cause;
        }
        Self::Protocol(last.to_string())
    }

    /// The failure as the error of a read.
    pub fn to_read_error(&self) -> io::Error {
        match self {
            Self::Cut(_) | Self::Ended => {
                io::Error::new(io::ErrorKind::UnexpectedEof, self.clone())
            }
            _ => self.to_write_error(),
        }
    }

    /// The failure as the error of a write.
    pub fn to_write_error(&self) -> io::Error {
        match self {
            // Unwrapped, because callers look for a `rustls::Error` here.
            Self::Tls(error) => io::Error::other(error.clone()),
            Self::Closed => io::Error::new(io::ErrorKind::NotConnected, self.clone()),
            Self::Status(_) | Self::Protocol(_) => {
                io::Error::new(io::ErrorKind::ConnectionAborted, self.clone())
            }
            Self::Torn | Self::Cut(_) | Self::Ended => {
                io::Error::new(io::ErrorKind::BrokenPipe, self.clone())
            }
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("this side closed the channel"),
            Self::Torn => f.write_str("an earlier write took too long"),
            Self::Status(status) => {
                write!(
                    f,
                    "the other side ended the call: {} ({:?})",
                    status.message(),
                    status.code()
                )
            }
            Self::Tls(error) => error.fmt(f),
            Self::Protocol(what) => write!(f, "the call failed: {what}"),
            Self::Cut(what) => write!(f, "the call was cut: {what}"),
            Self::Ended => f.write_str("the connection has ended"),
        }
    }
}

impl Error for Failure {}
