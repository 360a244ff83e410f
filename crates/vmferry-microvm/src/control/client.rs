//! The client's side of the control socket.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vmferry_transport::{Address, TransportError, connected_socket};

use super::MAX_LINE_BYTES;
use super::descriptors::{self, MAX_DESCRIPTORS};
use super::request::{ControlError, Request, TlsFiles};

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

/// What goes with a request: this process's sockets that it names by their numbers, or the files of the identity that
/// it names, which the VMM may not be able to open.
fn companions(request: &Request) -> Result<Vec<OwnedFd>, TransportError> {
    let Request::Migrate(migrate) = request else { return Ok(Vec::new()) };
    if let Ok(Address::Fd(numbers)) = migrate.to.parse() {
        return numbers.into_iter().map(connected_socket).collect();
    }
    let Some(files) = migrate.tls.as_ref().map(TlsFiles::files) else { return Ok(Vec::new()) };
    // One that can't be opened, and those behind it, are left to the VMM, which says what is wrong.
    let opened = files.paths().map_while(|path| File::open(path).ok());
    Ok(opened.take(MAX_DESCRIPTORS).map(OwnedFd::from).collect())
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
    descriptors::send(&stream, line.as_bytes(), &companions(request)?).map_err(failed)?;
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
