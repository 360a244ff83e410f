//! Who starts a QEMU, ends it, and looks into it.
//!
//! All three take rights that a process which reads from the network should not have: to run programs, to signal others,
//! to read their `/proc`. [`LocalStarter`] does it in this process. [`StarterProcess`] asks another process to, which was
//! begun before this one was restricted, knows the one command that it may run, and looks into nothing but what
//! it has started: [`serve`] is its work.

mod messages;
mod process;
mod relay;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

pub use self::process::{StarterProcess, serve};
use self::relay::Relay;
use crate::error::QemuError;
use crate::memory_file::{self, Examiner};
use crate::process::{self as proc, Mapping, ProcessIdentity};
use crate::qmp::Qmp;

/// How a QEMU process is looked into.
pub trait View {
    /// The process of a QEMU, if it is seen.
    fn process(&self, qmp: &Qmp) -> Option<u32> {
        qmp.pid()
    }

    /// Its mappings of shared files.
    ///
    /// # Errors
    /// If they may not be read.
    fn shared_mappings(&mut self, pid: u32) -> Result<Vec<Mapping>, QemuError>;

    /// Its page table, for `PAGEMAP_SCAN`.
    ///
    /// # Errors
    /// If it may not be looked at.
    fn pagemap(&mut self, pid: u32) -> Result<File, QemuError>;

    /// The file behind one of its mappings, for reading and writing.
    ///
    /// # Errors
    /// If it may not be opened so.
    fn open_file(&mut self, pid: u32, mapping: &Mapping) -> Result<File, QemuError>;

    /// Which process it is.
    ///
    /// # Errors
    /// If there is none.
    fn identify(&mut self, pid: u32) -> Result<ProcessIdentity, QemuError>;

    /// How any thread sees whether it stands still.
    fn looker(&self) -> Looker;

    /// How any thread sees whose its memory files are.
    fn examiner(&self) -> Examiner;

    /// Whether it stands still.
    fn is_stopped(&self, pid: u32) -> bool {
        self.looker()(pid)
    }
}

/// Sees whether a process stands still, as after `SIGSTOP`. One that can't be seen does not.
pub type Looker = Arc<dyn Fn(u32) -> bool + Send + Sync>;

/// Starts one QEMU at a time, again and again.
pub trait Starter: View + Send {
    /// Starts it; the process.
    ///
    /// # Errors
    /// What the system says.
    fn start(&mut self) -> Result<u32, QemuError>;

    /// How it has ended, if it has.
    ///
    /// # Errors
    /// What the system says, or that none was started.
    fn try_wait(&mut self) -> Result<Option<ExitStatus>, QemuError>;

    /// Waits until it has ended.
    ///
    /// # Errors
    /// As [`try_wait`](Self::try_wait).
    fn wait(&mut self) -> Result<ExitStatus, QemuError>;

    /// Ends it at once. One that has ended already needs nothing.
    fn end(&mut self);

    /// The last lines that the QEMU started last has printed on its standard error, in one line
    /// without control characters. `None` if it has printed nothing, or if that is not known.
    fn last_words(&mut self) -> Option<String> {
        None
    }

    /// Says whether QEMU has a guest. One that has outlives the receiver; one that has
    /// none would wait for ever, and ends with that process.
    fn keep_qemu(&mut self, keep: Keep);
}

/// What becomes of a QEMU when the receiver has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// It has a guest, and goes on.
    WithGuest,
    /// It has none, and ends.
    Nothing,
}

/// Looks from this process.
pub struct DirectView;

impl View for DirectView {
    fn shared_mappings(&mut self, pid: u32) -> Result<Vec<Mapping>, QemuError> {
        let all = proc::mappings(pid)?;
        Ok(all.into_iter().filter(|mapping| mapping.shared && mapping.file.1 != 0).collect())
    }

    fn pagemap(&mut self, pid: u32) -> Result<File, QemuError> {
        proc::pagemap(pid)
    }

    fn open_file(&mut self, pid: u32, mapping: &Mapping) -> Result<File, QemuError> {
        memory_file::open(pid, mapping)
    }

    fn identify(&mut self, pid: u32) -> Result<ProcessIdentity, QemuError> {
        ProcessIdentity::of(pid)
    }

    fn looker(&self) -> Looker {
        Arc::new(proc::is_stopped)
    }

    fn examiner(&self) -> Examiner {
        Arc::new(|pid, mapping| memory_file::examine(pid, mapping, &[std::process::id()]))
    }
}

/// Starts QEMU from this process. Dropped, it leaves a QEMU that has a guest alone, and ends
/// another. What QEMU prints on its standard error is printed by this process, and lost once that
/// has ended.
pub struct LocalStarter {
    command: Option<String>,
    socket: PathBuf,
    child: Option<Child>,
    /// Reads what the QEMU that was started last prints.
    relay: Option<Relay>,
    keep: Keep,
    /// A QEMU that somebody else has started.
    running: Option<u32>,
}

