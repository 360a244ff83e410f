//! Notifies idle workers, and other waiting threads, that there may be pages to encode.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Condvar, Mutex};

use super::SourceLane;

/// A waitable count of events. A thread reads the count, looks for work, and if it has found none
/// waits until the count changes. So an event between the search and the wait is not missed.
#[derive(Default)]
pub struct Signal {
    state: Mutex<State>,
    changed: Condvar,
    /// Set once, before the first event.
    lanes: OnceLock<Vec<Weak<SourceLane>>>,
}

#[derive(Debug, Default)]
struct State {
    events: u64,
    waiting: usize,
    closed: bool,
}

impl Signal {
    /// The count; `None` once the signal is closed.
    pub fn now(&self) -> Option<u64> {
        let state = self.state.lock();
        (!state.closed).then_some(state.events)
    }

    /// Records an event.
    pub fn raise(&self) {
        let mut state = self.state.lock();
        state.events += 1;
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        drop(state);
        for lane in self.lanes.get().into_iter().flatten() {
            if let Some(lane) = lane.upgrade() {
                lane.queue.wake();
            }
        }
    }

    /// Sets the lanes whose senders each event wakes too, because they encode pages themselves.
    /// Only the first call has an effect.
    pub fn also_wakes(&self, lanes: &[Arc<SourceLane>]) {
        self.lanes.get_or_init(|| lanes.iter().map(Arc::downgrade).collect());
    }

    /// Blocks until the count differs from `seen`, or the signal is closed.
    pub fn wait(&self, seen: u64) {
        let mut state = self.state.lock();
        state.waiting += 1;
        while state.events == seen && !state.closed {
            self.changed.wait(&mut state);
        }
        state.waiting -= 1;
    }

    /// Ends all present and future waits.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }
}

impl fmt::Debug for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signal").field("state", &self.state).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_before_the_wait_ends_it() {
        let signal = Signal::default();
        let seen = signal.now().unwrap();
        signal.raise();
        signal.wait(seen);
        assert_ne!(signal.now(), Some(seen));
    }

    #[test]
    fn close_ends_every_wait() {
        let signal = Signal::default();
        std::thread::scope(|scope| {
            scope.spawn(|| signal.wait(0));
            signal.close();
        });
        signal.wait(0);
        assert_eq!(signal.now(), None);
    }
}
