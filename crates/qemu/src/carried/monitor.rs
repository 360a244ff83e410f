//! A QMP connection on which one thread sends commands while another one listens for events.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::error::QemuError;
use crate::qmp::Qmp;

/// How long one wait lasts: a QEMU that was stopped does not report it.
const LISTEN_PERIOD: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The connection. An answer may arrive together with events, which the thread that asked does not
/// use. So the listener is woken for these events too.
pub struct Monitor {
    qmp: Mutex<Qmp>,
    pid: Option<u32>,
    connection: OwnedFd,
    woken: OwnedFd,
}

/// The right to send commands.
pub struct Orders<'a> {
    qmp: MutexGuard<'a, Qmp>,
    monitor: &'a Monitor,
}

impl Monitor {
    /// Shares a connection.
    ///
    /// # Errors
    /// System call errors.
    pub fn new(qmp: Qmp) -> Result<Self, QemuError> {
        let (connection, pid) = (qmp.descriptor()?, qmp.pid());
        let woken =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
                QemuError::Local { action: "make an event descriptor", source: errno.into() }
            })?;
        Ok(Self { qmp: Mutex::new(qmp), pid, connection, woken })
    }

    /// The QEMU process, if it is visible from here.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Waits until no other thread sends commands.
    pub fn orders(&self) -> Orders<'_> {
        Orders { qmp: self.qmp.lock(), monitor: self }
    }

    /// Waits until QEMU sends something, [`wake`](Self::wake) is called, or a second has passed.
    /// What QEMU sends may be an answer for another thread.
    ///
    /// # Errors
    /// System call errors.
    pub fn listen(&self) -> std::io::Result<()> {
        let mut polled =
            [PollFd::new(&self.connection, PollFlags::IN), PollFd::new(&self.woken, PollFlags::IN)];
        match poll(&mut polled, Some(&LISTEN_PERIOD)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // It is empty if the connection has ended the wait.
        let _ = rustix::io::read(&self.woken, &mut [0; 8]);
        Ok(())
    }

    /// Wakes the listener.
    pub fn wake(&self) {
        // It fails only after 2^64 wake-ups without a listener.
        let _ = rustix::io::write(self.woken.as_fd(), &1_u64.to_ne_bytes());
    }
}

impl Deref for Orders<'_> {
    type Target = Qmp;

    fn deref(&self) -> &Qmp {
        &self.qmp
    }
}

impl DerefMut for Orders<'_> {
    fn deref_mut(&mut self) -> &mut Qmp {
        &mut self.qmp
    }
}

impl Drop for Orders<'_> {
    fn drop(&mut self) {
        if self.qmp.has_news() {
            self.monitor.wake();
        }
    }
}
