//! The client's side of the control socket.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vmferry_transport::{Address, TransportError, connected_socket};

use super::request::{ControlError, Request};
use super::{MAX_LINE_BYTES, descriptors};

/// A request that was not answered with `ok`.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No VMM listens there.
    #[error("no guest listens on {path}: `vmferry status` lists the guests of this host")]
    NoGuest {
        /// The socket.
        path: PathBuf,
    },
    /// The socket failed.
    #[error("the control socket {path} failed")]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The VMM went away before it answered.
    #[error("the guest's VMM at {path} ended before it answered")]
    Vanished {
        /// The socket.
        path: PathBuf,
    },
    /// What came back is not this protocol.
    #[error("the answer from {path} can't be read: {reason}")]
    BadAnswer {
        /// The socket.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A socket that the request names is unusable.
    #[error(transparent)]
    Socket(#[from] TransportError),
    /// The VMM said no.
    #[error(transparent)]
    Refused(#[from] ControlError),
}

/// This process's sockets that the request names by their numbers: they go with it.
fn sockets(request: &Request) -> Result<Vec<OwnedFd>, TransportError> {
    match request {
        Request::Migrate(migrate) => match migrate.to.parse() {
            Ok(Address::Fd(numbers)) => numbers.into_iter().map(connected_socket).collect(),
            _ => Ok(Vec::new()),
        },
        _ => Ok(Vec::new()),
    }
}

/// Sends a request and waits for the answer, however long it takes; `event` is called with each
/// event in between.
///
/// # Errors
/// See [`ClientError`].
pub fn call(
    path: &Path,
    request: &Request,
    event: &mut dyn FnMut(Value),
) -> Result<Value, ClientError> {
    let failed = |source| ClientError::Io { path: path.to_owned(), source };
    let stream = UnixStream::connect(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ClientError::NoGuest { path: path.to_owned() }
        }
        _ => failed(error),
    })?;
    let bad = |reason: String| ClientError::BadAnswer { path: path.to_owned(), reason };
    let mut line = serde_json::to_string(request).map_err(|error| bad(error.to_string()))?;
    line.push('\n');
    descriptors::send(&stream, line.as_bytes(), &sockets(request)?).map_err(failed)?;
    let mut reader = BufReader::new(&stream);
    loop {
        line.clear();
        match reader.by_ref().take(MAX_LINE_BYTES as u64).read_line(&mut line) {
            Ok(0) => return Err(ClientError::Vanished { path: path.to_owned() }),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Err(ClientError::Vanished { path: path.to_owned() });
            }
            Err(error) => return Err(failed(error)),
        }
        let mut answer: Value =
            serde_json::from_str(&line).map_err(|error| bad(error.to_string()))?;
        if let Some(value) = answer.get_mut("event") {
            event(value.take());
        } else if let Some(value) = answer.get_mut("ok") {
            return Ok(value.take());
        } else if let Some(value) = answer.get_mut("error") {
            let error = serde_json::from_value(value.take());
            return Err(error.map_or_else(|error| bad(error.to_string()), ClientError::Refused));
        } else {
            return Err(bad("neither event, ok nor error".into()));
        }
    }
}
