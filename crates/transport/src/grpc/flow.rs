//! The shared state of blocking threads and asynchronous tasks: received and unread data, written
//! and unsent data, and the reasons why either direction ended.
//!
//! Both directions are bounded. The pump takes at most [`RECEIVED_BYTES`] from HTTP/2, so that the
//! peer's window closes when the reader does not read. A writer waits while [`UNSENT_BYTES`] have
//! not reached the socket.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tonic::Status;

use super::failure::Failure;
use super::message;

mod poll;

pub use poll::Outgoing;

/// Maximum data in one message: a frame of 64 pages with its header.
pub const CHUNK_BYTES: usize = 272 << 10;

/// Maximum data between a writer and the socket: one chunk is encrypted and sent while the next
/// ones are copied.
const UNSENT_BYTES: usize = 3 * CHUNK_BYTES;
const UNSENT_MESSAGES: usize = 256;

/// Maximum data that waits for the reader, in addition to the HTTP/2 window.
const RECEIVED_BYTES: usize = 2 * CHUNK_BYTES;
const RECEIVED_PIECES: usize = 256;

/// Buffers of at least this size are reused.
const KEPT_BYTES: usize = 64 << 10;

/// The two directions of one channel.
#[derive(Debug, Default)]
pub struct Flow {
    state: Mutex<State>,
    readable: Condvar,
    writable: Condvar,
    /// Whether the socket may hold written data back.
    unflushed: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// The next chunk waits until the peer's reader has consumed the last one.
    acknowledged: bool,
    received: VecDeque<Bytes>,
    received_bytes: usize,
    /// Total data that the reader has consumed.
    read_bytes: u64,
    /// An acknowledgement that must be sent.
    owed: Option<u64>,
    peer_ended: bool,
    reader_gone: bool,
    queue: VecDeque<Message>,
    /// Data in `queue` and between it and the socket.
    unsent_bytes: usize,
    unsent_messages: usize,
    /// Total data written, and total data consumed by the peer's reader.
    written_bytes: u64,
    taken_bytes: u64,
    /// The end is in the queue or was sent.
    finished: bool,
    writer_gone: bool,
    /// Why both directions have ended.
    failure: Option<Failure>,
    /// Why nothing more can be sent. Data received before can still be read.
    lost: Option<Failure>,
    /// The status for the peer after a failure.
    refusal: Option<Status>,
    spare: Vec<Vec<u8>>,
    pump: Option<Waker>,
    body: Option<Waker>,
    driver: Option<Waker>,
}

/// A message to be sent, and the length of its data.
#[derive(Debug)]
struct Message {
    bytes: Vec<u8>,
    data_bytes: usize,
}

impl State {
    fn send_failure(&self) -> Option<&Failure> {
        self.failure.as_ref().or(self.lost.as_ref())
    }

    fn queue(&mut self, bytes: Vec<u8>, data_bytes: usize) {
        self.queue.push_back(Message { bytes, data_bytes });
        wake(&mut self.body);
    }

    fn finish(&mut self) {
        if !self.finished {
            self.finished = true;
            self.unsent_messages += 1;
            self.queue(message::end(), 0);
        }
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

impl Flow {
    /// Makes a change that any thread or task may be waiting for.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        wake(&mut state.pump);
        wake(&mut state.body);
        wake(&mut state.driver);
        drop(state);
        self.readable.notify_all();
        self.writable.notify_all();
    }

    /// From now on each chunk waits for the acknowledgement of the previous one.
    pub fn acknowledge_chunks(&self) {
        self.state.lock().acknowledged = true;
    }

    /// Ends both directions, unless they have already ended.
    pub fn fail(&self, failure: Failure) {
        self.change(|state| {
            state.failure.get_or_insert(failure);
        });
    }

    /// Ends both directions and sends the peer the reason, if possible.
    pub fn refuse(&self, status: Status) {
        self.change(|state| {
            state.failure.get_or_insert_with(|| Failure::Status(status.clone()));
            state.refusal.get_or_insert(status);
        });
    }

    /// Ends the call. If the connection failed before, that is the reason.
    pub fn fail_call(&self, failure: Failure) {
        self.fail(self.cause(failure));
    }

    /// The known reason why the channel or its connection failed, or else `failure`.
    pub fn cause(&self, failure: Failure) -> Failure {
        let state = self.state.lock();
        let lost = state.lost.as_ref().filter(|lost| !matches!(lost, Failure::Ended));
        state.failure.as_ref().or(lost).cloned().unwrap_or(failure)
    }

    /// Records the loss of the connection: nothing can be sent, but received data can still be
    /// read.
    pub fn lose(&self, failure: Failure) {
        self.change(|state| {
            state.lost.get_or_insert(failure);
        });
    }

    /// The next received bytes; empty at the announced end.
    ///
    /// # Errors
    /// Why no more data will come, or [`io::ErrorKind::TimedOut`].
    pub fn receive(&self, timeout: Option<Duration>) -> io::Result<Bytes> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state.lock();
        loop {
            if let Some(piece) = state.received.pop_front() {
                state.received_bytes -= piece.len();
                wake(&mut state.pump);
                return Ok(piece);
            }
            if state.peer_ended {
                return Ok(Bytes::new());
            }
            if let Some(failure) = &state.failure {
                return Err(failure.to_read_error());
            }
            state = wait(&self.readable, state, deadline)?;
        }
    }

