//! A loop device: a block device whose name tells two hosts nothing.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device on a file. Released on drop.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Makes one. Several on one file are different names of the same storage.
    ///
    /// # Errors
    /// `losetup` can't be run, or fails: it needs root.
    pub fn of(file: &Path) -> io::Result<Self> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output()?;
        if !made.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&made.stderr).into_owned()));
        }
        Ok(Self(String::from_utf8_lossy(&made.stdout).trim().into()))
    }

    /// The device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
