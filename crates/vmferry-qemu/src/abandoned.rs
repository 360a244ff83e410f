//! A QEMU whose guest was being migrated by a process that has died.

use std::path::{Path, PathBuf};

use serde_json::json;
use vmferry::journal;
use vmferry::{Resume, VmError};
use vmferry_wire::{GuestIdentity, SessionId};

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
    /// The process that it must be, and the session that it was left in.
    left: Option<Left>,
    overtaken: bool,
}

/// What the process that takes over was told.
#[derive(Debug)]
struct Left {
    pid: u32,
    session: SessionId,
    journals: PathBuf,
}

impl AbandonedQemu {
    /// The QEMU whose QMP socket this is; `settings` are what it had before it was attached to, and QEMU's own
    /// if nobody knows.
    #[must_use]
    pub fn new(socket: &Path, settings: Option<Settings>) -> Self {
        Self {
            socket: socket.to_owned(),
            settings: settings.unwrap_or_default(),
            left: None,
            overtaken: false,
        }
    }

    /// Touches the guest only if it is in process `pid` still, and if it was in no other migration since that session, as
    /// the journals in this directory say. Whoever takes over may have been stopped for long: the guest may be another
    /// one's, or promised away.
    #[must_use]
    pub fn left_in(mut self, pid: u32, session: SessionId, journals: &Path) -> Self {
        self.left = Some(Left { pid, session, journals: journals.to_owned() });
        self
    }

    /// Whether it was left alone because its guest was sent again since.
    #[must_use]
    pub fn is_overtaken(&self) -> bool {
        self.overtaken
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
        self.connect()?.execute("quit", json!({}))?;
        Ok(())
    }

    /// Takes away what is left in QEMU of a vmferry that has died before it did anything to the guest.
    ///
    /// # Errors
    /// QMP's, and the journals'.
    pub fn tidy(&self) -> Result<(), QemuError> {
        let qmp = self.connect()?;
        if !self.look_for_a_later_session()? {
            leave_nothing(qmp.pid());
        }
        Ok(())
    }

    /// Whoever has the connection has QEMU: what is found from then on holds until it is given up.
    fn connect(&self) -> Result<Qmp, QemuError> {
        let qmp = Qmp::connect(&self.socket)?;
        match &self.left {
            Some(Left { pid: wanted, .. }) if *wanted != qmp.pid() => {
                Err(QemuError::Another { found: qmp.pid(), wanted: *wanted })
            }
            _ => Ok(qmp),
        }
    }

    fn look_for_a_later_session(&self) -> Result<bool, QemuError> {
        let Some(Left { session, journals, .. }) = &self.left else { return Ok(false) };
        let sessions = journal::sessions(journals).map_err(|error| QemuError::Local {
            action: "read the journals of this host",
            source: std::io::Error::other(error),
        })?;
        Ok(journal::is_overtaken(&sessions, *session))
    }

    fn run_on(&mut self) -> Result<(), QemuError> {
        let mut qmp = self.connect()?;
        self.overtaken = self.look_for_a_later_session()?;
        if self.overtaken {
            return Ok(());
        }
        let pid = qmp.pid();
        end_migration(&mut qmp, false)?;
        run_on(&mut qmp)?;
        // The guest runs. What is left is tidying, and worth no failure.
        leave_nothing(pid);
        let _ = self.settings.restore(&mut qmp);
        Ok(())
    }
}

/// No limit of its vCPUs, and no userfaultfd.
fn leave_nothing(pid: u32) {
    let _ = Throttle::lift(pid);
    let _ = inject::close_leftovers(pid);
}

impl Resume for AbandonedQemu {
    fn resume(&mut self) -> Result<(), VmError> {
        Ok(self.run_on()?)
    }
}
