//! The window of one lane: frames that are being filled, sent, or not yet placed.
//!
//! A frame's buffer is kept until the destination acknowledges it as placed, so that exactly the
//! same bytes can be sent again. Buffers are allocated on demand up to the limit and then reused,
//! the most recently freed one first: while acknowledgements arrive quickly, few buffers are in use
//! and they stay in the cache.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::signal::Signal;

/// The window, shared by the workers, the lane's sender and the reader of acknowledgements.
#[derive(Debug)]
pub struct Window<B> {
    state: Mutex<State<B>>,
    /// Raised when a buffer becomes free after a thread found none. Waking a worker costs more than
    /// checking whether that is needed.
    freed: Arc<Signal>,
}

#[derive(Debug)]
struct State<B> {
    free: Vec<B>,
    /// Sent frames with their numbers, in order.
    unplaced: VecDeque<(u64, B)>,
    /// All frames up to this number are placed.
    placed: u64,
    /// Number of buffers, in use or free.
    made: usize,
    limit: usize,
    /// A thread has found no buffer.
    missed: bool,
}

impl<B> Window<B> {
    /// A window of `limit` frames, which raises `freed` when a buffer becomes free.
    pub fn new(limit: usize, freed: Arc<Signal>) -> Self {
        Self {
            state: Mutex::new(State {
                free: Vec::with_capacity(limit),
                unplaced: VecDeque::with_capacity(limit),
                placed: 0,
                made: 0,
                limit,
                missed: false,
            }),
            freed,
        }
    }

    /// A buffer to fill, if one is free.
    pub fn try_acquire(&self, make: impl FnOnce() -> B) -> Option<B> {
        let mut state = self.state.lock();
        if state.made - state.free.len() >= state.limit {
            state.missed = true;
            return None;
        }
        if let Some(buffer) = state.free.pop() {
            return Some(buffer);
        }
        state.made += 1;
        drop(state);
        Some(make())
    }

    /// Changes the limit of outstanding frames. Frames already beyond it stay.
    pub fn set_limit(&self, limit: usize) {
        let mut state = self.state.lock();
        state.limit = limit;
        self.report_room(state);
    }

    /// Returns a buffer that was not used.
    pub fn give_back(&self, buffer: B) {
        self.state.lock().free.push(buffer);
    }

    /// Keeps a sent frame until it is placed. Sequence numbers ascend.
    pub fn sent(&self, sequence: u64, buffer: B) {
        let mut state = self.state.lock();
        if sequence <= state.placed {
            state.free.push(buffer);
            self.report_room(state);
        } else {
            state.unplaced.push_back((sequence, buffer));
        }
    }

    /// Removes the frames that are sent and not placed, in order, to be sent again. Each must be
    /// passed to [`sent`](Self::sent) again. Acknowledgements may be processed meanwhile.
    pub fn take_unplaced(&self) -> VecDeque<(u64, B)> {
        std::mem::take(&mut self.state.lock().unplaced)
    }

    /// Frees the buffer of every frame up to `sequence`. Returns whether no frame is outstanding.
    pub fn acknowledge(&self, sequence: u64) -> bool {
        let mut state = self.state.lock();
        state.placed = state.placed.max(sequence);
        while state.unplaced.front().is_some_and(|(first, _)| *first <= sequence) {
            if let Some((_, buffer)) = state.unplaced.pop_front() {
                state.free.push(buffer);
            }
        }
        let none_is_out = state.unplaced.is_empty();
        self.report_room(state);
        none_is_out
    }

    /// Notifies threads that found no buffer if one may be acquired again.
    fn report_room(&self, mut state: MutexGuard<'_, State<B>>) {
        let room = state.made - state.free.len() < state.limit;
        let missed = room && std::mem::take(&mut state.missed);
        drop(state);
        if missed {
            self.freed.raise();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window<B>(limit: usize) -> (Window<B>, Arc<Signal>) {
        let freed = Arc::new(Signal::default());
        (Window::new(limit, Arc::clone(&freed)), freed)
    }

    #[test]
    fn window_limits_and_reuses_buffers() {
        let (window, freed) = window(2);
        let (a, b) = (window.try_acquire(|| 1).unwrap(), window.try_acquire(|| 2).unwrap());
        window.sent(1, a);
        window.sent(2, b);
        assert_eq!(window.try_acquire(|| 3), None);
        let seen = freed.now().unwrap();
        window.acknowledge(1);
        freed.wait(seen);
        assert_eq!(window.try_acquire(|| 3), Some(1), "the freed one, not a new one");
        window.give_back(1);
        assert_eq!(window.try_acquire(|| 3), Some(1));
    }

    #[test]
    fn window_grows_and_shrinks() {
        let (window, freed) = window(1);
        let a = window.try_acquire(|| 1).unwrap();
        assert_eq!(window.try_acquire(|| 2), None);
        let seen = freed.now().unwrap();
        window.set_limit(2);
        freed.wait(seen);
        let b = window.try_acquire(|| 2).unwrap();
        window.sent(1, a);
        window.sent(2, b);
        window.set_limit(1);
        window.acknowledge(1);
        assert_eq!(window.try_acquire(|| 3), None, "one is still out");
        window.acknowledge(2);
        assert_eq!(window.try_acquire(|| 3), Some(2), "the last one freed");
        assert_eq!(window.try_acquire(|| 3), None);
    }

    #[test]
    fn acknowledgement_may_overtake_the_sender() {
        let (window, freed) = window(1);
        let buffer = window.try_acquire(|| 7).unwrap();
        window.acknowledge(1);
        assert_eq!(window.try_acquire(|| 8), None);
        let seen = freed.now().unwrap();
        window.sent(1, buffer);
        freed.wait(seen);
        assert_eq!(window.try_acquire(|| 8), Some(7));
    }

    #[test]
    fn unplaced_frames_are_sent_again() {
        let (window, _) = window(3);
        for (sequence, buffer) in [(1, 'a'), (2, 'b'), (3, 'c')] {
            let made = window.try_acquire(|| buffer).unwrap();
            window.sent(sequence, made);
        }
        window.acknowledge(1);
        let mut again = window.take_unplaced();
        assert_eq!(again, [(2, 'b'), (3, 'c')]);
        window.acknowledge(2);
        let (sequence, buffer) = again.pop_front().unwrap();
        window.sent(sequence, buffer);
        let (sequence, buffer) = again.pop_front().unwrap();
        window.sent(sequence, buffer);
        assert_eq!(window.take_unplaced(), [(3, 'c')], "the other one is free");
    }

    #[test]
    fn last_freed_buffer_is_used_first() {
        let (window, _) = window(3);
        for (sequence, buffer) in [(1, 'a'), (2, 'b'), (3, 'c')] {
            let made = window.try_acquire(|| buffer).unwrap();
            window.sent(sequence, made);
        }
        window.acknowledge(3);
        assert_eq!(window.try_acquire(|| 'z'), Some('c'));
    }
}
