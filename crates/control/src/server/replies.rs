//! The replies to one request, and the lease of its connection.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde_json::{Value, json};

use crate::descriptors::Receiver;
use crate::error::ControlError;
use crate::http::{HttpError, answer_head, read_request};
use crate::request::{OPENAPI_PATH, Request};

/// How long a client may take to send its request, and to read an answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why there is no request for the handler.
pub(super) enum NoRequest {
    /// The client asks for the OpenAPI document.
    OpenApi,
    /// The request cannot be read.
    Http(HttpError),
    /// This release does not know the request.
    Unknown(ControlError),
}

/// Sends the replies to one request.
#[derive(Debug)]
pub struct Replies {
    stream: UnixStream,
    descriptors: Mutex<Vec<OwnedFd>>,
    /// Whether the head of a streamed answer was sent. Held during each write, so that the head
    /// comes first and lines are not interleaved.
    streaming: Mutex<bool>,
}

impl Replies {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
        Ok(Self { stream, descriptors: Mutex::default(), streaming: Mutex::default() })
    }

    pub(super) fn request(&self) -> Result<Request, NoRequest> {
        let mut receiver = Receiver::new(&self.stream);
        let send_continue = || (&self.stream).write_all(b"HTTP/1.1 100 Continue\r\n\r\n");
        let read = read_request(&mut receiver, send_continue);
        *self.descriptors.lock() = std::mem::take(&mut receiver.descriptors);
        let raw = read.map_err(NoRequest::Http)?;
        if (raw.method.as_str(), raw.path.as_str()) == ("GET", OPENAPI_PATH) {
            return Err(NoRequest::OpenApi);
        }
        Request::read(&raw).map_err(NoRequest::Unknown)
    }

    /// Answers with a value. If lines were sent before, it is the last line.
    pub(super) fn accept(&self, value: &Value) -> io::Result<()> {
        if *self.streaming.lock() {
            return self.line(&json!({ "ok": value }));
        }
        self.body(200, format!("{value}\n").as_bytes())
    }

    /// Answers with an error. If lines were sent before, it is the last line.
    pub(super) fn refuse(&self, status: u16, error: &ControlError) -> io::Result<()> {
        let error = json!({ "error": error });
        if *self.streaming.lock() {
            return self.line(&error);
        }
        self.body(status, format!("{error}\n").as_bytes())
    }

    pub(super) fn body(&self, status: u16, body: &[u8]) -> io::Result<()> {
        let mut answer = answer_head(status, "application/json", Some(body.len())).into_bytes();
        answer.extend_from_slice(body);
        (&self.stream).write_all(&answer)
    }

    /// Takes the descriptors that arrived with the request, in order.
    pub fn take_descriptors(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors.lock())
    }

    /// Sends an event. A client that does not read, for example because it is stopped, misses the
    /// event: a migration must not wait for its observers.
    ///
    /// # Errors
    /// The client has gone.
    pub fn event(&self, event: &impl Serialize) -> io::Result<()> {
        if self.has_room()? { self.line(&json!({ "event": event })) } else { Ok(()) }
    }

    /// Whether the client has read most of what it was sent. A writable Unix socket has three
    /// quarters of its buffer free, far more than the longest line, so a write does not block.
    fn has_room(&self) -> io::Result<bool> {
        let mut polled = [PollFd::new(&self.stream, PollFlags::OUT)];
        Ok(poll(&mut polled, Some(&Timespec::default()))? > 0)
    }

    /// Sends a line. The head of the answer precedes the first one.
    fn line(&self, value: &Value) -> io::Result<()> {
        let mut line = value.to_string();
        line.push('\n');
        let mut streaming = self.streaming.lock();
        if !std::mem::replace(&mut *streaming, true) {
            line.insert_str(0, &answer_head(200, "application/x-ndjson", None));
        }
        (&self.stream).write_all(line.as_bytes())
    }

    /// Calls `gone` once, from another thread, when the client closes its connection or dies,
    /// unless the returned lease was dropped before.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub fn when_gone(&self, gone: impl FnOnce() + Send + 'static) -> io::Result<Lease> {
        let stream = self.stream.try_clone()?;
        stream.set_read_timeout(None)?;
        let released = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&released);
        let watching = stream.try_clone()?;
        let watcher = std::thread::Builder::new().name("lease".into()).spawn(move || {
            await_end(&watching);
            if !ended.load(Ordering::Acquire) {
                gone();
            }
        })?;
        Ok(Lease { stream, released, watcher: Some(watcher) })
    }
}

/// Returns when the client has closed its connection or died. Data after the request is discarded:
/// a connection carries one request, and a client that sends more is still alive.
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
    released: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.released.store(true, Ordering::Release);
        // Shuts down only the watched direction. The answer is still to be sent.
        let _ = self.stream.shutdown(std::net::Shutdown::Read);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lease on a client, and a channel that reports its end.
    fn leased(near: &Replies) -> (Lease, std::sync::mpsc::Receiver<()>) {
        let (gone, reported) = std::sync::mpsc::channel();
        (near.when_gone(move || gone.send(()).unwrap()).unwrap(), reported)
    }

    #[test]
    fn lease_ignores_further_data_and_ends_with_the_connection() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let near = Replies::new(near).unwrap();
        let (_lease, reported) = leased(&near);
        // More than a socket buffer holds, so the write completes only if the lease reads.
        far.set_write_timeout(Some(CLIENT_TIMEOUT)).unwrap();
        far.write_all(&b"PATCH /api/v1/migration HTTP/1.1\r\n\r\n".repeat(100_000)).unwrap();
        assert_eq!(reported.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
        drop(far);
        reported.recv_timeout(CLIENT_TIMEOUT).expect("the end of the connection ends the lease");
    }

    #[test]
    fn lease_ends_when_the_client_shuts_down_its_side() {
        let (near, far) = UnixStream::pair().unwrap();
        let near = Replies::new(near).unwrap();
        let (_lease, reported) = leased(&near);
        far.shutdown(std::net::Shutdown::Write).unwrap();
        reported.recv_timeout(CLIENT_TIMEOUT).expect("the lease ends as if the client was killed");
    }

    #[test]
    fn lease_reports_nothing_after_it_is_dropped() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let near = Replies::new(near).unwrap();
        let (lease, reported) = leased(&near);
        far.write_all(b"more").unwrap();
        drop(lease);
        assert!(reported.recv().is_err(), "no end is reported");
    }

    #[test]
    fn event_does_not_wait_for_a_client_that_reads_nothing() {
        let (near, _far) = UnixStream::pair().unwrap();
        let replies = Replies::new(near).unwrap();
        replies.stream.set_write_timeout(Some(Duration::from_millis(1))).unwrap();
        let event = json!({ "event": "progress", "phase": "x".repeat(200) });
        for _ in 0..10_000 {
            replies.event(&event).unwrap();
        }
        // Negative control: a blocking write to this client does fill its buffer and time out.
        let error = (0..10_000).find_map(|_| replies.line(&event).err()).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
