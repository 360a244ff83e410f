//! Notifies idle workers, and other waiting threads, that there may be work.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// A thread that a [`Signal`] wakes although it does not wait on the signal.
pub trait Wake: Send + Sync {
    /// An event has happened.
    fn wake(&self);
}

/// A waitable count of events. A thread reads the count, looks for work, and if it has found none
/// waits until the count changes. So an event between the search and the wait is not missed.
#[derive(Default)]
pub struct Signal {
    state: Mutex<State>,
    changed: Condvar,
    /// Set once, before the first event.
    others: OnceLock<Vec<Weak<dyn Wake>>>,
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
        let state = self.lock();
        (!state.closed).then_some(state.events)
    }

    /// Records an event.
    pub fn raise(&self) {
        let mut state = self.lock();
        state.events += 1;
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        drop(state);
        for other in self.others.get().into_iter().flatten() {
            if let Some(other) = other.upgrade() {
                other.wake();
            }
        }
    }

    /// Sets the others that each event wakes. Only the first call has an effect.
    pub fn also_wakes(&self, others: Vec<Weak<dyn Wake>>) {
        self.others.get_or_init(|| others);
    }

    /// Blocks until the count differs from `seen`, or the signal is closed.
    pub fn wait(&self, seen: u64) {
        let mut state = self.lock();
        state.waiting += 1;
        while state.events == seen && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
    }

    /// Ends all present and future waits.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn what_happens_before_the_wait_ends_it() {
        let signal = Signal::default();
        let seen = signal.now().unwrap();
        signal.raise();
        signal.wait(seen);
        assert_ne!(signal.now(), Some(seen));
    }

    #[test]
    fn closing_ends_every_wait() {
        let signal = Signal::default();
        std::thread::scope(|scope| {
            scope.spawn(|| signal.wait(0));
            signal.close();
        });
        signal.wait(0);
        assert_eq!(signal.now(), None);
    }
}
