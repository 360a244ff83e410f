//! The agent's view of its daemon, at the other end of standard input.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::exit::Failure;

/// The daemon. It writes the number of each list of admitted guests that it uses.
pub struct Parent {
    heard: Receiver<u64>,
    /// The last number that it wrote.
    number: Cell<u64>,
    /// The number of the last list that it was sent.
    sent: Cell<u64>,
}

impl Parent {
    /// Listens to the daemon.
    pub fn listen() -> Result<Self, Failure> {
        let (lines, heard) = channel();
        std::thread::Builder::new().name("daemon".into()).spawn(move || {
            for line in BufReader::new(std::io::stdin()).lines() {
                let Ok(line) = line else { return };
                if let Ok(number) = line.parse()
                    && lines.send(number).is_err()
                {
                    return;
                }
            }
        })?;
        Ok(Self { heard, number: Cell::new(0), sent: Cell::new(0) })
    }

    /// Waits for this time. Returns whether the daemon has ended.
    pub fn ends_within(&self, time: Duration) -> bool {
        self.wait(time, |_| false)
    }

    /// The number of the next list of admitted guests.
    pub fn next_number(&self) -> u64 {
        self.sent.set(self.sent.get() + 1);
        self.sent.get()
    }

    /// Waits until the daemon uses a list, for this time at most.
    pub fn uses(&self, number: u64, time: Duration) -> bool {
        self.wait(time, |last| last >= number);
        self.number.get() >= number
    }

    /// Waits until it has written such a number, or has ended. Returns whether it has ended.
    fn wait(&self, time: Duration, is_enough: impl Fn(u64) -> bool) -> bool {
        let until = Instant::now() + time;
        while !is_enough(self.number.get()) {
            match self.heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(number) => self.number.set(number),
                Err(RecvTimeoutError::Timeout) => return false,
                Err(RecvTimeoutError::Disconnected) => return true,
            }
        }
        false
    }
}
