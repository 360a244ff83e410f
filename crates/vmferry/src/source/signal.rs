//! How idle workers hear that there may be something to do again, and others that wait for more than that.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Whoever is woken by a [`Signal`] without waiting on it.
pub trait Wake: Send + Sync {
    /// Something has happened.
    fn wake(&self);
}

/// A count of events, to be waited on. Whoever looks for work reads the count first and waits, if it has
/// found none, until the count is another: what happens between look and wait is not missed.
#[derive(Default)]
pub struct Signal {
    state: Mutex<State>,
    changed: Condvar,
    /// Said once, before the first event.
    others: OnceLock<Vec<Weak<dyn Wake>>>,
}

#[derive(Debug, Default)]
struct State {
    events: u64,
    waiting: usize,
    closed: bool,
}

impl Signal {
    /// The count; `None` once it is closed.
    pub fn now(&self) -> Option<u64> {
        let state = self.lock();
        (!state.closed).then_some(state.events)
    }

    /// Something has happened.
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

    /// Says whom each event is to wake besides. Only the first call counts.
    pub fn also_wakes(&self, others: Vec<Weak<dyn Wake>>) {
        self.others.get_or_init(|| others);
    }

    /// Waits until the count is not `seen` any more, or it is closed.
    pub fn wait(&self, seen: u64) {
        let mut state = self.lock();
        state.waiting += 1;
        while state.events == seen && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
    }

    /// Ends every wait, now and for good.
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
