//! The server's side of the control socket, in the VMM's process.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
use serde::Serialize;
use serde_json::{Value, json};
use vmferry_transport::{SocketFile, connect_unix, listen_unix};

use crate::descriptors::Receiver;
use crate::error::{ControlError, ErrorCode};
use crate::http::{HttpError, answer_head, read_request};
use crate::request::{OPENAPI_PATH, Request};

/// How long a client may take for its request, and to take an answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long it is tried to reach a listener whose queue is full: it is alive, and may be stopped.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers requests. Each connection has a thread of its own.
pub trait Handler: Send + Sync + 'static {
    /// Carries out a request; events go through `replies` meanwhile.
    ///
    /// # Errors
    /// What the client is told.
    fn handle(&self, request: Request, replies: &Replies) -> Result<Answer, ControlError>;
}

/// The answer to a request that was carried out.
pub struct Answer {
    value: Value,
    afterwards: Option<Box<dyn FnOnce() + Send>>,
}

impl Answer {
    /// An answer, and something to do once the client has it, such as ending the process.
    pub fn and_then(value: Value, afterwards: impl FnOnce() + Send + 'static) -> Self {
        Self { value, afterwards: Some(Box::new(afterwards)) }
    }
}

impl From<Value> for Answer {
    fn from(value: Value) -> Self {
        Self { value, afterwards: None }
    }
}

/// The socket could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Someone listens there.
    #[error("a guest listens on {path} already: choose another name, or end that guest")]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// A file that is no socket stands there.
    #[error("{path} exists and is no socket: remove it or choose another name")]
    NotASocket {
        /// The file.
        path: PathBuf,
    },
    /// The system refused.
    #[error("can't listen on {path}")]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A listening control socket; removed when dropped.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    listener: Arc<UnixListener>,
    file: Option<SocketFile>,
    closing: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on `path`. The socket of a VMM that died is replaced, that of a living one is not.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn bind(path: &Path, handler: Arc<dyn Handler>) -> Result<Self, ServerError> {
        let failed = |source| ServerError::Io { path: path.to_owned(), source };
        // The file has the mode that it keeps from the first moment on: a process that may change no file's mode can do it.
        let (listener, file) = listen_unix(path).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse if is_something_else(path) => {
                ServerError::NotASocket { path: path.to_owned() }
            }
            io::ErrorKind::AddrInUse => ServerError::InUse { path: path.to_owned() },
            _ => failed(error),
        })?;
        let listener = Arc::new(listener);
        let accepting = Arc::clone(&listener);
        let closing = Arc::new(AtomicBool::new(false));
        let closed = Arc::clone(&closing);
        let acceptor = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || accept(&accepting, &handler, &closed))
            .map_err(failed)?;
        let (path, file, acceptor) = (path.to_owned(), Some(file), Some(acceptor));
        Ok(Self { path, listener, file, closing, acceptor })
    }

    /// The socket's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The file goes while the socket listens: afterwards somebody else may take the name, and would lose theirs.
        self.file = None;
        self.closing.store(true, Ordering::Release);
        // Wakes the acceptor, which then sees that it shall end.
        let woken = shutdown(&self.listener, Shutdown::Both).is_ok();
        if let Some(acceptor) = self.acceptor.take()
            && woken
        {
            let _ = acceptor.join();
        }
    }
}

/// Whether someone listens on a control socket.
#[must_use]
pub fn is_live(path: &Path) -> bool {
    match connect_unix(path, PROBE_TIMEOUT) {
        Ok(_) => true,
        // Someone listens and takes nobody in, as one that is stopped.
        Err(error) => error.kind() == io::ErrorKind::TimedOut,
    }
}

fn is_something_else(path: &Path) -> bool {
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
            refuse_for_want_of_a_thread(&replies, &error);
        }
    }
}

/// Says so: a client whose connection is merely closed takes the guest for gone.
fn refuse_for_want_of_a_thread(replies: &Replies, error: &io::Error) {
    // It is read first: whoever is still sending does not look for an answer.
    let _ = replies.request();
    let message = format!("the guest's VMM has no thread for the request, try again: {error}");
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
    // A client that has gone does not want the answer.
    let _ = match &answer {
        Ok(answer) => replies.accept(&answer.value),
        Err(error) => replies.refuse(error.code.status(), error),
    };
    if let Some(afterwards) = answer.ok().and_then(|answer| answer.afterwards) {
        afterwards();
    }
}

/// Why there is nothing to carry out.
enum NoRequest {
    /// The document is asked for.
    OpenApi,
    /// It can't be read.
    Http(HttpError),
    /// It is none that this release knows.
    Unknown(ControlError),
}

