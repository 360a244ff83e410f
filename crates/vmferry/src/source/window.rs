//! The window of one lane: frames that are being filled, sent, or not yet placed.
//!
//! A frame's buffer is kept until the destination says that it is placed, so that the very same
//! bytes can be sent again. Buffers are made on demand up to the limit and then reused, the most
//! recently freed first: while acknowledgements come quickly, few buffers are in use and they
//! stay in the cache.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The window, shared by the lane's encoder, its sender and the reader of acknowledgements.
#[derive(Debug)]
pub struct Window<B> {
    state: Mutex<State<B>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<B> {
    free: Vec<B>,
    unplaced: VecDeque<(u64, B)>,
    placed: u64,
    made: usize,
    limit: usize,
    closed: bool,
}

impl<B> Window<B> {
    /// An open window of `limit` frames.
    pub fn new(limit: usize) -> Self {
        Self {
            state: Mutex::new(State {
                free: Vec::with_capacity(limit),
                unplaced: VecDeque::with_capacity(limit),
                placed: 0,
                made: 0,
                limit,
                closed: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// A buffer to fill, waiting until one is free; `None` once the window is closed.
    pub fn acquire(&self, make: impl FnOnce() -> B) -> Option<B> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(buffer) = state.free.pop() {
                return Some(buffer);
            }
            if state.made < state.limit {
                state.made += 1;
                drop(state);
                return Some(make());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Keeps a sent frame until it is placed. Sequence numbers ascend.
    pub fn sent(&self, sequence: u64, buffer: B) {
        let mut state = self.lock();
        if sequence <= state.placed {
            state.free.push(buffer);
            self.changed.notify_one();
        } else {
            state.unplaced.push_back((sequence, buffer));
        }
    }

    /// Frees every frame up to `sequence`.
    pub fn placed(&self, sequence: u64) {
        let mut state = self.lock();
        state.placed = state.placed.max(sequence);
        while state.unplaced.front().is_some_and(|(first, _)| *first <= sequence) {
            if let Some((_, buffer)) = state.unplaced.pop_front() {
                state.free.push(buffer);
            }
        }
        self.changed.notify_one();
    }

    /// Ends every wait.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_buffers_than_the_limit() {
        let window = Window::new(2);
        let (a, b) = (window.acquire(|| 1).unwrap(), window.acquire(|| 2).unwrap());
        window.sent(1, a);
        window.sent(2, b);
        std::thread::scope(|scope| {
            let third = scope.spawn(|| window.acquire(|| 3));
            window.placed(1);
            assert_eq!(third.join().unwrap(), Some(1), "the freed one, not a new one");
        });
    }

    #[test]
    fn an_acknowledgement_may_overtake_the_sender() {
        let window = Window::new(1);
        let buffer = window.acquire(|| 7).unwrap();
        window.placed(1);
        window.sent(1, buffer);
        assert_eq!(window.acquire(|| 8), Some(7));
    }

    #[test]
    fn closing_ends_the_wait() {
        let window = Window::new(1);
        let _held = window.acquire(|| 1);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| window.acquire(|| 2));
            window.close();
            assert_eq!(waiting.join().unwrap(), None);
        });
    }

    #[test]
    fn the_last_freed_buffer_is_used_first() {
        let window = Window::new(3);
        for (sequence, buffer) in [(1, 'a'), (2, 'b'), (3, 'c')] {
            let made = window.acquire(|| buffer).unwrap();
            window.sent(sequence, made);
        }
        window.placed(3);
        assert_eq!(window.acquire(|| 'z'), Some('c'));
    }
}
