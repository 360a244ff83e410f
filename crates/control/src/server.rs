//! The server side of the control socket, in the VMM's process.

mod replies;

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use serde_json::Value;
use vmferry_transport::{SocketFile, connect_unix, listen_unix};

use self::replies::NoRequest;
pub use self::replies::Replies;
use crate::error::{ControlError, ErrorCode};
use crate::request::Request;

/// How long to try to connect to a listener whose queue is full. Its process is alive, and may be
/// stopped.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers requests. Each connection has its own thread.
pub trait Handler: Send + Sync + 'static {
    /// Carries out a request. Send events through `replies` meanwhile.
    ///
    /// # Errors
    /// The error that the client receives.
    fn handle(&self, request: Request, replies: &Replies) -> Result<Answer, ControlError>;
}

/// The answer to a successful request.
pub struct Answer {
    value: Value,
    afterwards: Option<Box<dyn FnOnce() + Send>>,
}

impl Answer {
    /// An answer with an action to run after it was sent, such as ending the process.
    pub fn and_then(value: Value, afterwards: impl FnOnce() + Send + 'static) -> Self {
        Self { value, afterwards: Some(Box::new(afterwards)) }
    }
}

impl From<Value> for Answer {
    fn from(value: Value) -> Self {
        Self { value, afterwards: None }
    }
}

/// Why the socket could not be created.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Another process listens on the path.
    #[error("a guest listens on {path} already: choose another name, or end that guest")]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The path names a file that is not a socket.
    #[error("{path} exists and is not a socket: remove it or choose another name")]
    NotASocket {
        /// The file.
        path: PathBuf,
    },
    /// An operating system error.
    #[error("can't listen on {path}")]
    Io {
        /// The socket.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
}

/// A control socket that listens, and has no thread yet that accepts connections. Dropping it
/// removes the socket's file.
#[derive(Debug)]
pub struct BoundServer {
    path: PathBuf,
    listener: UnixListener,
    file: SocketFile,
}

/// A listening control socket. Dropping it removes the socket's file.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    listener: Arc<UnixListener>,
    file: Option<SocketFile>,
    closing: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl BoundServer {
    /// Listens on `path`. Replaces the socket of a VMM that died, but never one that is in use.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn bind(path: &Path) -> Result<Self, ServerError> {
        let failed = |source| ServerError::Io { path: path.to_owned(), source };
        // `listen_unix` creates the file with its final mode, so a process in a sandbox, which may
        // not change modes, can bind too.
        let (listener, file) = listen_unix(path).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse if is_not_a_socket(path) => {
                ServerError::NotASocket { path: path.to_owned() }
            }
            io::ErrorKind::AddrInUse => ServerError::InUse { path: path.to_owned() },
            _ => failed(error),
        })?;
        Ok(Self { path: path.to_owned(), listener, file })
    }

    /// Answers requests from now on.
    ///
    /// # Errors
    /// No thread can be created.
    pub fn serve(self, handler: Arc<dyn Handler>) -> Result<Server, ServerError> {
        let Self { path, listener, file } = self;
        let listener = Arc::new(listener);
        let accepting = Arc::clone(&listener);
        let closing = Arc::new(AtomicBool::new(false));
        let closed = Arc::clone(&closing);
        let acceptor = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || accept(&accepting, &handler, &closed))
            .map_err(|source| ServerError::Io { path: path.clone(), source })?;
        Ok(Server { path, listener, file: Some(file), closing, acceptor: Some(acceptor) })
    }
}

impl Server {
    /// Listens on `path`, and answers requests. See [`BoundServer::bind`].
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn bind(path: &Path, handler: Arc<dyn Handler>) -> Result<Self, ServerError> {
        BoundServer::bind(path)?.serve(handler)
    }

    /// The socket's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Remove the file while the socket still listens. Afterwards another process may bind the
        // name, and its file must not be removed.
        self.file = None;
        self.closing.store(true, Ordering::Release);
        // Wakes the acceptor, which then sees `closing`.
        let woken = shutdown(&self.listener, Shutdown::Both).is_ok();
        if let Some(acceptor) = self.acceptor.take()
            && woken
        {
            let _ = acceptor.join();
        }
    }
}

/// Whether a process listens on a control socket.
#[must_use]
pub fn is_live(path: &Path) -> bool {
    match connect_unix(path, PROBE_TIMEOUT) {
        Ok(_) => true,
        // The listener does not accept connections, for example because its process is stopped.
        Err(error) => error.kind() == io::ErrorKind::TimedOut,
    }
}

fn is_not_a_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|file| !file.file_type().is_socket())
}

