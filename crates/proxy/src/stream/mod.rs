//! One byte stream in both directions, between a local socket and the other daemon.
//!
//! ```text
//!  local socket -> LocalReader -> SendWindow -> link's sender   ==== link ====>
//!  local socket <- LocalWriter <- Inbox      <- link's receiver <=== link =====
//! ```
//! The stream outlives its links: each side keeps what the other has not placed, and on the next
//! link says what it has received. The local process sees only that its socket is slow.

mod failure;
mod inbox;
mod link;
mod linked;
mod local_reader;
mod local_writer;
mod pace;
mod waker;
mod window;

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use vmferry_codec::{EncodedFrame, Frame};
use vmferry_transport::ChannelCloser;

pub use failure::StreamFailure;
use inbox::Inbox;
pub use link::{Link, LinkEnd, Timings, run_link};
use linked::ReceiveError;
pub use local_reader::{LocalReader, Tap};
pub use local_writer::{LocalWriter, Output, OutputError};
use pace::Pace;
pub use waker::Waker;
pub(crate) use waker::is_readable;
use window::SendWindow;

/// The most bytes of frames that a peer may send before they are placed. Bounds the memory of a
/// stream on both sides, and lets 10 Gbit/s through over a round trip of 25 ms.
pub const MAX_WINDOW_BYTES: usize = 32 << 20;

/// The most frames, for streams of small ones.
pub const MAX_WINDOW_FRAMES: usize = 128;

/// Acknowledgements are sent for this number of frames together while more frames wait.
const PLACED_TOGETHER: u64 = 4;

/// Buffers that a stream keeps for its next frames.
const SPARE_BUFFERS: usize = 32;

/// What a stream has carried, in bytes.
#[derive(Debug, Default)]
pub struct Counters {
    /// Read from the local process.
    pub read: AtomicU64,
    /// Sent on links, with what was sent again.
    pub sent: AtomicU64,
    /// Written to the local process.
    pub written: AtomicU64,
    /// Received on links.
    pub received: AtomicU64,
    /// Links so far.
    pub links: AtomicU64,
}

