//! A QEMU whose guest was being migrated by a process that has died.

use std::path::{Path, PathBuf};

use serde_json::json;
use vmferry::{Resume, VmError};
use vmferry_wire::GuestIdentity;

use crate::error::QemuError;
use crate::guest::{self, end_migration, run_on};
use crate::inject;
use crate::qmp::Qmp;
use crate::settings::Settings;
use crate::throttle::Throttle;

/// A QEMU that some other process has attached to, and that is in whatever state that process left it.
#[derive(Debug)]
pub struct AbandonedQemu {
    socket: PathBuf,
    settings: Settings,
}

impl AbandonedQemu {
    /// The QEMU whose QMP socket this is; `settings` are what it had before it was attached to, and QEMU's own
    /// if nobody knows.
    #[must_use]
    pub fn new(socket: &Path, settings: Option<Settings>) -> Self {
        Self { socket: socket.to_owned(), settings: settings.unwrap_or_default() }
    }

    /// The guest's name and UUID.
    ///
    /// # Errors
    /// QMP's.
    pub fn identity(&self) -> Result<GuestIdentity, QemuError> {
        guest::identity(&mut Qmp::connect(&self.socket)?)
    }

    /// The process.
    ///
    /// # Errors
    /// QMP's.
    pub fn pid(&self) -> Result<u32, QemuError> {
        Ok(Qmp::connect(&self.socket)?.pid())
    }

    /// Ends it.
    ///
    /// # Errors
    /// QMP's.
    pub fn quit(&self) -> Result<(), QemuError> {
        Qmp::connect(&self.socket)?.execute("quit", json!({}))?;
        Ok(())
    }

    fn run_on(&self) -> Result<(), QemuError> {
        let mut qmp = Qmp::connect(&self.socket)?;
        let pid = qmp.pid();
        end_migration(&mut qmp, false)?;
        run_on(&mut qmp)?;
        // The guest runs. What is left is tidying, and worth no failure.
        let _ = Throttle::lift(pid);
        let _ = inject::close_leftovers(pid);
        let _ = self.settings.restore(&mut qmp);
        Ok(())
    }
}

impl Resume for AbandonedQemu {
    fn resume(&mut self) -> Result<(), VmError> {
        Ok(self.run_on()?)
    }
}
