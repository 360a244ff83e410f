//! A QEMU whose guest was being migrated by a process that has died.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use vmferry::{Resume, VmError};
use vmferry_wire::GuestIdentity;

use crate::error::QemuError;
use crate::inject;
use crate::qmp::{Qmp, QmpError};
use crate::settings::Settings;
use crate::source::run_on;
use crate::throttle::Throttle;

/// How long QEMU may take to give up its own migration.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

/// How long an event is awaited that may have come before this connection did.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

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
        crate::source::identity(&mut Qmp::connect(&self.socket)?)
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
        cancel_migration(&mut qmp)?;
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

/// Ends QEMU's own migration, if one is under way: the one that was to save the state.
pub fn cancel_migration(qmp: &mut Qmp) -> Result<(), QemuError> {
    let deadline = std::time::Instant::now() + CANCEL_TIMEOUT;
    let mut asked = false;
    loop {
        let migration = qmp.execute("query-migrate", json!({}))?;
        let status = migration["status"].as_str().unwrap_or("none");
        if !is_under_way(status) {
            return Ok(());
        }
        if !std::mem::replace(&mut asked, true) {
            qmp.execute("migrate_cancel", json!({}))?;
        } else if std::time::Instant::now() >= deadline {
            let what = "cancel its migration";
            return Err(QmpError::TimedOut { what, after: CANCEL_TIMEOUT }.into());
        }
        let changed = qmp
            .wait_for("cancel its migration", LOOK_PERIOD, |event| event["event"] == "MIGRATION");
        match changed {
            Ok(_) | Err(QmpError::TimedOut { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether a status of `query-migrate` means that QEMU migrates.
pub fn is_under_way(status: &str) -> bool {
    matches!(
        status,
        "setup" | "active" | "device" | "pre-switchover" | "cancelling" | "wait-unplug"
    )
}