impl Counters {
    fn add(counter: &AtomicU64, bytes: usize) {
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A stream.
#[derive(Debug)]
pub struct Stream {
    state: Mutex<State>,
    /// There is room in the window.
    room: Condvar,
    /// There is something to send.
    to_send: Condvar,
    /// There is something to write.
    to_write: Condvar,
    /// A link began or ended, or the stream ended.
    changed: Condvar,
    /// A copy of the local socket, to wake the threads that wait on it.
    local: UnixStream,
    /// Wakes the reader without the socket.
    waker: Arc<Waker>,
    /// The local program must not see that the stream fails.
    is_sheltered: Arc<AtomicBool>,
    /// What it has carried.
    pub counters: Counters,
}

#[derive(Debug, Default)]
struct State {
    window: SendWindow<EncodedFrame>,
    pace: Pace,
    spare: Vec<EncodedFrame>,
    /// The local process has closed its end, and the frame that says so is in the window.
    local_ended: bool,
    inbox: Inbox<Frame>,
    spare_received: Vec<Frame>,
    /// The peer's last byte is written.
    peer_ended: bool,
    /// The last frame that the peer knows to be placed.
    told_placed: u64,
    /// The acknowledgement is due.
    placed_due: bool,
    /// The local process reads no more, and the peer has not been told yet.
    unread_due: bool,
    /// The sender has nothing to send.
    sender_idle: bool,
    /// The number of the present link, or of the last one.
    link: u64,
    /// Closes the present link.
    closer: Option<ChannelCloser>,
    /// When the last link ended.
    unlinked: Option<Instant>,
    /// There was a link, so the peer has connected the stream to its program.
    was_linked: bool,
    failure: Option<StreamFailure>,
    reset_due: bool,
}

impl Stream {
    /// A stream for a local socket, without a link. While `is_sheltered` is set, the local program
    /// does not see its socket closed when the stream fails: the flag's owner has a duplicate.
    ///
    /// # Errors
    /// The socket can't be duplicated.
    pub fn new(
        local: &UnixStream,
        waker: Arc<Waker>,
        is_sheltered: Arc<AtomicBool>,
    ) -> std::io::Result<Self> {
        let state = State { unlinked: Some(Instant::now()), ..State::default() };
        Ok(Self {
            state: Mutex::new(state),
            room: Condvar::new(),
            to_send: Condvar::new(),
            to_write: Condvar::new(),
            changed: Condvar::new(),
            local: local.try_clone()?,
            waker,
            is_sheltered,
            counters: Counters::default(),
        })
    }

    /// Ends the stream: the local process sees its socket closed, and the peer is told why.
    pub fn fail(&self, failure: StreamFailure) {
        let mut state = self.state.lock();
        if state.failure.is_some() || state.is_complete() {
            return;
        }
        let told = !matches!(failure, StreamFailure::Peer { .. } | StreamFailure::Refused { .. });
        (state.reset_due, state.failure) = (told, Some(failure));
        drop(state);
        if self.is_sheltered() {
            self.waker.wake();
        } else {
            // An error means that the process has gone.
            let _ = self.local.shutdown(Shutdown::Both);
        }
        self.wake_all();
    }

    /// Whether the local program must not see its connection end.
    fn is_sheltered(&self) -> bool {
        self.is_sheltered.load(Ordering::Acquire)
    }

    /// Why the stream failed, if it did.
    pub fn failure(&self) -> Option<StreamFailure> {
        self.state.lock().failure.clone()
    }

    /// Whether the stream has something to say to the peer.
    pub fn needs_link(&self) -> bool {
        let state = self.state.lock();
        !state.is_complete() && (state.failure.is_none() || state.reset_due)
    }

    /// Whether both directions have ended and everything is placed.
    pub fn is_complete(&self) -> bool {
        self.state.lock().is_complete()
    }

    /// Whether the stream has ended in either way.
    pub fn is_over(&self) -> bool {
        let state = self.state.lock();
        state.failure.is_some() || state.is_complete()
    }

    /// Since when there has been no link.
    pub fn unlinked_since(&self) -> Option<Instant> {
        self.state.lock().unlinked
    }

    /// Bytes per second that the peer has placed lately.
    pub fn rate(&self) -> Option<f64> {
        self.state.lock().pace.rate()
    }

    fn wake_all(&self) {
        for condition in [&self.room, &self.to_send, &self.to_write, &self.changed] {
            condition.notify_all();
        }
    }

    /// A buffer, as soon as the window has room; `None` once the stream is over.
    fn acquire(&self) -> Option<EncodedFrame> {
        let mut state = self.state.lock();
        loop {
            if state.failure.is_some() {
                return None;
            }
            let bytes = state.window.bytes();
            if bytes < state.pace.limit() && state.window.len() < MAX_WINDOW_FRAMES {
                return Some(state.spare.pop().unwrap_or_default());
            }
            self.room.wait(&mut state);
        }
    }

    /// Returns a buffer that was not used.
    fn give_back(&self, frame: EncodedFrame) {
        self.state.lock().keep(frame);
    }

    /// Whether the link waits for frames.
    fn is_sender_idle(&self) -> bool {
        self.state.lock().sender_idle
    }

    /// The number of the next frame, of a piece with this number of bytes.
    fn reserve(&self, bytes: usize) -> u64 {
        self.state.lock().window.reserve(bytes)
    }

    /// Sends a frame when its turn comes.
    pub fn put(&self, number: u64, frame: EncodedFrame) {
        let mut state = self.state.lock();
        if let Some(placed) = state.window.put(number, frame) {
            state.keep(placed);
        }
        drop(state);
        self.to_send.notify_all();
    }

    /// Sends the frame after which no other follows.
    fn put_last(&self, frame: EncodedFrame) {
        let mut state = self.state.lock();
        let number = state.window.reserve(frame.wire_bytes());
        state.window.put(number, frame);
        state.local_ended = true;
        drop(state);
        self.to_send.notify_all();
    }

    /// The process at the other end reads no more: this one's next write fails.
    fn peer_reads_no_more(&self) {
        let _ = self.local.shutdown(Shutdown::Read);
    }

    /// Waits for the next frame to write; `None` once the stream is over.
    fn next_to_write(&self) -> Option<Frame> {
        let mut state = self.state.lock();
        loop {
            if state.failure.is_some() {
                return None;
            }
            if let Some(frame) = state.inbox.pop() {
                return Some(frame);
            }
            self.to_write.wait(&mut state);
        }
    }

    /// A frame is written. `last` says that it was the peer's last one.
    fn wrote(&self, frame: Frame, last: bool) {
        let mut state = self.state.lock();
        state.inbox.wrote();
        state.peer_ended |= last;
        if state.spare_received.len() < SPARE_BUFFERS {
            state.spare_received.push(frame);
        }
        let due = state.inbox.placed() >= state.told_placed + PLACED_TOGETHER;
        state.placed_due |= due || last || !state.inbox.has_next();
        let (due, complete) = (state.placed_due, state.is_complete());
        drop(state);
        if due {
            self.to_send.notify_all();
        }
        if complete {
            self.wake_all();
        }
    }

    /// The local process reads no more.
    fn reads_no_more(&self) {
        self.state.lock().unread_due = true;
        self.to_send.notify_all();
    }
}

impl State {
    fn is_complete(&self) -> bool {
        self.local_ended && self.peer_ended && self.window.is_empty()
    }

    fn is_present(&self, link: u64) -> Result<(), ReceiveError> {
        if self.link == link { Ok(()) } else { Err(ReceiveError::Superseded) }
    }

    fn keep(&mut self, frame: EncodedFrame) {
        if self.spare.len() < SPARE_BUFFERS {
            self.spare.push(frame);
        }
    }
}