impl LocalStarter {
    /// For this command line of a shell, to which `-incoming defer -S` and a QMP socket at `socket` are added.
    #[must_use]
    pub fn new(command: &str, socket: &Path) -> Self {
        let (command, socket) = (Some(command.to_owned()), socket.to_owned());
        Self { command, socket, child: None, relay: None, keep: Keep::Nothing, running: None }
    }

    /// One that starts nothing, and looks into a QEMU that runs already.
    #[must_use]
    pub fn beside(pid: u32) -> Self {
        let (socket, running) = (PathBuf::new(), Some(pid));
        Self { command: None, socket, child: None, relay: None, keep: Keep::Nothing, running }
    }

    /// Prints what a QEMU that has a guest prints, until it has ended.
    fn stay_with_guest(mut self) {
        if self.keep == Keep::Nothing {
            return;
        }
        if let Some(child) = &mut self.child {
            // A parent takes note of its child's end, or its number is not free.
            let _ = child.wait();
        }
        if let Some(relay) = self.relay.take() {
            relay.join();
        }
    }

    fn child(&mut self) -> Result<&mut Child, QemuError> {
        let source = || io::Error::from(io::ErrorKind::NotFound);
        self.child.as_mut().ok_or_else(|| local("find QEMU")(source()))
    }

    /// Whether a process is the one that was started, or comes from it: a shell may stand between.
    fn is_ours(&self, pid: u32) -> bool {
        if self.running == Some(pid) {
            return true;
        }
        let Some(child) = &self.child else { return false };
        let mut at = pid;
        for _ in 0..8 {
            if at == child.id() {
                return true;
            }
            let status = std::fs::read_to_string(format!("/proc/{at}/status")).unwrap_or_default();
            let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
            match parent.and_then(|parent| parent.trim().parse().ok()) {
                Some(parent) => at = parent,
                None => return false,
            }
        }
        false
    }
}

impl View for LocalStarter {
    fn shared_mappings(&mut self, pid: u32) -> Result<Vec<Mapping>, QemuError> {
        DirectView.shared_mappings(pid)
    }

    fn pagemap(&mut self, pid: u32) -> Result<File, QemuError> {
        DirectView.pagemap(pid)
    }

    fn open_file(&mut self, pid: u32, mapping: &Mapping) -> Result<File, QemuError> {
        DirectView.open_file(pid, mapping)
    }

    fn identify(&mut self, pid: u32) -> Result<ProcessIdentity, QemuError> {
        DirectView.identify(pid)
    }

    fn looker(&self) -> Looker {
        DirectView.looker()
    }

    fn examiner(&self) -> Examiner {
        DirectView.examiner()
    }
}

impl Starter for LocalStarter {
    fn start(&mut self) -> Result<u32, QemuError> {
        let source = || io::Error::from(io::ErrorKind::Unsupported);
        let command = self.command.as_ref().ok_or_else(|| local("start QEMU")(source()))?;
        // A socket of one that was killed would be taken for the new one's.
        let _ = std::fs::remove_file(&self.socket);
        let (relay, stderr) = Relay::begin().map_err(local("start QEMU"))?;
        // QEMU does not die of a broken pipe by itself; what it is wrapped in might.
        let line = format!(
            "trap '' PIPE; exec {command} -incoming defer -S \
             -qmp \"unix:$VMFERRY_QMP,server=on,wait=off\""
        );
        let child = Command::new("/bin/sh")
            .args(["-c", &line])
            .env("VMFERRY_QMP", &self.socket)
            .stdin(Stdio::null())
            // Standard output is vmferry's own, which may end before QEMU does. What comes there
            // may be the guest's words, which are none of QEMU's.
            .stdout(io::stderr().as_fd().try_clone_to_owned().map_err(local("start QEMU"))?)
            .stderr(stderr)
            // A guest must not die of what was typed at vmferry's terminal.
            .process_group(0)
            .spawn()
            .map_err(local("start QEMU"))?;
        (self.keep, self.relay) = (Keep::Nothing, Some(relay));
        Ok(self.child.insert(child).id())
    }

    fn try_wait(&mut self) -> Result<Option<ExitStatus>, QemuError> {
        self.child()?.try_wait().map_err(local("wait for QEMU"))
    }

    fn wait(&mut self) -> Result<ExitStatus, QemuError> {
        self.child()?.wait().map_err(local("wait for QEMU"))
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            // One that has ended already needs no signal.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn last_words(&mut self) -> Option<String> {
        self.relay.as_ref()?.last_words()
    }

    fn keep_qemu(&mut self, keep: Keep) {
        self.keep = keep;
    }
}

impl Drop for LocalStarter {
    fn drop(&mut self) {
        if self.keep == Keep::Nothing {
            self.end();
        }
    }
}

fn local(action: &'static str) -> impl FnOnce(io::Error) -> QemuError {
    move |source| QemuError::Local { action, source }
}