/// The way back to the client of one request.
#[derive(Debug)]
pub struct Replies {
    stream: UnixStream,
    descriptors: Mutex<Vec<OwnedFd>>,
    /// Whether the answer has begun, so that it is lines from now on. Held while something is written: the head comes
    /// first, and lines come whole.
    streaming: Mutex<bool>,
}

impl Replies {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
        Ok(Self { stream, descriptors: Mutex::default(), streaming: Mutex::default() })
    }

    fn request(&self) -> Result<Request, NoRequest> {
        let mut receiver = Receiver::new(&self.stream);
        let go_on = || (&self.stream).write_all(b"HTTP/1.1 100 Continue\r\n\r\n");
        let read = read_request(&mut receiver, go_on);
        *self.descriptors() = std::mem::take(&mut receiver.descriptors);
        let raw = read.map_err(NoRequest::Http)?;
        if (raw.method.as_str(), raw.path.as_str()) == ("GET", OPENAPI_PATH) {
            return Err(NoRequest::OpenApi);
        }
        Request::read(&raw).map_err(NoRequest::Unknown)
    }

    /// Answers with a value, as the last line if there were others.
    fn accept(&self, value: &Value) -> io::Result<()> {
        if *self.streaming() {
            return self.line(&json!({ "ok": value }));
        }
        self.body(200, format!("{value}\n").as_bytes())
    }

    /// Answers with a failure, as the last line if there were others.
    fn refuse(&self, status: u16, error: &ControlError) -> io::Result<()> {
        let error = json!({ "error": error });
        if *self.streaming() {
            return self.line(&error);
        }
        self.body(status, format!("{error}\n").as_bytes())
    }

    fn body(&self, status: u16, body: &[u8]) -> io::Result<()> {
        let mut answer = answer_head(status, "application/json", Some(body.len())).into_bytes();
        answer.extend_from_slice(body);
        (&self.stream).write_all(&answer)
    }

    fn streaming(&self) -> MutexGuard<'_, bool> {
        self.streaming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn descriptors(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.descriptors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptors that came with the request, in order; none when they were taken before.
    pub fn take_descriptors(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors())
    }

    /// Sends an event. A client that does not read, as one that is stopped, misses it: a migration waits for nobody
    /// who watches it.
    ///
    /// # Errors
    /// If the client has gone.
    pub fn event(&self, event: &impl Serialize) -> io::Result<()> {
        if self.takes_more()? { self.line(&json!({ "event": event })) } else { Ok(()) }
    }

    /// Whether the client has read most of what it was sent. A Unix socket that can be written to has three quarters of
    /// its buffer free, far more than the longest line, so that a write does not wait.
    fn takes_more(&self) -> io::Result<bool> {
        let mut polled = [PollFd::new(&self.stream, PollFlags::OUT)];
        Ok(poll(&mut polled, Some(&Timespec::default()))? > 0)
    }

    /// Sends a line, the first one behind the head of the answer.
    fn line(&self, value: &Value) -> io::Result<()> {
        let mut line = value.to_string();
        line.push('\n');
        let mut streaming = self.streaming();
        if !std::mem::replace(&mut *streaming, true) {
            line.insert_str(0, &answer_head(200, "application/x-ndjson", None));
        }
        (&self.stream).write_all(line.as_bytes())
    }

    /// Calls `gone` once, from another thread, when the client closes its connection or dies.
    /// Until the returned guard is dropped.
    ///
    /// # Errors
    /// If the system has no thread or descriptor left.
    pub fn when_gone(&self, gone: impl FnOnce() + Send + 'static) -> io::Result<Lease> {
        let stream = self.stream.try_clone()?;
        stream.set_read_timeout(None)?;
        let over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&over);
        let watching = stream.try_clone()?;
        let watcher = std::thread::Builder::new().name("lease".into()).spawn(move || {
            await_end(&watching);
            if !ended.load(Ordering::Acquire) {
                gone();
            }
        })?;
        Ok(Lease { stream, over, watcher: Some(watcher) })
    }
}

