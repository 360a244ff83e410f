//! A QMP connection that one thread gives orders through while another one listens.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::error::QemuError;
use crate::qmp::Qmp;

/// How long is listened at a time: a QEMU that was stopped does not say so.
const LISTEN_PERIOD: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The connection. An answer may bring events along, which are nobody's that asked: whoever listens is woken
/// for them too.
pub struct Monitor {
    qmp: Mutex<Qmp>,
    pid: Option<u32>,
    connection: OwnedFd,
    woken: OwnedFd,
}

/// The right to give orders.
pub struct Orders<'a> {
    qmp: MutexGuard<'a, Qmp>,
    monitor: &'a Monitor,
}

impl Monitor {
    /// Shares a connection.
    ///
    /// # Errors
    /// The system's.
    pub fn new(qmp: Qmp) -> Result<Self, QemuError> {
        let (connection, pid) = (qmp.descriptor()?, qmp.pid());
        let woken =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
                QemuError::Local { action: "make an event descriptor", source: errno.into() }
            })?;
        Ok(Self { qmp: Mutex::new(qmp), pid, connection, woken })
    }

    /// The QEMU process, if it is seen from here.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Waits until nobody else gives orders.
    pub fn orders(&self) -> Orders<'_> {
        Orders { qmp: self.qmp.lock().unwrap_or_else(PoisonError::into_inner), monitor: self }
    }

    /// Waits until QEMU says something, or [`wake`](Self::wake) is called, or for a second. What it says may be somebody
    /// else's answer.
    ///
    /// # Errors
    /// The system's.
    pub fn listen(&self) -> std::io::Result<()> {
        let mut polled =
            [PollFd::new(&self.connection, PollFlags::IN), PollFd::new(&self.woken, PollFlags::IN)];
        match poll(&mut polled, Some(&LISTEN_PERIOD)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Empty, if it was the connection.
        let _ = rustix::io::read(&self.woken, &mut [0; 8]);
        Ok(())
    }

    /// Wakes whoever listens.
    pub fn wake(&self) {
        // It fails when it was woken 2^64 times and has not listened.
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
