//! The queue of finished frames between the workers and a lane's channel.
//!
//! Frames are sent in the order in which they are finished: a frame that takes long to compress
//! does not delay those finished meanwhile. Few frames are made ahead of the channel, because a
//! page that is read long before it is sent is likely to be written again by then.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::signal::Signal;

/// The queue of one lane.
#[derive(Debug)]
pub struct FrameQueue<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
    channel_idle: AtomicBool,
    limit: usize,
    /// Raised when the queue is at most half full again after a thread found no room.
    room: Arc<Signal>,
}

#[derive(Debug)]
struct State<T> {
    frames: VecDeque<T>,
    /// Frames in the queue plus frames in progress.
    begun: usize,
    /// The frame that follows all frames in progress. It is one of `begun`.
    last: Option<T>,
    /// A thread has found no room.
    missed: bool,
    /// There may be a frame to encode since the channel's thread last checked.
    woken: bool,
    /// The channel's thread must handle something else before the next frame.
    interrupted: bool,
    closed: bool,
}

/// What the channel's side has found in the queue.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<T> {
    /// A frame to send.
    Frame(T),
    /// No frame.
    Empty,
    /// An interruption.
    Interrupted,
    /// No more frames will come.
    Closed,
}

impl<T> FrameQueue<T> {
    /// A queue for `limit` frames, finished or in progress. It raises `room` when there is room
    /// again after a thread found none.
    pub fn new(limit: usize, room: Arc<Signal>) -> Self {
        Self {
            state: Mutex::new(State {
                frames: VecDeque::with_capacity(limit),
                begun: 0,
                last: None,
                missed: false,
                woken: false,
                interrupted: false,
                closed: false,
            }),
            ready: Condvar::new(),
            channel_idle: AtomicBool::new(false),
            limit,
            room,
        }
    }

    /// Whether the channel is idle and waits for a frame.
    pub fn is_channel_idle(&self) -> bool {
        self.channel_idle.load(Ordering::Relaxed)
    }

    /// Reserves room for another frame, if there is any. Each must be [put](Self::put),
    /// [passed](Self::pass) or [given up](Self::give_up).
    pub fn try_begin(&self) -> bool {
        let mut state = self.state.lock();
        let has_room = state.begun < self.limit;
        if has_room {
            state.begun += 1;
        } else {
            state.missed = true;
        }
        has_room
    }

    /// Returns the reservation of a frame that will not come.
    pub fn give_up(&self) {
        self.state.lock().begun -= 1;
    }

    /// Adds a finished frame.
    pub fn put(&self, frame: T) {
        let mut state = self.state.lock();
        state.frames.push_back(frame);
        state.release_last();
        drop(state);
        self.ready.notify_one();
    }

    /// Adds a finished frame that must follow all frames in progress. No other frame may be begun
    /// until it has left the queue.
    pub fn put_last(&self, frame: T) {
        let mut state = self.state.lock();
        state.last = Some(frame);
        let released = state.release_last();
        drop(state);
        if released {
            self.ready.notify_one();
        }
    }

    /// Releases the reservation of a frame that its maker, the channel's thread, sends at once
    /// instead of [putting](Self::put) it here.
    pub fn pass(&self) {
        self.channel_idle.store(false, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.begun -= 1;
        state.release_last();
        self.report_room(state);
    }

    /// The next finished frame, if there is one.
    pub fn take(&self) -> Next<T> {
        let mut state = self.state.lock();
        if state.closed {
            return Next::Closed;
        }
        if std::mem::take(&mut state.interrupted) {
            return Next::Interrupted;
        }
        let Some(frame) = state.frames.pop_front() else {
            self.channel_idle.store(true, Ordering::Relaxed);
            state.woken = false;
            return Next::Empty;
        };
        self.channel_idle.store(false, Ordering::Relaxed);
        state.begun -= 1;
        self.report_room(state);
        Next::Frame(frame)
    }

    /// Blocks until [`take`](Self::take) finds more than it did, or until a [`wake`](Self::wake)
    /// since then.
    pub fn wait(&self) {
        let mut state = self.state.lock();
        while state.frames.is_empty() && !state.woken && !state.interrupted && !state.closed {
            self.ready.wait(&mut state);
        }
    }

    /// There may be a frame to encode: ends the present [`wait`](Self::wait), or the next one.
    pub fn wake(&self) {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.woken, true) {
            self.ready.notify_one();
        }
    }

