//! The queue of finished frames between the workers and a lane's channel.
//!
//! Frames are sent in the order in which they are finished: a frame that takes long to compress
//! does not delay those finished meanwhile. Few frames are made ahead of the channel, because a
//! page that is read long before it is sent is likely to be written again by then.

use std::collections::VecDeque;
#[cfg(test)]
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::signal::{Signal, Wake};

/// The queue of one lane.
#[derive(Debug)]
pub struct Outgoing<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
    hungry: AtomicBool,
    limit: usize,
    /// Raised when the queue is at most half full again after a thread found no room.
    room: Arc<Signal>,
}

#[derive(Debug)]
struct State<T> {
    frames: VecDeque<T>,
    /// Frames in the queue plus frames in progress.
    begun: usize,
    /// A thread has found no room.
    missed: bool,
    /// There may be a frame to make since the channel's thread last checked.
    woken: bool,
    /// The channel's thread must handle something else before the next frame.
    interrupted: bool,
    closed: bool,
}

/// The result of waiting on the channel's side.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<T> {
    /// A frame to send.
    Frame(T),
    /// An interruption.
    Interrupted,
    /// No more frames will come.
    Closed,
}

impl<T> Outgoing<T> {
    /// A queue for `limit` frames, finished or in progress. It raises `room` when there is room
    /// again after a thread found none.
    pub fn new(limit: usize, room: Arc<Signal>) -> Self {
        Self {
            state: Mutex::new(State {
                frames: VecDeque::with_capacity(limit),
                begun: 0,
                missed: false,
                woken: false,
                interrupted: false,
                closed: false,
            }),
            ready: Condvar::new(),
            hungry: AtomicBool::new(false),
            limit,
            room,
        }
    }

    /// Whether the channel is idle and waits for a frame.
    pub fn is_hungry(&self) -> bool {
        self.hungry.load(Ordering::Relaxed)
    }

    /// Reserves room for another frame, if there is any. Each must be [put](Self::put) or [given
    /// up](Self::give_up).
    pub fn try_begin(&self) -> bool {
        let mut state = self.lock();
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
        self.lock().begun -= 1;
    }

    /// Adds a finished frame.
    pub fn put(&self, frame: T) {
        self.lock().frames.push_back(frame);
        self.ready.notify_one();
    }

    /// The next frame; blocks until there is one.
    #[cfg(test)]
    pub fn take(&self) -> Next<T> {
        let Ok(next) = self.take_or_make(|| Ok::<_, Infallible>(None));
        next
    }

    /// The next finished frame. While there is none, `make` may return one. It is called again
    /// after each [`wake`](Wake::wake).
    ///
    /// # Errors
    /// The error of `make`.
    pub fn take_or_make<E>(
        &self,
        mut make: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<Next<T>, E> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return Ok(Next::Closed);
            }
            if std::mem::take(&mut state.interrupted) {
                return Ok(Next::Interrupted);
            }
            if let Some(frame) = state.frames.pop_front() {
                self.hungry.store(false, Ordering::Relaxed);
                self.leave(state);
                return Ok(Next::Frame(frame));
            }
            self.hungry.store(true, Ordering::Relaxed);
            state.woken = false;
            drop(state);
            if let Some(frame) = make()? {
                self.hungry.store(false, Ordering::Relaxed);
                return Ok(Next::Frame(frame));
            }
            state = self.lock();
            while state.frames.is_empty() && !state.woken && !state.interrupted && !state.closed {
                state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Releases the reservation of a frame that goes to the channel without being [put](Self::put)
    /// here.
    pub fn pass(&self) {
        self.leave(self.lock());
    }

    /// A frame has left the queue. Notifies threads that found no room if there is room again.
    fn leave(&self, mut state: MutexGuard<'_, State<T>>) {
        state.begun -= 1;
        let room = state.begun <= self.limit / 2 && std::mem::take(&mut state.missed);
        drop(state);
        if room {
            self.room.raise();
        }
    }

    /// Blocks until an [interruption](Self::interrupt), even if there are frames; `false` once the
    /// queue is closed.
    pub fn await_interruption(&self) -> bool {
        let mut state = self.lock();
        while !state.closed && !std::mem::take(&mut state.interrupted) {
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.closed
    }

    /// Interrupts the present wait, or the next one.
    pub fn interrupt(&self) {
        self.lock().interrupted = true;
        self.ready.notify_all();
    }

    /// Ends all present and future waits.
    pub fn close(&self) {
        self.lock().closed = true;
        self.ready.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send> Wake for Outgoing<T> {
    fn wake(&self) {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.woken, true) {
            self.ready.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue<T>(limit: usize) -> Outgoing<T> {
        Outgoing::new(limit, Arc::default())
    }

    #[test]
    fn there_is_room_for_so_many() {
        let queue = queue(2);
        assert!(queue.try_begin() && queue.try_begin());
        assert!(!queue.try_begin(), "in the making");
        queue.put('a');
        assert!(!queue.try_begin(), "finished and not gone");
        let seen = queue.room.now().unwrap();
        assert_eq!(queue.take(), Next::Frame('a'));
        queue.room.wait(seen);
        assert!(queue.try_begin() && !queue.try_begin());
        queue.give_up();
        assert!(queue.try_begin());
    }

    #[test]
    fn the_channel_waits_for_a_frame_and_says_so() {
        let queue = queue(4);
        assert!(queue.try_begin() && queue.try_begin());
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| queue.take());
            while !queue.is_hungry() {
                std::thread::yield_now();
            }
            queue.put('b');
            assert_eq!(taking.join().unwrap(), Next::Frame('b'));
        });
        queue.put('a');
        assert!(!queue.is_hungry());
        assert_eq!(queue.take(), Next::Frame('a'), "whatever was begun first");
    }

    #[test]
    fn an_interruption_ends_one_wait() {
        let queue = queue(1);
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| queue.take());
            queue.interrupt();
            assert_eq!(taking.join().unwrap(), Next::Interrupted);
        });
        assert!(queue.try_begin());
        queue.put('a');
        assert_eq!(queue.take(), Next::Frame('a'));
    }

    #[test]
    fn the_channel_makes_a_frame_when_there_is_something_to_make() {
        let queue = queue(4);
        let work = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| {
                queue.take_or_make(|| {
                    let found = work.swap(false, Ordering::Relaxed) && queue.try_begin();
                    Ok::<_, Infallible>(found.then(|| queue.pass()).map(|()| 'm'))
                })
            });
            while !queue.is_hungry() {
                std::thread::yield_now();
            }
            work.store(true, Ordering::Relaxed);
            queue.wake();
            assert_eq!(taking.join().unwrap(), Ok(Next::Frame('m')));
        });
        assert!(queue.try_begin());
        queue.put('a');
        let first = queue.take_or_make(|| Ok::<_, Infallible>(Some('m')));
        assert_eq!(first, Ok(Next::Frame('a')), "what is finished goes first");
        assert!(queue.lock().begun == 0 && !queue.is_hungry());
    }

    #[test]
    fn closing_ends_the_wait() {
        let queue = queue::<u8>(1);
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| queue.take());
            queue.close();
            assert_eq!(taking.join().unwrap(), Next::Closed);
        });
    }
}
