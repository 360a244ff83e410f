//! Frames of one lane between the workers, which finish them in any order, and the channel, on which they
//! go in the order of their numbers.
//!
//! Few frames are made ahead of the channel: a page that is read long before it is sent is likely to be
//! written once more by then.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::signal::Signal;

/// The queue.
#[derive(Debug)]
pub struct Outgoing<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
    hungry: AtomicBool,
    limit: u64,
    /// Raised when somebody has found no room, and half of it is there again.
    room: Arc<Signal>,
}

#[derive(Debug)]
struct State<T> {
    /// The frame whose turn it is, and those behind it.
    frames: VecDeque<Option<T>>,
    next: u64,
    /// Frames that were begun when somebody found no room for another one.
    full_at: Option<u64>,
    closed: bool,
}

impl<T> Outgoing<T> {
    /// A queue for `limit` frames, finished or in the making, the first of which has number 1. It raises
    /// `room` when there is some again for those who found none.
    pub fn new(limit: usize, room: Arc<Signal>) -> Self {
        Self {
            state: Mutex::new(State {
                frames: VecDeque::with_capacity(limit),
                next: 1,
                full_at: None,
                closed: false,
            }),
            ready: Condvar::new(),
            hungry: AtomicBool::new(false),
            limit: limit as u64,
            room,
        }
    }

    /// Whether another frame may be begun, when `begun` have been since the start.
    pub fn has_room(&self, begun: u64) -> bool {
        let mut state = self.lock();
        let has_room = begun + 1 < state.next + self.limit;
        if !has_room {
            state.full_at = Some(begun);
        }
        has_room
    }

    /// Whether the channel waits for a frame.
    pub fn is_hungry(&self) -> bool {
        self.hungry.load(Ordering::Relaxed)
    }

    /// Takes a finished frame. Each number comes once.
    pub fn put(&self, sequence: u64, frame: T) {
        let mut state = self.lock();
        let Some(place) = sequence.checked_sub(state.next) else { return };
        let place = place as usize;
        while state.frames.len() <= place {
            state.frames.push_back(None);
        }
        state.frames[place] = Some(frame);
        if place == 0 {
            self.ready.notify_one();
        }
    }

    /// The next frame and its number, waiting until it is finished; `None` once the queue is closed.
    pub fn take(&self) -> Option<(u64, T)> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(Some(_)) = state.frames.front()
                && let Some(frame) = state.frames.pop_front().flatten()
            {
                let sequence = state.next;
                state.next += 1;
                let left = |begun: u64| begun + 1 - state.next;
                let room = state.full_at.is_some_and(|begun| left(begun) <= self.limit / 2);
                if room {
                    state.full_at = None;
                }
                drop(state);
                if room {
                    self.room.raise();
                }
                return Some((sequence, frame));
            }
            self.hungry.store(true, Ordering::Relaxed);
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
            self.hungry.store(false, Ordering::Relaxed);
        }
    }

    /// Ends every wait, now and for good.
    pub fn close(&self) {
        self.lock().closed = true;
        self.ready.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        assert!(queue.has_room(0) && queue.has_room(1) && !queue.has_room(2));
        queue.put(1, ());
        assert!(!queue.has_room(2), "finished and not gone");
        let seen = queue.room.now().unwrap();
        queue.take().unwrap();
        queue.room.wait(seen);
        assert!(queue.has_room(2) && !queue.has_room(3));
    }

    #[test]
    fn frames_leave_in_the_order_of_their_numbers() {
        let queue = queue(4);
        for sequence in [2, 1, 4, 3] {
            queue.put(sequence, sequence * 10);
        }
        let taken: Vec<_> = (0..4).map(|_| queue.take().unwrap()).collect();
        assert_eq!(taken, [(1, 10), (2, 20), (3, 30), (4, 40)]);
    }

    #[test]
    fn the_channel_waits_for_its_turn_and_says_so() {
        let queue = queue(4);
        queue.put(2, 'b');
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| queue.take());
            while !queue.is_hungry() {
                std::thread::yield_now();
            }
            queue.put(1, 'a');
            assert_eq!(taking.join().unwrap(), Some((1, 'a')));
        });
        assert!(!queue.is_hungry());
        assert_eq!(queue.take(), Some((2, 'b')));
    }

    #[test]
    fn closing_ends_the_wait() {
        let queue = queue::<u8>(1);
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| queue.take());
            queue.close();
            assert_eq!(taking.join().unwrap(), None);
        });
    }
}
