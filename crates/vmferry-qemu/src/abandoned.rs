//! A QEMU whose guest was being migrated by a process that has died.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use vmferry::journal::{self, SessionSummary, Since};
use vmferry::{Resume, VmError};
use vmferry_wire::{GuestIdentity, SessionId};

use crate::disks::Disks;
use crate::error::QemuError;
use crate::guest::{self, end_migration};
use crate::inject;
use crate::lock::Lock;
use crate::memory_file::{Leaving, Release};
use crate::process;
use crate::qmp::Qmp;
use crate::settings::Settings;
use crate::starter::DirectView;
use crate::throttle::Throttle;
use crate::writers;

/// How long the kernel may take to let go of what a process had that has just died.
const DEATH_TIMEOUT: Duration = Duration::from_secs(5);

/// A QEMU that some other process has attached to, and that is in whatever state that process left it.
#[derive(Debug)]
pub struct AbandonedQemu {
    socket: PathBuf,
    settings: Settings,
    /// The guest was paused by somebody else than vmferry when it was attached to.
    was_paused: bool,
    /// The process that it must be, and the session that it was left in.
    left: Option<Left>,
}

/// What the process that takes over was told.
#[derive(Debug)]
struct Left {
    pid: Option<u32>,
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
            was_paused: false,
            left: None,
        }
    }

    /// Says whether somebody else than vmferry had paused the guest when it was attached to: it
    /// stays paused.
    #[must_use]
    pub fn was_paused(mut self, was_paused: bool) -> Self {
        self.was_paused = was_paused;
        self
    }

    /// Touches the guest only if it is in process `pid` still, as far as that is seen, and if it
    /// was in no other migration since that session, as the journals in this directory say. The
    /// process that takes over may have been stopped for long: the guest may be another one's, or
    /// promised away.
    #[must_use]
    pub fn left_in(mut self, pid: Option<u32>, session: SessionId, journals: &Path) -> Self {
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

    /// The process, if it is seen from here.
    ///
    /// # Errors
    /// QMP's.
    pub fn pid(&self) -> Result<Option<u32>, QemuError> {
        Ok(Qmp::connect(&self.socket)?.pid())
    }

    /// Whether its guest runs.
    ///
    /// # Errors
    /// QMP's.
    pub fn is_running(&self) -> Result<bool, QemuError> {
        let status = Qmp::connect(&self.socket)?.execute("query-status", json!({}))?;
        Ok(status["running"] == true)
    }

    /// Ends it.
    ///
    /// # Errors
    /// QMP's.
    pub fn quit(&self) -> Result<(), QemuError> {
        let (mut qmp, _lock) = self.connect()?;
        qmp.execute("quit", json!({}))?;
        Ok(())
    }

    /// Ends it, as its guest runs elsewhere, and gives the pages of its memory files back.
    ///
    /// # Errors
    /// QMP's.
    pub fn leave(&self) -> Result<Release, QemuError> {
        let (mut qmp, _lock) = self.connect()?;
        let leaving = Leaving::quit(&mut qmp, &mut DirectView)?;
        Ok(Release::by(leaving))
    }

    /// Takes away what is left in QEMU of a vmferry that has died before it wrote its journal; nothing, while another
    /// one leads a session of the guest.
    ///
    /// # Errors
    /// QMP's, and the journals'.
    pub fn tidy(&self) -> Result<(), QemuError> {
        let (mut qmp, lock) = self.connect()?;
        if !self.sessions(&mut qmp)?.iter().any(|session| session.led) {
            leave_nothing(qmp.pid(), lock.as_ref());
        }
        Ok(())
    }

    /// The holder of the connection and the lock has QEMU to itself: what is found from then on
    /// holds until both are given up.
    fn connect(&self) -> Result<(Qmp, Option<Lock>), QemuError> {
        let qmp = Qmp::connect(&self.socket)?;
        let wanted = self.left.as_ref().and_then(|left| left.pid);
        if let (Some(found), Some(wanted)) = (qmp.pid(), wanted)
            && found != wanted
        {
            return Err(QemuError::Another { found, wanted });
        }
        let lock = match qmp.pid().map(|pid| Lock::take_within(pid, DEATH_TIMEOUT)) {
            Some(Err(QemuError::Process { .. })) | None => None,
            Some(taken) => Some(taken?),
        };
        Ok((qmp, lock))
    }

    /// The guest's sessions on this host, if it is known where they are.
    fn sessions(&self, qmp: &mut Qmp) -> Result<Vec<SessionSummary>, QemuError> {
        let Some(Left { journals, .. }) = &self.left else { return Ok(Vec::new()) };
        let process = qmp.pid().and_then(process::process_name);
        let guest = guest::identity(qmp)?;
        let sessions = journal::sessions_in(journals, &guest, process.as_deref());
        sessions.map_err(|error| QemuError::Local {
            action: "read the journals of this guest",
            source: std::io::Error::other(error),
        })
    }

    fn run_on(&mut self) -> Result<(), QemuError> {
        let (mut qmp, lock) = self.connect()?;
        if let Some(left) = &self.left {
            match journal::since(&self.sessions(&mut qmp)?, left.session) {
                Since::Nothing => {}
                Since::SentAgain(session) => return Err(QemuError::SentAgain { session }),
                Since::Unclear(session) => return Err(QemuError::MayBeGiven { session }),
            }
        }
        end_migration(&mut qmp, false)?;
        if self.was_paused {
            qmp.found_paused();
        } else if stops_guest(&mut qmp)? {
            qmp.may_have_stopped();
        }
        qmp.continue_guest()?;
        qmp.announce();
        // The guest runs. What is left is tidying, and worth no failure.
        leave_nothing(qmp.pid(), lock.as_ref());
        let _ = self.settings.restore(&mut qmp);
        Ok(())
    }
}

/// Whether vmferry pauses such a guest by `stop`, as others do: for the whole of its migration, or
/// for each harvest.
fn stops_guest(qmp: &mut Qmp) -> Result<bool, QemuError> {
    if guest::loses_writes(qmp)? {
        return Ok(true);
    }
    if !(Disks { pin_pages: true }).stop_the_guest(qmp.version()) {
        return Ok(false);
    }
    match writers::all_seen(qmp) {
        Ok(habits) => Ok(Disks { pin_pages: habits.pins_pages }.stop_the_guest(qmp.version())),
        // It was carried.
        Err(error) if error.is_of_attaching() => Ok(false),
        Err(error) => Err(error),
    }
}

/// No limit of its vCPUs, and no userfaultfd. In a process that is not seen, or may not be looked
/// into, vmferry has left neither.
fn leave_nothing(pid: Option<u32>, lock: Option<&Lock>) {
    let (Some(pid), Some(_)) = (pid, lock) else { return };
    let _ = Throttle::lift(pid);
    let _ = inject::close_leftovers(pid);
}

impl Resume for AbandonedQemu {
    fn resume(&mut self) -> Result<(), VmError> {
        Ok(self.run_on()?)
    }
}
