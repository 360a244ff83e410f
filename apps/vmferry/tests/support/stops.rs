//! Processes of a migration that are stopped (`SIGSTOP`) and continued (`SIGCONT`).

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vmferry_qemu_lab::Qemu;

use super::Running;
use super::scene::Scene;

/// A process of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    Sender,
    Guardian,
    Receiver,
    SourceQemu,
    DestinationQemu,
}

impl Who {
    pub const ALL: [Self; 5] =
        [Self::Sender, Self::Guardian, Self::Receiver, Self::SourceQemu, Self::DestinationQemu];

    pub fn name(self) -> &'static str {
        match self {
            Self::Sender => "the sender",
            Self::Guardian => "the guardian",
            Self::Receiver => "the receiver",
            Self::SourceQemu => "the source's QEMU",
            Self::DestinationQemu => "the destination's QEMU",
        }
    }

    pub fn pid(self, scene: &Scene, there: &Qemu, send: &Running, receiving: &Running) -> u32 {
        match self {
            Self::Sender => send.child.id(),
            Self::Guardian => guardian(send),
            Self::Receiver => receiving.child.id(),
            Self::SourceQemu => scene.here.child.id(),
            Self::DestinationQemu => there.child.id(),
        }
    }
}

/// The guardian of a running sender.
pub fn guardian(send: &Running) -> u32 {
    guardian_of(send.child.id())
}

/// The guardian of a running sender, by its process ID.
pub fn guardian_of(sender: u32) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{sender}/task/{sender}/children"));
    children.unwrap().trim().parse().expect("a sender has one child")
}

/// A stopped process, until it is continued or this is dropped.
pub struct Stopped(Pid);

impl Stopped {
    /// Stops the process and waits until it has stopped.
    pub fn now(pid: u32) -> Self {
        let stopped = Self(Pid::from_raw(pid as i32).unwrap());
        kill_process(stopped.0, Signal::STOP).unwrap();
        assert!(stopped.is_still(), "process {pid} does not stop");
        stopped
    }

    /// Whether the process is stopped. While vmferry lets a thread of it execute a system call, the
    /// process is traced instead, and stopped again when that ends.
    pub fn is_still(&self) -> bool {
        let pid = self.0.as_raw_nonzero().get().unsigned_abs();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !is_stopped(pid) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    pub fn wake(self) {}
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // A process that was killed needs no SIGCONT.
        let _ = kill_process(self.0, Signal::CONT);
    }
}

fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}