/// Returns when the client has closed its connection or has died. What it sends after its request
/// is read and left alone: a connection carries one request, and a client that sends more is still
/// there.
fn await_end(mut client: &UnixStream) {
    let mut ignored = [0; 4096];
    loop {
        match client.read(&mut ignored) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Watches a client until it is dropped; see [`Replies::when_gone`].
#[derive(Debug)]
pub struct Lease {
    stream: UnixStream,
    over: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        // Only the direction that is watched: the answer is still to be sent.
        let _ = self.stream.shutdown(std::net::Shutdown::Read);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::{ClientError, call};

    /// Says who it is.
    struct Named(usize);

    impl Handler for Named {
        fn handle(&self, _: Request, _: &Replies) -> Result<Answer, ControlError> {
            Ok(json!(self.0).into())
        }
    }

    fn who_answers(path: &Path) -> Option<usize> {
        let answer = call(path, &Request::Status, &mut |_| {}).ok()?;
        answer.as_u64().map(|number| number as usize)
    }

    #[test]
    fn of_those_who_want_a_name_at_once_one_has_it() {
        const RIVALS: usize = 4;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        for round in 0..200 {
            // One that died here has left its file.
            drop((round % 2 == 0).then(|| UnixListener::bind(&path).unwrap()));
            let begin = Barrier::new(RIVALS);
            let bind = |number: usize| {
                begin.wait();
                Server::bind(&path, Arc::new(Named(number)))
            };
            let results: Vec<_> = std::thread::scope(|scope| {
                let bind = &bind;
                let rivals: Vec<_> =
                    (0..RIVALS).map(|number| scope.spawn(move || bind(number))).collect();
                rivals.into_iter().map(|rival| rival.join().unwrap()).collect()
            });
            let have: Vec<usize> = (0..RIVALS).filter(|number| results[*number].is_ok()).collect();
            for error in results.iter().filter_map(|result| result.as_ref().err()) {
                assert!(matches!(error, ServerError::InUse { .. }), "round {round}: {error}");
            }
            assert_eq!(have.len(), 1, "round {round}");
            assert_eq!(who_answers(&path), Some(have[0]), "round {round}");
            drop(results);
            assert!(!path.exists(), "round {round}");
        }
    }

    #[test]
    fn a_server_ends_and_leaves_its_successor_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        let first = Server::bind(&path, Arc::new(Named(1))).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Server::bind(&path, Arc::new(Named(2))).unwrap();
        drop(first);
        assert_eq!(who_answers(&path), Some(2));
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        std::fs::write(&path, "precious").unwrap();
        let error = Server::bind(&path, Arc::new(Named(1))).unwrap_err();
        assert!(matches!(error, ServerError::NotASocket { .. }), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_client_for_whom_there_is_no_thread_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("web.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let replies = Replies::new(listener.accept().unwrap().0).unwrap();
                refuse_for_want_of_a_thread(&replies, &rustix::io::Errno::AGAIN.into());
            });
            call(&path, &Request::Status, &mut |_| {}).unwrap_err()
        });
        let ClientError::Refused(error) = error else { panic!("{error:?}") };
        assert_eq!(error.code, ErrorCode::Internal);
        assert!(error.message.contains("no thread for the request, try again"), "{error}");
    }

    /// A lease on a client, and what tells that the lease has ended.
    fn leased(near: &Replies) -> (Lease, std::sync::mpsc::Receiver<()>) {
        let (gone, is_gone) = std::sync::mpsc::channel();
        (near.when_gone(move || gone.send(()).unwrap()).unwrap(), is_gone)
    }

    #[test]
    fn lease_goes_on_whatever_the_client_sends_and_ends_with_its_connection() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let near = Replies::new(near).unwrap();
        let (_lease, is_gone) = leased(&near);
        // More than a socket holds: all of it is sent only while it is read.
        far.set_write_timeout(Some(CLIENT_TIMEOUT)).unwrap();
        far.write_all(&b"PATCH /api/v1/migration HTTP/1.1\r\n\r\n".repeat(100_000)).unwrap();
        assert_eq!(is_gone.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
        drop(far);
        is_gone.recv_timeout(CLIENT_TIMEOUT).expect("the end of the connection ends the lease");
    }

    #[test]
    fn lease_ends_when_the_client_sends_no_more() {
        let (near, far) = UnixStream::pair().unwrap();
        let near = Replies::new(near).unwrap();
        let (_lease, is_gone) = leased(&near);
        far.shutdown(std::net::Shutdown::Write).unwrap();
        is_gone.recv_timeout(CLIENT_TIMEOUT).expect("as of one that was killed");
    }

    #[test]
    fn lease_that_is_dropped_is_not_ended() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let near = Replies::new(near).unwrap();
        let (lease, is_gone) = leased(&near);
        far.write_all(b"more").unwrap();
        drop(lease);
        assert!(is_gone.recv().is_err(), "nobody was told of an end");
    }

    #[test]
    fn a_client_that_reads_nothing_holds_no_migration_up() {
        let (near, _far) = UnixStream::pair().unwrap();
        let replies = Replies::new(near).unwrap();
        replies.stream.set_write_timeout(Some(Duration::from_millis(1))).unwrap();
        let event = json!({ "event": "progress", "phase": "x".repeat(200) });
        for _ in 0..10_000 {
            replies.event(&event).unwrap();
        }
        // Negative control: what waits for the client does so in vain, as its buffer can be filled.
        let error = (0..10_000).find_map(|_| replies.line(&event).err()).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