    /// A frame has left the queue. Notifies threads that found no room if there is room again.
    fn report_room(&self, mut state: MutexGuard<'_, State<T>>) {
        let room = state.begun <= self.limit / 2 && std::mem::take(&mut state.missed);
        drop(state);
        if room {
            self.room.raise();
        }
    }

    /// Blocks until an [interruption](Self::interrupt), even if there are frames; `false` once the
    /// queue is closed.
    pub fn await_interruption(&self) -> bool {
        let mut state = self.state.lock();
        while !state.closed && !std::mem::take(&mut state.interrupted) {
            self.ready.wait(&mut state);
        }
        !state.closed
    }

    /// Interrupts the present wait, or the next one.
    pub fn interrupt(&self) {
        self.state.lock().interrupted = true;
        self.ready.notify_all();
    }

    /// Ends all present and future waits.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.ready.notify_all();
    }
}

impl<T> State<T> {
    /// Queues the last frame if no other is in progress. Returns whether it did.
    fn release_last(&mut self) -> bool {
        let in_progress = self.begun - self.frames.len();
        if in_progress > 1 {
            return false;
        }
        let Some(last) = self.last.take() else { return false };
        self.frames.push_back(last);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue<T>(limit: usize) -> FrameQueue<T> {
        FrameQueue::new(limit, Arc::default())
    }

    /// The next frame, for which it waits.
    fn await_next<T>(queue: &FrameQueue<T>) -> Next<T> {
        loop {
            match queue.take() {
                Next::Empty => queue.wait(),
                next => return next,
            }
        }
    }

    #[test]
    fn frames_in_progress_and_queued_count_towards_the_limit() {
        let queue = queue(2);
        assert!(queue.try_begin() && queue.try_begin());
        assert!(!queue.try_begin(), "in progress");
        queue.put('a');
        assert!(!queue.try_begin(), "finished and still in the queue");
        let seen = queue.room.now().unwrap();
        assert_eq!(queue.take(), Next::Frame('a'));
        queue.room.wait(seen);
        assert!(queue.try_begin() && !queue.try_begin());
        queue.give_up();
        assert!(queue.try_begin());
    }

    #[test]
    fn idle_channel_is_visible_until_it_has_a_frame() {
        let queue = queue(4);
        assert!(queue.try_begin() && queue.try_begin());
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| await_next(&queue));
            while !queue.is_channel_idle() {
                std::thread::yield_now();
            }
            queue.put('b');
            assert_eq!(taking.join().unwrap(), Next::Frame('b'));
        });
        queue.put('a');
        assert!(!queue.is_channel_idle());
        assert_eq!(queue.take(), Next::Frame('a'), "whichever was begun first");
    }

    #[test]
    fn interruption_ends_one_wait() {
        let queue = queue(1);
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| await_next(&queue));
            queue.interrupt();
            assert_eq!(taking.join().unwrap(), Next::Interrupted);
        });
        assert!(queue.try_begin());
        queue.put('a');
        assert_eq!(queue.take(), Next::Frame('a'));
    }

    #[test]
    fn last_frame_follows_all_frames_in_progress() {
        let queue = queue(4);
        assert!((0..4).all(|_| queue.try_begin()));
        queue.put('a');
        queue.put_last('z');
        assert_eq!([queue.take(), queue.take()], [Next::Frame('a'), Next::Empty]);
        queue.put('b');
        assert_eq!([queue.take(), queue.take()], [Next::Frame('b'), Next::Empty]);
        queue.pass();
        assert_eq!(queue.take(), Next::Frame('z'));
        assert!(queue.try_begin());
        queue.put_last('z');
        assert_eq!(queue.take(), Next::Frame('z'), "none is in progress");
        assert_eq!(queue.state.lock().begun, 0);
    }

    #[test]
    fn wake_ends_a_wait_for_frames() {
        let queue = queue(4);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                assert_eq!(queue.take(), Next::Empty);
                queue.wait();
                // The channel's thread makes a frame and sends it at once.
                assert!(queue.try_begin() && queue.is_channel_idle());
                queue.pass();
            });
            while !queue.is_channel_idle() {
                std::thread::yield_now();
            }
            queue.wake();
            waiting.join().unwrap();
        });
        assert!(queue.state.lock().begun == 0 && !queue.is_channel_idle());
        // A wake between the search and the wait is not missed.
        assert_eq!(queue.take(), Next::<char>::Empty);
        queue.wake();
        queue.wait();
    }

    #[test]
    fn close_ends_the_wait() {
        let queue = queue::<u8>(1);
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| await_next(&queue));
            queue.close();
            assert_eq!(taking.join().unwrap(), Next::Closed);
        });
    }
}
