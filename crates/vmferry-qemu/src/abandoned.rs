//! A QEMU whose guest was being migrated by a process that has died.

use std::path::{Path, PathBuf};

use serde_json::json;
use vmferry::journal::{self, SessionSummary, Since};
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
        Self { socket: socket.to_owned(), settings: settings.unwrap_or_default(), left: None }
    }

    /// Touches the guest only if it is in process `pid` still, and if it was in no other migration since that session, as
    /// the journals in this directory say. Whoever takes over may have been stopped for long: the guest may be another
    /// one's, or promised away.
    #[must_use]
    pub fn left_in(mut self, pid: u32, session: SessionId, journals: &Path) -> Self {
        self.left = Some(Left { pid, session, journals: journals.to_owned() });
        self
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

    /// Takes away what is left in QEMU of a vmferry that has died before it wrote its journal; nothing, while another
    /// one leads a session of the guest.
    ///
    /// # Errors
    /// QMP's, and the journals'.
    pub fn tidy(&self) -> Result<(), QemuError> {
        let mut qmp = self.connect()?;
        if !self.sessions(&mut qmp)?.iter().any(|session| session.led) {
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

    /// The guest's sessions on this host, if it is known where they are.
    fn sessions(&self, qmp: &mut Qmp) -> Result<Vec<SessionSummary>, QemuError> {
        let Some(Left { journals, .. }) = &self.left else { return Ok(Vec::new()) };
        journal::sessions_of(journals, &guest::identity(qmp)?).map_err(|error| QemuError::Local {
            action: "read the journals of this guest",
            source: std::io::Error::other(error),
        })
    }

    fn run_on(&mut self) -> Result<(), QemuError> {
        let mut qmp = self.connect()?;
        if let Some(left) = &self.left {
            match journal::since(&self.sessions(&mut qmp)?, left.session) {
                Since::Nothing => {}
                Since::SentAgain(session) => return Err(QemuError::SentAgain { session }),
                Since::Unclear(session) => return Err(QemuError::MayBeGiven { session }),
            }
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