    /// The next received bytes, if any are available.
    pub fn receive_now(&self) -> Option<Bytes> {
        let mut state = self.state.lock();
        let piece = state.received.pop_front()?;
        state.received_bytes -= piece.len();
        wake(&mut state.pump);
        Some(piece)
    }

    /// Records that the reader has consumed `bytes` more bytes. `all` says that it has no bytes
    /// left.
    pub fn note_read(&self, bytes: usize, all: bool) {
        let mut state = self.state.lock();
        state.read_bytes += bytes as u64;
        if state.acknowledged && all && state.received.is_empty() && bytes > 0 {
            state.owed = Some(state.read_bytes);
            wake(&mut state.body);
        }
    }

    /// Queues up to [`CHUNK_BYTES`] of the slices as one message.
    ///
    /// # Errors
    /// Why the channel has ended, or [`io::ErrorKind::TimedOut`], after which nothing can be sent.
    pub fn send(&self, from: &[IoSlice<'_>], timeout: Option<Duration>) -> io::Result<usize> {
        let data_bytes = from.iter().map(|slice| slice.len()).sum::<usize>().min(CHUNK_BYTES);
        if data_bytes == 0 {
            return Ok(0);
        }
        let mut message = self.reserve(data_bytes, timeout)?;
        message::put_data_header(&mut message, data_bytes);
        let mut left = data_bytes;
        for slice in from {
            let part = &slice[..slice.len().min(left)];
            message.extend_from_slice(part);
            left -= part.len();
        }
        self.state.lock().queue(message, data_bytes);
        Ok(data_bytes)
    }

    /// Waits until a message may be queued, counts it, and returns a buffer for it.
    fn reserve(&self, data_bytes: usize, timeout: Option<Duration>) -> io::Result<Vec<u8>> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state.lock();
        loop {
            if let Some(failure) = state.send_failure() {
                return Err(failure.to_write_error());
            }
            if state.finished {
                return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the end was announced"));
            }
            let room = state.unsent_bytes + data_bytes <= UNSENT_BYTES
                && state.unsent_messages < UNSENT_MESSAGES;
            if room && (!state.acknowledged || state.taken_bytes == state.written_bytes) {
                break;
            }
            state =
                wait(&self.writable, state, deadline).inspect_err(|_| self.fail(Failure::Torn))?;
        }
        state.written_bytes += data_bytes as u64;
        state.unsent_bytes += data_bytes;
        state.unsent_messages += 1;
        let spare = if data_bytes < KEPT_BYTES { None } else { state.spare.pop() };
        let capacity = if data_bytes < KEPT_BYTES { data_bytes } else { CHUNK_BYTES };
        Ok(spare.unwrap_or_else(|| Vec::with_capacity(capacity + message::HEADER_BYTES)))
    }

    /// Waits until the operating system has accepted everything that was written.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn flush(&self, timeout: Option<Duration>) -> io::Result<()> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state.lock();
        loop {
            if state.unsent_messages == 0 && !self.unflushed.load(Ordering::Relaxed) {
                return Ok(());
            }
            if let Some(failure) = state.send_failure() {
                return Err(failure.to_write_error());
            }
            state =
                wait(&self.writable, state, deadline).inspect_err(|_| self.fail(Failure::Torn))?;
        }
    }

    /// Announces the end, and waits until the operating system has accepted it.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn finish(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.state.lock().finish();
        self.flush(timeout)
    }

    /// The reader is gone; received data is dropped.
    pub fn drop_reader(&self) {
        self.change(|state| {
            state.reader_gone = true;
            state.received.clear();
            state.received_bytes = 0;
        });
    }

    /// The writer is gone; the end is queued.
    pub fn drop_writer(&self) {
        self.change(|state| {
            state.writer_gone = true;
            if state.failure.is_none() {
                state.finish();
            }
        });
    }
}

/// Waits for a change, until the deadline.
fn wait<'a>(
    condition: &Condvar,
    mut state: MutexGuard<'a, State>,
    deadline: Option<Instant>,
) -> io::Result<MutexGuard<'a, State>> {
    match deadline {
        None => condition.wait(&mut state),
        Some(deadline) if deadline <= Instant::now() => {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Some(deadline) => {
            condition.wait_until(&mut state, deadline);
        }
    }
    Ok(state)
}
