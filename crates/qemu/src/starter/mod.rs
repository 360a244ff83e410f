//! Starting a QEMU, ending it, and reading its `/proc` files.
//!
//! All three take rights that a process which reads from the network should not have: to run
//! programs, to signal other processes, to read their `/proc`. [`LocalStarter`] does this in the
//! calling process. [`StarterProcess`] asks another process, which was started before the caller
//! was sandboxed, may run only one command, and gives access only to what it has started. [`serve`]
//! is the loop of that process.

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
use crate::direct_view::DirectView;
use crate::error::QemuError;
use crate::fault_access::{DirectFaults, FaultAccess};
use crate::identity::ProcessIdentity;
use crate::inventory::OpenImage;
use crate::memory_file::Examiner;
use crate::process::Mapping;
use crate::sample::BlockReader;
use crate::view::{Looker, View};

/// Starts one QEMU at a time, any number of times.
pub trait Starter: View + Send {
    /// Starts it, and returns its PID.
    ///
    /// # Errors
    /// System call errors.
    fn start(&mut self) -> Result<u32, QemuError>;

    /// Its exit status, if it has ended.
    ///
    /// # Errors
    /// System call errors, or that none was started.
    fn try_wait(&mut self) -> Result<Option<ExitStatus>, QemuError>;

    /// Waits until it has ended.
    ///
    /// # Errors
    /// As [`try_wait`](Self::try_wait).
    fn wait(&mut self) -> Result<ExitStatus, QemuError>;

    /// Kills it. Does nothing if it has ended already.
    fn end(&mut self);

    /// The last lines that the most recently started QEMU has printed on its standard error, in one
    /// line without control characters. `None` if it has printed nothing, or if its output is not
    /// known.
    fn last_words(&mut self) -> Option<String> {
        None
    }

    /// Sets whether QEMU has a guest. A QEMU that has a guest outlives the receiver. A QEMU without
    /// one would wait forever, and is ended with the receiver.
    fn keep_qemu(&mut self, keep: Keep);
}

/// What happens to a QEMU when the receiver has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// It has a guest, and keeps running.
    WithGuest,
    /// It has no guest, and is ended.
    Nothing,
}

/// Starts QEMU from this process. On drop, it leaves a QEMU that has a guest running, and kills any
/// other. This process forwards what QEMU prints on its standard error; once this process has
/// ended, that output is lost.
pub struct LocalStarter {
    command: Option<String>,
    socket: PathBuf,
    child: Option<Child>,
    /// Reads the output of the most recently started QEMU.
    relay: Option<Relay>,
    keep: Keep,
    /// A QEMU that this starter has not started.
    running: Option<u32>,
    /// The userfaultfd of QEMU's missing pages.
    faults: Arc<DirectFaults>,
}

impl LocalStarter {
    /// A starter for this shell command line, to which `-incoming defer -S` and a QMP socket at
    /// `socket` are added.
    #[must_use]
    pub fn new(command: &str, socket: &Path) -> Self {
        Self::of(Some(command.to_owned()), socket.to_owned(), None)
    }

    /// A starter that starts nothing, and gives access to a running QEMU.
    #[must_use]
    pub fn beside(pid: u32) -> Self {
        Self::of(None, PathBuf::new(), Some(pid))
    }

    fn of(command: Option<String>, socket: PathBuf, running: Option<u32>) -> Self {
        let faults = Arc::default();
        Self { command, socket, child: None, relay: None, keep: Keep::Nothing, running, faults }
    }

    /// Forwards what a QEMU that has a guest prints, until it has ended.
    fn stay_with_guest(mut self) {
        if self.keep == Keep::Nothing {
            return;
        }
        if let Some(child) = &mut self.child {
            // A parent must reap its child, or the PID is never freed.
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

    /// Whether a process is the one that was started, or its descendant: a shell may be in between.
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

    fn open_images(&mut self, pid: u32) -> Result<Vec<OpenImage>, QemuError> {
        DirectView.open_images(pid)
    }

    fn identify(&mut self, pid: u32) -> Result<ProcessIdentity, QemuError> {
        DirectView.identify(pid)
    }

    fn gives_descriptors(&mut self, pid: u32) -> bool {
        DirectView.gives_descriptors(pid)
    }

    fn looker(&self) -> Looker {
        DirectView.looker()
    }

    fn examiner(&self) -> Examiner {
        DirectView.examiner()
    }

    fn block_reader(&self) -> BlockReader {
        DirectView.block_reader()
    }

    fn fault_access(&self) -> Arc<dyn FaultAccess> {
        self.faults.clone()
    }
}

impl Starter for LocalStarter {
    fn start(&mut self) -> Result<u32, QemuError> {
        let source = || io::Error::from(io::ErrorKind::Unsupported);
        let command = self.command.as_ref().ok_or_else(|| local("start QEMU")(source()))?;
        // A socket of a killed QEMU would be mistaken for the new one's.
        let _ = std::fs::remove_file(&self.socket);
        let (relay, stderr) = Relay::begin().map_err(local("start QEMU"))?;
        // QEMU ignores SIGPIPE by itself; a wrapper around it might not.
        let line = format!(
            "trap '' PIPE; exec {command} -incoming defer -S \
             -qmp \"unix:$VMFERRY_QMP,server=on,wait=off\""
        );
        let child = Command::new("/bin/sh")
            .args(["-c", &line])
            .env("VMFERRY_QMP", &self.socket)
            .stdin(Stdio::null())
            // Not vmferry's standard output, which may be closed before QEMU ends. It may also
            // carry the guest's own output, which is not kept as QEMU's messages.
            .stdout(io::stderr().as_fd().try_clone_to_owned().map_err(local("start QEMU"))?)
            .stderr(stderr)
            // Ctrl-C at vmferry's terminal must not kill a guest.
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
            // A process that has ended needs no signal.
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
