//! Why a call ended.

use std::error::Error;
use std::fmt;
use std::io;

use tonic::Status;

/// Why nothing more can be read or written.
#[derive(Clone, Debug)]
pub enum Failure {
    /// This side closed the channel.
    Closed,
    /// A write took too long, and what followed would not make sense.
    Torn,
    /// The peer, or a proxy on the way, ended the call.
    Status(Status),
    /// TLS failed, on this side or as the peer says.
    Tls(rustls::Error),
    /// The call broke HTTP/2's rules or ours.
    Protocol(String),
    /// The link was cut.
    Cut(String),
    /// The connection has ended, for a reason that is told elsewhere.
    Ended,
}

impl Failure {
    /// What the socket or its TLS reports.
    pub fn of_socket(error: &io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(tls) => Self::Tls(tls.clone()),
            None if error.kind() == io::ErrorKind::UnexpectedEof => {
                Self::Cut("the other side closed the connection".into())
            }
            None => Self::Cut(error.to_string()),
        }
    }

    /// What hyper reports, by its last cause. The socket's errors have lost theirs on the way here.
    pub fn of_call(error: &(dyn Error + 'static)) -> Self {
        let mut last = error;
        while let Some(cause) = last.source() {
            last = cause;
        }
        Self::Protocol(last.to_string())
    }

    /// As the error of a read.
    pub fn to_read_error(&self) -> io::Error {
        match self {
            Self::Cut(_) | Self::Ended => {
                io::Error::new(io::ErrorKind::UnexpectedEof, self.clone())
            }
            _ => self.to_write_error(),
        }
    }

    /// As the error of a write.
    pub fn to_write_error(&self) -> io::Error {
        match self {
            // Those who look for TLS errors look for them here.
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
