//! The client side of the control socket.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use vmferry_transport::{Address, TransportError, connect_unix, connected_socket};

use crate::descriptors::{self, MAX_DESCRIPTORS};
use crate::error::ControlError;
use crate::http::{answer_status, request_text};
use crate::migrate::TlsFiles;
use crate::request::Request;

/// How long a VMM may take to answer. It usually takes milliseconds, or 0.5 s if the guest is asked
/// for statistics.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum length of a line in an answer, in bytes. The statistics of a migration take half a
/// kilobyte per round.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// How long a migration may send nothing. It reports progress five times a second.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a request was not answered with a value.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No VMM listens on the socket.
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
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The VMM runs but does not answer.
    #[error(
        "the guest's VMM at {path}{} has not answered for {} s: it is stopped or stuck; if it is \
        stopped, `kill -CONT` resumes it",
        process.map_or_else(String::new, |pid| format!(" (process {pid})")),
        after.as_secs()
    )]
    Silent {
        /// The socket.
        path: PathBuf,
        /// The VMM's process, if known.
        process: Option<i32>,
        /// How long the client waited.
        after: Duration,
    },
    /// The VMM exited before it answered.
    #[error("the guest's VMM at {path} ended before it answered")]
    Vanished {
        /// The socket.
        path: PathBuf,
    },
    /// The answer does not follow this API.
    #[error("the answer from {path} can't be read: {reason}")]
    BadAnswer {
        /// The socket.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A socket that the request names is unusable.
    #[error(transparent)]
    Socket(#[from] TransportError),
    /// The VMM refused the request or failed.
    #[error(transparent)]
    Refused(#[from] ControlError),
}

/// The descriptors to send with a request: the sockets that it names by number, or the opened files
/// of the identity that it names, because the VMM may not be able to open them.
fn companions(request: &Request) -> Result<Vec<OwnedFd>, TransportError> {
    let Request::Migrate(migrate) = request else { return Ok(Vec::new()) };
    if let Ok(Address::Fd(numbers)) = migrate.to.parse() {
        return numbers.into_iter().map(connected_socket).collect();
    }
    let Some(files) = migrate.tls.as_ref().map(TlsFiles::files) else { return Ok(Vec::new()) };
    // The VMM opens the remaining files from the first failure on, and reports the error.
    let opened = files.paths().map_while(|path| File::open(path).ok());
    Ok(opened.take(MAX_DESCRIPTORS).map(OwnedFd::from).collect())
}

/// Sends a request and waits for the answer. Calls `event` for each event in between. A migration
/// has no overall time limit while it reports progress.
///
/// # Errors
/// See [`ClientError`].
pub fn call(
    path: &Path,
    request: &Request,
    event: &mut dyn FnMut(Value),
) -> Result<Value, ClientError> {
    let timeout = match request {
        Request::Migrate(_) => PROGRESS_TIMEOUT,
        Request::Estimate(estimate) => estimate.time + ANSWER_TIMEOUT,
        _ => ANSWER_TIMEOUT,
    };
    let failed = |source| ClientError::Io { path: path.to_owned(), source };
    let silent = |process| ClientError::Silent { path: path.to_owned(), process, after: timeout };
    let stream = connect_unix(path, timeout).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ClientError::NoGuest { path: path.to_owned() }
        }
        io::ErrorKind::TimedOut => silent(None),
        _ => failed(error),
    })?;
    stream.set_read_timeout(Some(timeout)).map_err(failed)?;
    stream.set_write_timeout(Some(timeout)).map_err(failed)?;
    let bad = |reason: String| ClientError::BadAnswer { path: path.to_owned(), reason };
    let (method, target, body) = request.parts();
    let text = request_text(method, target, &body);
    descriptors::send(&stream, text.as_bytes(), &companions(request)?).map_err(|error| {
        // The VMM exited after the connection and before the request.
        let gone =
            matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset);
        if gone { ClientError::NoGuest { path: path.to_owned() } } else { failed(error) }
    })?;
    let mut answer = Answer { path, timeout, reader: BufReader::new(&stream) };
    let status = answer.head()?;
    let mut line = String::new();
    loop {
        line.clear();
        if answer.line(&mut line)? == 0 {
            return Err(ClientError::Vanished { path: path.to_owned() });
        }
        let value: Value = serde_json::from_str(&line).map_err(|error| bad(error.to_string()))?;
        match Line::of(value, status, matches!(request, Request::Migrate(_))) {
            Line::Event(value) => event(value),
            Line::Done(value) => return Ok(value),
            Line::Refused(value) => {
                let error = serde_json::from_value(value);
                return Err(error.map_or_else(|error| bad(error.to_string()), ClientError::Refused));
            }
        }
    }
}

