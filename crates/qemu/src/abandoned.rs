//! A QEMU whose guest was being migrated by a process that has died.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use vmferry::vmm::left::AbandonedVm;
use vmferry::vmm::streamed::LateStreams;
use vmferry::{Resume, VmError};
use vmferry_handover::Reconnect;
use vmferry_handover::journal::{self, LaterSession, SessionSummary};
use vmferry_memory::GuestMemory;
use vmferry_wire::{GuestIdentity, SessionId};

use crate::carried::{FurtherChannel, connect_source};
use crate::direct_view::DirectView;
use crate::disks::Disks;
use crate::error::QemuError;
use crate::guest::{self, end_migration};
use crate::identity;
use crate::inject;
use crate::lock::Lock;
use crate::memory_file::{Leaving, Release};
use crate::process::{has_ended_within, pidfd};
use crate::qmp::Qmp;
use crate::ram::Ram;
use crate::settings::{self, Settings};
use crate::throttle::Throttle;
use crate::writers;

/// How long the kernel may take to release the resources of a process that has just died.
const DEATH_TIMEOUT: Duration = Duration::from_secs(5);

/// A QEMU that another process has attached to, in whatever state that process left it.
#[derive(Debug)]
pub struct AbandonedQemu {
    socket: PathBuf,
    settings: Settings,
    /// Its process, once it is known.
    process: Option<OwnedFd>,
    /// The guest was already paused, not by vmferry, when that process attached.
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
    /// The QEMU at this QMP socket. `settings` are its settings before vmferry attached; QEMU's
    /// defaults are used if they are not known.
    #[must_use]
    pub fn new(socket: &Path, settings: Option<Settings>) -> Self {
        Self {
            socket: socket.to_owned(),
            settings: settings.unwrap_or_default(),
            process: None,
            was_paused: false,
            left: None,
        }
    }

    /// Sets whether the guest was already paused, not by vmferry, when the other process attached.
    /// If so, it stays paused.
    #[must_use]
    pub fn was_paused(mut self, was_paused: bool) -> Self {
        self.was_paused = was_paused;
        self
    }

    /// Restricts all actions to the guest if it is still in process `pid`, as far as that is
    /// visible, and if the journals in this directory show no later migration of it than this
    /// session. The process that takes over may have been stopped for a long time: meanwhile the
    /// guest may belong to another session, or be promised to another host.
    #[must_use]
    pub fn left_in(mut self, pid: Option<u32>, session: SessionId, journals: &Path) -> Self {
        self.left = Some(Left { pid, session, journals: journals.to_owned() });
        self
    }

    /// The guest's name and UUID.
    ///
    /// # Errors
    /// QMP errors.
    pub fn identity(&self) -> Result<GuestIdentity, QemuError> {
        guest::identity(&mut Qmp::connect(&self.socket)?)
    }

    /// The process, if it is visible from here.
    ///
    /// # Errors
    /// QMP errors.
    pub fn pid(&self) -> Result<Option<u32>, QemuError> {
        Ok(Qmp::connect(&self.socket)?.pid())
    }

    /// Whether its guest runs.
    ///
    /// # Errors
    /// QMP errors.
    pub fn is_running(&self) -> Result<bool, QemuError> {
        let status = Qmp::connect(&self.socket)?.execute("query-status", json!({}))?;
        Ok(status["running"] == true)
    }

    /// Whether it uses its own post-copy, which is interrupted or has failed since the process that
    /// carried it has died.
    ///
    /// # Errors
    /// QMP errors.
    pub fn is_in_post_copy(&self) -> Result<bool, QemuError> {
        let mut qmp = Qmp::connect(&self.socket)?;
        let migration = qmp.execute("query-migrate", json!({}))?;
        let status = migration["status"].as_str().unwrap_or_default();
        Ok(status.starts_with("postcopy-") || qmp.has_failed_in_post_copy()?)
    }

