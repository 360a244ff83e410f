//! A VMM that is stopped, and ended.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Signal, pidfd_send_signal};
use vmferry_qemu::{has_ended_within, pidfd};

/// How long a VMM that was asked to end may take. Its disks are flushed meanwhile. One that waits
/// for a missing page does not hear the request.
const ASKED: Duration = Duration::from_secs(5);

/// How long a killed VMM may take: its memory is freed meanwhile.
const KILLED: Duration = Duration::from_secs(30);

/// How long to wait until each thread of a VMM is seen to be stopped.
const STOPPED: Duration = Duration::from_secs(2);

/// Pause between looks at the threads.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

/// A process.
pub struct Process {
    pid: u32,
    descriptor: OwnedFd,
}

/// A process that is stopped. It goes on when this is dropped.
pub struct Stopped<'a>(&'a Process);

impl Process {
    /// Finds a process.
    pub fn find(pid: u32) -> anyhow::Result<Self> {
        let descriptor = pidfd(pid).with_context(|| format!("process {pid} has ended"))?;
        Ok(Self { pid, descriptor })
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let sent = pidfd_send_signal(&self.descriptor, signal);
        sent.with_context(|| {
            format!("process {} can't be signaled: run this as root or as its user", self.pid)
        })
    }

    /// Stops all its threads: none returns to its program or to the guest from now on. One that
    /// needs a missing page in a system call can't stop before the page comes. It may spin in the
    /// kernel until then (Linux `fault_signal_pending` is for faults of user mode), so it is not
    /// waited for without end.
    pub fn stop(&self) -> anyhow::Result<Stopped<'_>> {
        self.signal(Signal::STOP)?;
        let stopped = Stopped(self);
        let until = Instant::now() + STOPPED;
        while !self.stands_still() && Instant::now() < until {
            // Nothing tells when a thread has stopped.
            std::thread::sleep(LOOK_PERIOD);
        }
        Ok(stopped)
    }

    /// Whether each thread is stopped, or waits in the kernel as for a page.
    fn stands_still(&self) -> bool {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", self.pid)) else {
            return true;
        };
        threads.flatten().all(|thread| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // Its name, in parentheses, may contain anything.
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            matches!(state, None | Some('T' | 't' | 'D' | 'Z' | 'X'))
        })
    }

    /// Ends it: by a request if it listens to one, and otherwise at once.
    pub fn end(&self, listens: bool) -> anyhow::Result<()> {
        if listens {
            self.signal(Signal::TERM)?;
            if self.has_ended_within(ASKED)? {
                return Ok(());
            }
        }
        self.signal(Signal::KILL)?;
        anyhow::ensure!(
            self.has_ended_within(KILLED)?,
            "process {} was killed and has not ended in {} s",
            self.pid,
            KILLED.as_secs()
        );
        Ok(())
    }

    fn has_ended_within(&self, time: Duration) -> anyhow::Result<bool> {
        has_ended_within(&self.descriptor, time)
            .with_context(|| format!("wait for the end of process {}", self.pid))
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        // Fails only if the process has ended.
        let _ = self.0.signal(Signal::CONT);
    }
}
