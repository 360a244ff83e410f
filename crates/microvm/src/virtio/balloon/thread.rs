//! The thread that serves the queues of a balloon.

use std::sync::atomic::Ordering;

use vmferry_balloon::{MAX_QUEUES, Progress};
use vmm_sys_util::epoll::EpollEvent;

use super::{ALL_QUEUES, Shared, State};

impl Shared {
    /// The thread's loop. It releases the lock after each bounded piece of work, so that
    /// [`BalloonDevice::pause`] waits for one piece at most.
    pub(super) fn serve(&self) {
        loop {
            // Taking the lock again at once would starve the other threads.
            while self.waiting.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            }
            let mut state = self.state.lock();
            let paused = |state: &mut State| !state.running && !state.ended;
            self.changed.wait_while(&mut state, paused);
            if state.ended {
                return;
            }
            state.pending |= self.take_kicks();
            if state.pending == 0 {
                drop(state);
                self.wait_for_kicks();
                continue;
            }
            self.work(&mut state);
        }
    }

    fn work(&self, state: &mut State) {
        // Round-robin, so that a queue that never empties delays the others by one call only.
        let next = state.pending & state.next;
        let first = if next == 0 { state.pending } else { next };
        let queue = first.trailing_zeros() as u16;
        state.next = ALL_QUEUES << (queue + 1);
        let answers = state.transport.device.host().answers;
        let progress = state.transport.device.process(queue);
        state.pending &= !(1 << queue);
        if progress == Progress::More {
            // The queue is processed again after the others.
            let _ = self.kicks[usize::from(queue)].write(1);
        }
        if state.transport.device.host().answers != answers {
            self.changed.notify_all();
        }
    }

    /// The queues that were kicked since the last call.
    fn take_kicks(&self) -> u32 {
        let _ = self.wake.read();
        let kicked = (0..MAX_QUEUES).filter(|queue| self.kicks[*queue].read().is_ok());
        kicked.fold(0, |all, queue| all | 1 << queue)
    }

    fn wait_for_kicks(&self) {
        // One event is enough, because the caller reads all eventfds. A signal only causes an extra
        // look.
        let _ = self.epoll.wait(-1, &mut [EpollEvent::default()]);
    }
}