    /// Quits the QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn quit(&self) -> Result<(), QemuError> {
        let (mut qmp, _lock) = self.connect()?;
        qmp.quit()?;
        Ok(())
    }

    /// Quits the QEMU, whose guest runs elsewhere, and releases the pages of its memory files.
    ///
    /// # Errors
    /// QMP errors.
    pub fn leave(&self) -> Result<Release, QemuError> {
        let (mut qmp, _lock) = self.connect()?;
        let leaving = Leaving::quit(&mut qmp, &mut DirectView)?;
        Ok(Release::by(leaving))
    }

    /// Removes what a vmferry that died before it wrote its journal has left in QEMU. Does nothing
    /// while another vmferry leads a session of the guest.
    ///
    /// # Errors
    /// QMP errors, and journal errors.
    pub fn tidy(&self) -> Result<(), QemuError> {
        let (mut qmp, lock) = self.connect()?;
        if !self.sessions(&mut qmp)?.iter().any(|session| session.led) {
            leave_nothing(qmp.pid(), lock.as_ref());
        }
        Ok(())
    }

    /// The holder of the connection and the lock has QEMU to itself: what it finds stays true until
    /// it drops both.
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

    /// The guest's sessions on this host, if the directory of the journals is known.
    fn sessions(&self, qmp: &mut Qmp) -> Result<Vec<SessionSummary>, QemuError> {
        let Some(Left { journals, .. }) = &self.left else { return Ok(Vec::new()) };
        let process = qmp.pid().and_then(identity::process_name);
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
            match journal::later_session(&self.sessions(&mut qmp)?, left.session) {
                LaterSession::None => {}
                LaterSession::SentAgain(session) => return Err(QemuError::SentAgain { session }),
                LaterSession::Unclear(session) => return Err(QemuError::MayBeGiven { session }),
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
        // The guest runs. Failures of the clean-up that follows are ignored.
        leave_nothing(qmp.pid(), lock.as_ref());
        let _ = self.settings.restore(&mut qmp);
        Ok(())
    }
}

/// Whether vmferry pauses such a guest by `stop`, the command that others use too: for its whole
/// migration, before its post-copy, or for each harvest.
fn stops_guest(qmp: &mut Qmp) -> Result<bool, QemuError> {
    if guest::loses_writes(qmp)? || settings::may_use_post_copy(qmp)? {
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

/// Lifts the vCPU limit and closes the userfaultfd. If the process is not visible or not
/// accessible, vmferry has left neither in it.
fn leave_nothing(pid: Option<u32>, lock: Option<&Lock>) {
    let (Some(pid), Some(_)) = (pid, lock) else { return };
    let _ = Throttle::lift(pid);
    let _ = inject::close_leftovers(pid);
}

impl AbandonedVm for AbandonedQemu {
    fn memory(&mut self) -> Result<Option<GuestMemory>, VmError> {
        let (mut qmp, _lock) = self.connect()?;
        self.process = qmp.pid().and_then(|pid| pidfd(pid).ok());
        if settings::may_use_post_copy(&mut qmp).map_err(QemuError::from)? {
            return Ok(None);
        }
        Ok(Some(Ram::find(&mut qmp, &mut DirectView)?.memory))
    }
}

impl Reconnect for AbandonedQemu {
    type Streams = LateStreams;

    fn reconnect(&mut self) -> Result<LateStreams, VmError> {
        let (mut qmp, _lock) = self.connect()?;
        let further = FurtherChannel::new(&qmp)?;
        Ok(connect_source(&mut qmp, &further)?)
    }

    fn has_ended(&self) -> bool {
        let has_ended = |process| has_ended_within(process, Duration::ZERO).unwrap_or(false);
        self.process.as_ref().is_some_and(has_ended)
    }
}

impl Resume for AbandonedQemu {
    fn resume(&mut self) -> Result<(), VmError> {
        Ok(self.run_on()?)
    }
}
