//! A QEMU that vmferry starts to take a guest.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};

use crate::destination::{Expected, QemuDestination};
use crate::error::QemuError;

/// How long QEMU may take until it listens.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A destination whose QEMU is started from a command line, and anew after each attempt that has used it
/// up. Dropped, the QEMU is ended, unless it was [taken](Self::into_child).
pub struct StartedQemu {
    command: String,
    socket: PathBuf,
    expected: Expected,
    running: Option<Running>,
}

struct Running {
    child: Child,
    qemu: QemuDestination,
}

impl StartedQemu {
    /// Starts QEMU with this command line of a shell, to which `-incoming defer -S` and a QMP socket at
    /// `socket` are added.
    ///
    /// # Errors
    /// If it does not come up, or can't take a guest.
    pub fn start(command: &str, socket: &Path, expected: Expected) -> Result<Self, QemuError> {
        let running = Running::start(command, socket, expected.clone())?;
        let (command, socket) = (command.to_owned(), socket.to_owned());
        Ok(Self { command, socket, expected, running: Some(running) })
    }

    /// Its QMP socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The QEMU process, for whoever hosts the guest from now on; QMP is free for others.
    #[must_use]
    pub fn into_child(mut self) -> Option<Child> {
        self.running.take().map(|running| running.child)
    }
}

impl Running {
    fn start(command: &str, socket: &Path, expected: Expected) -> Result<Self, QemuError> {
        let failed = |action| move |source| QemuError::Local { action, source };
        // A socket of one that was killed would be taken for the new one's.
        let _ = std::fs::remove_file(socket);
        let line = format!(
            "exec {command} -incoming defer -S -qmp \"unix:$VMFERRY_QMP,server=on,wait=off\""
        );
        let mut child = Command::new("/bin/sh")
            .args(["-c", &line])
            .env("VMFERRY_QMP", socket)
            .stdin(Stdio::null())
            // A guest must not die of what was typed at vmferry's terminal.
            .process_group(0)
            .spawn()
            .map_err(failed("start QEMU"))?;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(status) = child.try_wait().map_err(failed("wait for QEMU"))? {
                return Err(QemuError::Ended { status });
            }
            if std::os::unix::net::UnixStream::connect(socket).is_ok() {
                break;
            }
            if Instant::now() >= deadline {
                end(&mut child);
                let source = std::io::ErrorKind::TimedOut.into();
                return Err(QemuError::Local { action: "reach QEMU by QMP", source });
            }
            // A socket that appears wakes nobody.
            std::thread::sleep(Duration::from_millis(5));
        }
        match QemuDestination::attach(socket, expected) {
            Ok(qemu) => Ok(Self { child, qemu }),
            Err(error) => {
                end(&mut child);
                Err(error)
            }
        }
    }
}

/// Ends a QEMU that no guest runs in.
fn end(child: &mut Child) -> Option<ExitStatus> {
    // One that has ended already needs no signal.
    let _ = child.kill();
    child.wait().ok()
}

impl Drop for StartedQemu {
    fn drop(&mut self) {
        if let Some(mut running) = self.running.take() {
            end(&mut running.child);
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

impl DestinationVm for StartedQemu {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        let running = match self.running.take() {
            Some(running) => running,
            None => Running::start(&self.command, &self.socket, self.expected.clone())
                .map_err(|error| PrepareError::Vm(error.into()))?,
        };
        self.running.insert(running).qemu.prepare(guest)
    }

    fn release(&self) -> String {
        self.running.as_ref().map_or_else(String::new, |running| running.qemu.release())
    }

    fn load(&mut self, state: &[u8]) -> Result<(), VmError> {
        self.running.as_mut().ok_or("there is no QEMU")?.qemu.load(state)
    }

    fn discard(&mut self) {
        let spent = self.running.as_mut().is_some_and(|running| {
            running.qemu.discard();
            running.qemu.is_spent()
        });
        if spent && let Some(mut running) = self.running.take() {
            end(&mut running.child);
        }
    }

    fn run(&mut self) -> Result<(), VmError> {
        self.running.as_mut().ok_or("there is no QEMU")?.qemu.run()
    }
}