fn accept(listener: &UnixListener, handler: &Arc<dyn Handler>, closing: &AtomicBool) {
    for stream in listener.incoming() {
        if closing.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else { continue };
        let Ok(replies) = Replies::new(stream).map(Arc::new) else { continue };
        let handler = Arc::clone(handler);
        let served = Arc::clone(&replies);
        let spawned = std::thread::Builder::new()
            .name("control-client".into())
            .spawn(move || serve(&served, handler.as_ref()));
        if let Err(error) = spawned {
            refuse_without_thread(&replies, &error);
        }
    }
}

/// Tells the client. A client whose connection is closed without an answer would report that the
/// guest is gone.
fn refuse_without_thread(replies: &Replies, error: &io::Error) {
    // Read the request first: a client that is still sending would not read the answer.
    let _ = replies.request();
    let message = format!("the guest's VMM has no thread for the request; try again: {error}");
    let _ = replies.refuse(503, &ControlError::new(ErrorCode::Internal, message));
}

fn serve(replies: &Replies, handler: &dyn Handler) {
    let answer = match replies.request() {
        Ok(request) => handler.handle(request, replies),
        Err(NoRequest::OpenApi) => {
            let _ = replies.body(200, crate::OPENAPI.as_bytes());
            return;
        }
        Err(NoRequest::Http(error)) => {
            let refused = ControlError::new(ErrorCode::BadRequest, vmferry::chain(&error));
            let _ = replies.refuse(error.status(), &refused);
            return;
        }
        Err(NoRequest::Unknown(error)) => Err(error),
    };
    // A client that has gone does not need the answer.
    let _ = match &answer {
        Ok(answer) => replies.accept(&answer.value),
        Err(error) => replies.refuse(error.code.status(), error),
    };
    if let Some(afterwards) = answer.ok().and_then(|answer| answer.afterwards) {
        afterwards();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use serde_json::json;

    use super::*;
    use crate::{ClientError, call};

    /// A handler that answers with its number.
    struct NumberedHandler(usize);

    impl Handler for NumberedHandler {
        fn handle(&self, _: Request, _: &Replies) -> Result<Answer, ControlError> {
            Ok(json!(self.0).into())
        }
    }

    fn who_answers(path: &Path) -> Option<usize> {
        let answer = call(path, &Request::Status, &mut |_| {}).ok()?;
        answer.as_u64().map(|number| number as usize)
    }

    #[test]
    fn bind_lets_one_of_several_rivals_win() {
        const RIVALS: usize = 4;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        for round in 0..200 {
            // In every other round, a dead server has left its file.
            drop((round % 2 == 0).then(|| UnixListener::bind(&path).unwrap()));
            let begin = Barrier::new(RIVALS);
            let bind = |number: usize| {
                begin.wait();
                Server::bind(&path, Arc::new(NumberedHandler(number)))
            };
            let results: Vec<_> = std::thread::scope(|scope| {
                let bind = &bind;
                let rivals: Vec<_> =
                    (0..RIVALS).map(|number| scope.spawn(move || bind(number))).collect();
                rivals.into_iter().map(|rival| rival.join().unwrap()).collect()
            });
            let winners: Vec<usize> =
                (0..RIVALS).filter(|number| results[*number].is_ok()).collect();
            for error in results.iter().filter_map(|result| result.as_ref().err()) {
                assert!(matches!(error, ServerError::InUse { .. }), "round {round}: {error}");
            }
            assert_eq!(winners.len(), 1, "round {round}");
            assert_eq!(who_answers(&path), Some(winners[0]), "round {round}");
            drop(results);
            assert!(!path.exists(), "round {round}");
        }
    }

    #[test]
    fn drop_keeps_the_socket_of_a_successor() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        let first = Server::bind(&path, Arc::new(NumberedHandler(1))).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Server::bind(&path, Arc::new(NumberedHandler(2))).unwrap();
        drop(first);
        assert_eq!(who_answers(&path), Some(2));
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn bind_keeps_a_file_that_is_not_a_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        std::fs::write(&path, "precious").unwrap();
        let error = Server::bind(&path, Arc::new(NumberedHandler(1))).unwrap_err();
        assert!(matches!(error, ServerError::NotASocket { .. }), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn server_without_threads_answers_with_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let replies = Replies::new(listener.accept().unwrap().0).unwrap();
                refuse_without_thread(&replies, &rustix::io::Errno::AGAIN.into());
            });
            call(&path, &Request::Status, &mut |_| {}).unwrap_err()
        });
        let ClientError::Refused(error) = error else { panic!("{error:?}") };
        assert_eq!(error.code, ErrorCode::Internal);
        assert!(error.message.contains("no thread for the request; try again"), "{error}");
    }
}
