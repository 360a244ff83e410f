//! The userfaultfd of a QEMU that receives with post-copy: who creates it, and who closes it.
//!
//! It must report the kernel's faults, those of KVM, so QEMU's user may not create one by the
//! system call unless `vm.unprivileged_userfaultfd` is 1 or the user is root. The device
//! `/dev/userfaultfd` needs no such right: a process that has it open creates one by `ioctl`,
//! in its own address space. So vmferry opens the device and passes it to QEMU by QMP, and QEMU
//! makes the `ioctl`. This also works if QEMU's `-sandbox` forbids the system call.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use parking_lot::Mutex;

use crate::error::QemuError;
use crate::inject::{self, Injected};

/// The device that creates userfaultfds.
pub const DEVICE: &str = "/dev/userfaultfd";

/// Creates and closes the userfaultfd of a QEMU, from any thread.
pub trait FaultAccess: Send + Sync {
    /// Opens `/dev/userfaultfd`, to pass it to QEMU.
    ///
    /// # Errors
    /// If there is no such device, or this process may not open it.
    fn device(&self) -> Result<File, QemuError>;

    /// Has process `pid` create a userfaultfd that reports the kernel's faults too, and fetches it.
    /// If the process has the device open, it uses that, and otherwise the system call. QEMU keeps
    /// it until [`close`](Self::close), also if this process ends: missing pages stay missing, and
    /// never read as zeros.
    ///
    /// # Errors
    /// `QemuError::Inject` with the reason.
    fn create(&self, pid: u32) -> Result<OwnedFd, QemuError>;

    /// Closes it in the process. A failure leaks a descriptor there, no more.
    fn close(&self);
}

/// The error if the device can't be opened.
pub fn not_opened(source: io::Error) -> QemuError {
    QemuError::Local { action: "open /dev/userfaultfd", source }
}

/// Does this from this process.
#[derive(Debug, Default)]
pub struct DirectFaults(Mutex<Option<Injected>>);

impl FaultAccess for DirectFaults {
    fn device(&self) -> Result<File, QemuError> {
        File::open(DEVICE).map_err(not_opened)
    }

    fn create(&self, pid: u32) -> Result<OwnedFd, QemuError> {
        let injected = inject::kernel_userfaultfd(pid)?;
        let ours = injected
            .descriptor
            .try_clone()
            .map_err(|source| QemuError::Local { action: "duplicate a descriptor", source })?;
        *self.0.lock() = Some(injected);
        Ok(ours)
    }

    fn close(&self) {
        self.0.lock().take();
    }
}

impl Drop for DirectFaults {
    fn drop(&mut self) {
        // Nobody has said that all pages have arrived.
        if let Some(injected) = self.0.get_mut().take() {
            injected.leave();
        }
    }
}
