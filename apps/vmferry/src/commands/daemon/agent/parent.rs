//! What the agent waits for: its daemon, at the other end of standard input, and changes in the
//! fleet.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::exit::Failure;

/// The daemon. It writes the number of each list of admitted guests that it uses.
pub struct Parent {
    heard: Receiver<Heard>,
    wakes: Sender<Heard>,
    /// The last number that it wrote.
    number: Cell<u64>,
    /// The number of the last list that it was sent.
    sent: Cell<u64>,
    has_ended: Cell<bool>,
    /// Something has changed since the last [`rest`](Self::rest).
    has_changed: Cell<bool>,
}

enum Heard {
    Used(u64),
    DaemonEnded,
    Changed,
}

/// How a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rested {
    /// The time is over.
    Fully,
    /// Something has changed before.
    Changed,
    /// The daemon has ended.
    DaemonEnded,
}

impl Parent {
    /// Listens to the daemon.
    pub fn listen() -> Result<Self, Failure> {
        let (wakes, heard) = channel();
        let daemon = wakes.clone();
        std::thread::Builder::new().name("daemon".into()).spawn(move || {
            let lines = BufReader::new(std::io::stdin()).lines();
            for number in lines.map_while(Result::ok).filter_map(|line| line.parse().ok()) {
                // It is not heard any more once the agent ends.
                let _ = daemon.send(Heard::Used(number));
            }
            let _ = daemon.send(Heard::DaemonEnded);
        })?;
        let (number, sent) = (Cell::new(0), Cell::new(0));
        let (has_ended, has_changed) = (Cell::new(false), Cell::new(false));
        Ok(Self { heard, wakes, number, sent, has_ended, has_changed })
    }

    /// Ends the agent's next or present [`rest`](Self::rest), from any thread.
    pub fn waker(&self) -> impl Fn() + Clone + Send + Sync + 'static {
        let wakes = self.wakes.clone();
        move || {
            // An agent that ends needs no wake-up.
            let _ = wakes.send(Heard::Changed);
        }
    }

    /// Waits until this moment, or something has changed, or the daemon has ended.
    pub fn rest(&self, until: Instant) -> Rested {
        self.wait(until, || self.has_changed.get());
        match () {
            () if self.has_ended.get() => Rested::DaemonEnded,
            () if self.has_changed.replace(false) => Rested::Changed,
            () => Rested::Fully,
        }
    }

    /// The number of the next list of admitted guests.
    pub fn next_number(&self) -> u64 {
        self.sent.set(self.sent.get() + 1);
        self.sent.get()
    }

    /// Waits until the daemon uses a list, for this time at most.
    pub fn uses(&self, number: u64, time: Duration) -> bool {
        self.wait(Instant::now() + time, || self.number.get() >= number);
        self.number.get() >= number
    }

    /// Waits until `is_enough`, or the daemon has ended.
    fn wait(&self, until: Instant, is_enough: impl Fn() -> bool) {
        // All that was heard already is one change.
        self.heard.try_iter().for_each(|heard| self.note(heard));
        while !is_enough() && !self.has_ended.get() {
            match self.heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(heard) => self.note(heard),
                Err(_) => return,
            }
        }
    }

    fn note(&self, heard: Heard) {
        match heard {
            Heard::Used(number) => self.number.set(number),
            Heard::DaemonEnded => self.has_ended.set(true),
            Heard::Changed => self.has_changed.set(true),
        }
    }
}
