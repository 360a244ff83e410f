//! Where threads that block and tasks that do not meet: what was received and not read, what was
//! written and not sent, and what there is to say about either.
//!
//! Both directions are bounded. The pump takes no more from HTTP/2 than [`RECEIVED_BYTES`], so the
//! peer's window closes when the reader does not read; a writer waits when [`UNSENT_BYTES`] have not
//! left for the socket.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tonic::Status;

use super::failure::Failure;
use super::message;

mod poll;

pub use poll::Outgoing;

/// Data of one message: a frame of 64 pages and its header fit in.
pub const CHUNK_BYTES: usize = 272 << 10;

/// What may wait between a writer and the socket: while one chunk is encrypted and sent, the next
/// ones are copied.
const UNSENT_BYTES: usize = 3 * CHUNK_BYTES;
const UNSENT_MESSAGES: usize = 256;

/// What may wait for the reader beyond the HTTP/2 window.
const RECEIVED_BYTES: usize = 2 * CHUNK_BYTES;
const RECEIVED_PIECES: usize = 256;

/// Buffers for this much data and more are used again.
const KEPT_BYTES: usize = 64 << 10;

/// The two directions of one channel.
#[derive(Debug, Default)]
pub struct Flow {
    state: Mutex<State>,
    readable: Condvar,
    writable: Condvar,
    /// Whether the socket may hold back something that was written.
    unflushed: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// The next chunk waits until the last one was taken.
    acknowledged: bool,
    received: VecDeque<Bytes>,
    received_bytes: usize,
    /// What the reader has taken since the channel began.
    read_bytes: u64,
    /// An acknowledgement that is to be sent.
    owed: Option<u64>,
    peer_ended: bool,
    reader_gone: bool,
    queue: VecDeque<Message>,
    /// In `queue` and on the way from there to the socket.
    unsent_bytes: usize,
    unsent_messages: usize,
    /// Data since the channel began: written, and taken by the peer's reader.
    written_bytes: u64,
    taken_bytes: u64,
    /// The end is in the queue, or sent.
    finished: bool,
    writer_gone: bool,
    /// Why both directions are over.
    failure: Option<Failure>,
    /// Why nothing can be sent any more; what was received before can still be read.
    lost: Option<Failure>,
    /// What the peer is told about a failure.
    refusal: Option<Status>,
    spare: Vec<Vec<u8>>,
    pump: Option<Waker>,
    body: Option<Waker>,
    driver: Option<Waker>,
}

/// A message that is to be sent, and how much of it is data.
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
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes something that anybody may wait for.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        wake(&mut state.pump);
        wake(&mut state.body);
        wake(&mut state.driver);
        drop(state);
        self.readable.notify_all();
        self.writable.notify_all();
    }

    /// From now on each chunk waits for the acknowledgement of the one before.
    pub fn acknowledge_chunks(&self) {
        self.state().acknowledged = true;
    }

    /// Ends both directions, unless they have ended before.
    pub fn fail(&self, failure: Failure) {
        self.change(|state| {
            state.failure.get_or_insert(failure);
        });
    }

    /// Ends both directions and tells the peer why, if it listens.
    pub fn refuse(&self, status: Status) {
        self.change(|state| {
            state.failure.get_or_insert_with(|| Failure::Status(status.clone()));
            state.refusal.get_or_insert(status);
        });
    }

    /// The call has failed, for the connection's reason if that failed before.
    pub fn fail_call(&self, failure: Failure) {
        self.fail(self.cause(failure));
    }

    /// Why the channel or its connection has failed, if that is known, or else `failure`.
    pub fn cause(&self, failure: Failure) -> Failure {
        let state = self.state();
        let lost = state.lost.as_ref().filter(|lost| !matches!(lost, Failure::Ended));
        state.failure.as_ref().or(lost).cloned().unwrap_or(failure)
    }

    /// The connection is gone: nothing can be sent, but what was received can still be read.
    pub fn lose(&self, failure: Failure) {
        self.change(|state| {
            state.lost.get_or_insert(failure);
        });
    }

    /// The next bytes that came; none at the announced end.
    ///
    /// # Errors
    /// Why there are none and never will be, or [`io::ErrorKind::TimedOut`].
    pub fn receive(&self, timeout: Option<Duration>) -> io::Result<Bytes> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state();
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

    /// The next bytes that came, if some are here.
    pub fn receive_now(&self) -> Option<Bytes> {
        let mut state = self.state();
        let piece = state.received.pop_front()?;
        state.received_bytes -= piece.len();
        wake(&mut state.pump);
        Some(piece)
    }

    /// The reader has taken so many bytes more, and has none left to look at if `all`.
    pub fn note_read(&self, bytes: usize, all: bool) {
        let mut state = self.state();
        state.read_bytes += bytes as u64;
        if state.acknowledged && all && state.received.is_empty() && bytes > 0 {
            state.owed = Some(state.read_bytes);
            wake(&mut state.body);
        }
    }

    /// Queues up to [`CHUNK_BYTES`] of the slices as one message.
    ///
    /// # Errors
    /// Why the channel has ended, or [`io::ErrorKind::TimedOut`]; nothing can be sent after that.
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
        self.state().queue(message, data_bytes);
        Ok(data_bytes)
    }

    /// Waits until a message may be queued, and counts it: its buffer.
    fn reserve(&self, data_bytes: usize, timeout: Option<Duration>) -> io::Result<Vec<u8>> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state();
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

    /// Waits until the system has taken everything that was written.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn flush(&self, timeout: Option<Duration>) -> io::Result<()> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.state();
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

    /// Says that nothing follows, and waits until the system has taken it.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn finish(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.state().finish();
        self.flush(timeout)
    }

    /// Nobody will read any more.
    pub fn drop_reader(&self) {
        self.change(|state| {
            state.reader_gone = true;
            state.received.clear();
            state.received_bytes = 0;
        });
    }

    /// Nobody will write any more: the end is on its way.
    pub fn drop_writer(&self) {
        self.change(|state| {
            state.writer_gone = true;
            if state.failure.is_none() {
                state.finish();
            }
        });
    }
}

/// Waits for a change.
fn wait<'a>(
    condition: &Condvar,
    state: MutexGuard<'a, State>,
    deadline: Option<Instant>,
) -> io::Result<MutexGuard<'a, State>> {
    let Some(deadline) = deadline else {
        return Ok(condition.wait(state).unwrap_or_else(PoisonError::into_inner));
    };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(condition.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
}
