//! Real libvirt daemons, fetched by `scripts/setup-libvirt`. Each runs on a host of its own: mount
//! and UTS namespaces with their own `/run`, `/etc` and `/var`, which show libvirt's programs and a
//! QEMU of `scripts/setup-qemu` in `/usr`. All other paths are the same on every host, so a
//! directory in `/tmp` is storage that hosts share. Needs root.

#![forbid(unsafe_code)]

mod boot;
mod disk;
mod domain;
mod guest;
mod host;

pub use disk::{Disk, ImageFormat};
pub use domain::{Domain, Guest};
pub use host::{LibvirtHost, QemuUser};
pub use vmferry_qemu_lab::Said;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a step may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// A version of libvirt, with the version of QEMU that the same Debian suite has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LibvirtVersion {
    /// libvirt 9.0 and QEMU 7.2, from Debian bookworm.
    V9_0,
    /// libvirt 11.3 and QEMU 10.0, from bookworm-backports.
    V11_3,
}

impl LibvirtVersion {
    /// All versions.
    pub const ALL: [Self; 2] = [Self::V9_0, Self::V11_3];

    /// The version's number.
    pub fn number(self) -> &'static str {
        match self {
            Self::V9_0 => "9.0",
            Self::V11_3 => "11.3",
        }
    }

    /// The number of the QEMU version.
    pub fn qemu_number(self) -> &'static str {
        match self {
            Self::V9_0 => "7.2",
            Self::V11_3 => "10.0",
        }
    }

    /// Where libvirt's packages are unpacked.
    fn libvirt(self) -> PathBuf {
        vmferry_kit::packages("libvirt").join(self.number())
    }

    /// Where QEMU's packages are unpacked.
    fn qemu(self) -> PathBuf {
        vmferry_kit::packages("qemu").join(self.qemu_number())
    }
}

/// Polls until `found` returns a value, or fails with the text of `problem`.
fn poll<T>(mut found: impl FnMut() -> Option<T>, problem: impl FnOnce() -> String) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = found() {
            return value;
        }
        if Instant::now() >= deadline {
            panic!("after {PATIENCE:?}: {}", problem());
        }
        // Files, sockets and processes of others cause no wake-up.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The last lines of a file, or an empty text.
fn last_lines(path: &Path, count: usize) -> String {
    let text = String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