/// A line of an answer.
enum Line {
    Event(Value),
    Done(Value),
    Refused(Value),
}

impl Line {
    /// Classifies a line. A request without events has its value as the whole answer.
    fn of(mut value: Value, status: u16, streamed: bool) -> Self {
        if let Some(error) = value.get_mut("error").filter(|_| status != 200 || streamed) {
            return Self::Refused(error.take());
        }
        if streamed {
            if let Some(event) = value.get_mut("event") {
                return Self::Event(event.take());
            }
            if let Some(done) = value.get_mut("ok") {
                return Self::Done(done.take());
            }
        }
        Self::Done(value)
    }
}

/// An answer that is being read.
struct Answer<'a> {
    path: &'a Path,
    timeout: Duration,
    reader: BufReader<&'a UnixStream>,
}

impl Answer<'_> {
    /// Reads the head and returns the status.
    fn head(&mut self) -> Result<u16, ClientError> {
        let mut head = String::new();
        loop {
            if self.line(&mut head)? == 0 {
                return Err(ClientError::Vanished { path: self.path.to_owned() });
            }
            let read = answer_status(head.as_bytes()).map_err(|reason| ClientError::BadAnswer {
                path: self.path.to_owned(),
                reason: format!("{reason}: a VMM of another release may listen there"),
            })?;
            if let Some((_, status)) = read {
                return Ok(status);
            }
        }
    }

    /// Appends a line. Returns its length, 0 at the end.
    fn line(&mut self, into: &mut String) -> Result<usize, ClientError> {
        let path = || self.path.to_owned();
        match self.reader.by_ref().take(MAX_LINE_BYTES).read_line(into) {
            Ok(read) => Ok(read),
            // A Unix socket reports this if the other end was closed with unread data, which was
            // the request.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                Err(ClientError::NoGuest { path: path() })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let process = listener(self.reader.get_ref());
                Err(ClientError::Silent { path: path(), process, after: self.timeout })
            }
            Err(source) => Err(ClientError::Io { path: path(), source }),
        }
    }
}

/// The process at the other end of the socket.
fn listener(stream: &UnixStream) -> Option<i32> {
    let credentials = rustix::net::sockopt::socket_peercred(stream).ok()?;
    Some(credentials.pid.as_raw_nonzero().get())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Calls a VMM that `vmm` simulates.
    fn ask(vmm: impl FnOnce(UnixListener) + Send) -> ClientError {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| vmm(listener));
            call(&path, &Request::Status, &mut |_| {}).unwrap_err()
        })
    }

    #[test]
    fn call_reports_no_guest_if_the_vmm_exits_before_reading() {
        // Closes the connection before or after the client's request: `accept` may run at either
        // time.
        for _ in 0..50 {
            let error = ask(|listener| drop(listener.accept().unwrap()));
            assert!(matches!(error, ClientError::NoGuest { .. }), "{error:?}");
            let error = ask(drop);
            assert!(matches!(error, ClientError::NoGuest { .. }), "{error:?}");
        }
    }

    #[test]
    fn call_reports_vanished_if_the_vmm_exits_after_reading() {
        for answer in ["", "HTTP/1.1 200 OK\r\n\r\n"] {
            let error = ask(|listener| {
                let mut stream = listener.accept().unwrap().0;
                assert_ne!(stream.read(&mut [0; 4096]).unwrap(), 0);
                stream.write_all(answer.as_bytes()).unwrap();
            });
            assert!(matches!(error, ClientError::Vanished { .. }), "{error:?}");
        }
    }
}
