//! Wakes a thread that waits for a local socket.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// An event that a thread waits for together with a socket.
#[derive(Debug)]
pub struct Waker(OwnedFd);

impl Waker {
    /// A waker.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Ends the present wait, or the next one.
    pub fn wake(&self) {
        // It fails only when the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Waits until `socket` is readable or has ended, or until a wake-up. Returns whether the
    /// socket is readable.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self, socket: impl AsFd) -> io::Result<bool> {
        let mut polled = [PollFd::new(&socket, PollFlags::IN), PollFd::new(&self.0, PollFlags::IN)];
        loop {
            match poll(&mut polled, None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        if !polled[1].revents().is_empty() {
            // Empty if another thread was faster.
            let _ = rustix::io::read(&self.0, &mut [0; 8]);
        }
        Ok(!polled[0].revents().is_empty())
    }

    /// Waits for less than a second, or until a wake-up, which also ends the next wait.
    ///
    /// # Errors
    /// The system's.
    pub fn pause(&self, time: Duration) -> io::Result<()> {
        is_readable(&self.0, time).map(drop)
    }
}

/// A time of less than a second.
fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() }
}

/// Whether `socket` is readable or has ended within `wait` (less than a second).
///
/// # Errors
/// The system's.
pub fn is_readable(socket: &impl AsFd, wait: Duration) -> io::Result<bool> {
    match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timespec(wait))) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}
