//! A QEMU that vmferry starts to receive a guest.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry::destination::FetchHandle;
use vmferry::vmm::storage::DestinationStorage;
use vmferry::vmm::streamed::{LateEnd, LateStreams};
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
use vmferry_faults::FaultRanges;
use vmferry_memory::GuestMemory;
use vmferry_wire::SessionId;

use crate::carried::Place;
use crate::destination::{Expected, QemuDestination};
use crate::error::QemuError;
use crate::qmp::QmpError;
use crate::starter::{Keep, LocalStarter, Starter};

/// How long QEMU may take until it listens.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// How long QEMU may take to exit after it has closed its monitor, which it does while exiting.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// How often to poll for changes that cause no wake-up.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// A destination whose QEMU is started from a command line, and again after each attempt that has
/// used it up. On drop the QEMU is killed, unless it was [taken](Self::into_starter) or has a
/// guest.
pub struct StartedQemu {
    starter: Option<Box<dyn Starter>>,
    socket: PathBuf,
    expected: Expected,
    qemu: Option<QemuDestination>,
    pid: u32,
    place: Option<Arc<Place>>,
    receiver: Option<String>,
    /// A guest was loaded into it.
    has_guest: bool,
}

impl StartedQemu {
    /// Starts QEMU from this process, with this shell command line, to which `-incoming defer -S`
    /// and a QMP socket at `socket` are added.
    ///
    /// # Errors
    /// If it does not start, or can't receive a guest.
    pub fn start(command: &str, socket: &Path, expected: Expected) -> Result<Self, QemuError> {
        Self::start_by(Box::new(LocalStarter::new(command, socket)), socket, expected)
    }

    /// The same through a starter, for a process that must not start programs itself later.
    /// `socket` is where the starter's QEMU listens.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_by(
        starter: Box<dyn Starter>,
        socket: &Path,
        expected: Expected,
    ) -> Result<Self, QemuError> {
        let mut started = Self {
            starter: Some(starter),
            socket: socket.to_owned(),
            expected,
            qemu: None,
            pid: 0,
            place: None,
            receiver: None,
            has_guest: false,
        };
        let qemu = started.qemu()?;
        started.place = qemu.share_place();
        Ok(started)
    }

    /// See [`QemuDestination::received_by`].
    #[must_use]
    pub fn received_by(mut self, receiver: &str) -> Self {
        self.qemu = self.qemu.take().map(|qemu| qemu.received_by(receiver));
        self.receiver = Some(receiver.to_owned());
        self
    }

    /// Its QMP socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// See [`QemuDestination::place`].
    #[must_use]
    pub fn place(&self) -> Option<&Path> {
        self.place.as_deref().map(Place::path)
    }

    /// The QEMU process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the starter, which can wait for the QEMU process, for the further life of the guest.
    /// The QMP socket is free for other clients.
    #[must_use]
    pub fn into_starter(mut self) -> Option<Box<dyn Starter>> {
        self.qemu = None;
        self.starter.take()
    }

    /// The QEMU that waits. It is started if there is none.
    fn qemu(&mut self) -> Result<&mut QemuDestination, QemuError> {
        if self.qemu.is_none() {
            let starter = self.starter.as_deref_mut().ok_or_else(no_starter)?;
            self.pid = starter.start()?;
            match attach(starter, &self.socket, self.expected.clone(), self.place.clone()) {
                Ok(qemu) => {
                    self.qemu = Some(match &self.receiver {
                        Some(receiver) => qemu.received_by(receiver),
                        None => qemu,
                    });
                }
                Err(error) => {
                    let error = with_cause(error, starter);
                    starter.end();
                    return Err(error);
                }
            }
        }
        self.qemu.as_mut().ok_or_else(no_starter)
    }

    /// Runs a command on QEMU. This process can't inspect a QEMU that was started after it was
    /// sandboxed, so the starter checks whether an unresponsive QEMU is stopped.
    fn order<T>(
        &mut self,
        order: impl FnOnce(&mut QemuDestination) -> Result<T, VmError>,
    ) -> Result<T, VmError> {
        let done = order(self.qemu.as_mut().ok_or("there is no QEMU")?);
        done.map_err(|error| self.seen(error))
    }

    /// See [`order`](Self::order). This process can't see either how a QEMU has ended.
    fn seen(&mut self, mut error: VmError) -> VmError {
        let Some(starter) = self.starter.as_deref_mut() else { return error };
        let process = self.qemu.as_ref().and_then(QemuDestination::known_process);
        QemuError::look_again_in(&mut error, &|pid| starter.is_stopped(pid), process);
        let error = error.downcast::<QmpError>().map(|error| Box::new(QemuError::Qmp(*error)));
        match error.or_else(|error| error.downcast::<QemuError>()) {
            Ok(error) => with_cause(*error, starter).into(),
            Err(error) => error,
        }
    }

    /// See [`order`](Self::order).
    fn prepared<T>(&mut self, result: Result<T, PrepareError>) -> Result<T, PrepareError> {
        result.map_err(|error| match error {
            PrepareError::Vm(error) => PrepareError::Vm(self.seen(error)),
            other => other,
        })
    }

    /// Sets whether the QEMU outlives this process.
    fn keep_qemu(&mut self, keep: Keep) {
        self.has_guest = keep == Keep::WithGuest;
        if let Some(starter) = &mut self.starter {
            starter.keep_qemu(keep);
        }
    }

    fn end(&mut self) {
        self.qemu = None;
        if let Some(starter) = &mut self.starter {
            starter.end();
        }
    }
}

/// Waits until a started QEMU listens, and attaches to it.
fn attach(
    starter: &mut dyn Starter,
    socket: &Path,
    expected: Expected,
    place: Option<Arc<Place>>,
) -> Result<QemuDestination, QemuError> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        if let Some(status) = starter.try_wait()? {
            return Err(QemuError::Ended { status, printed: None });
        }
        if std::os::unix::net::UnixStream::connect(socket).is_ok() {
            break;
        }
        if Instant::now() >= deadline {
            let source = std::io::ErrorKind::TimedOut.into();
            return Err(QemuError::Local { action: "reach QEMU by QMP", source });
        }
        // A socket that appears causes no wake-up.
        std::thread::sleep(LOOK_PERIOD);
    }
    QemuDestination::attach_by(socket, expected, starter, place)
}

/// Adds to an error of a started QEMU how it has ended and what it has printed, if that may be the
/// cause.
fn with_cause(error: QemuError, starter: &mut dyn Starter) -> QemuError {
    let ended = match &error {
        QemuError::Qmp(QmpError::Io { .. } | QmpError::Ended { .. }) => ended(starter),
        _ => None,
    };
    let error = ended.map_or(error, |status| QemuError::Ended { status, printed: None });
    error.with_words(|| starter.last_words())
}

/// The exit status of a QEMU that has closed its monitor.
fn ended(starter: &mut dyn Starter) -> Option<ExitStatus> {
    let deadline = Instant::now() + END_TIMEOUT;
    loop {
        match starter.try_wait() {
            Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK_PERIOD),
            Ok(status) => return status,
            Err(_) => return None,
        }
    }
}

fn no_starter() -> QemuError {
    let source = std::io::ErrorKind::NotFound.into();
    QemuError::Local { action: "start QEMU", source }
}

impl Drop for StartedQemu {
    fn drop(&mut self) {
        // A QEMU with a guest is left to the next receiver: this one may not know whether it has
        // promised to run the guest.
        if self.starter.is_some() && !self.has_guest {
            self.end();
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

impl DestinationVm for StartedQemu {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        let prepared = match self.qemu() {
            Ok(qemu) => qemu.prepare(guest),
            Err(error) => Err(PrepareError::Vm(error.into())),
        };
        self.prepared(prepared)
    }

    fn would_take(&mut self, guest: &GuestDescription) -> Option<Result<(), PrepareError>> {
        let compared = match self.qemu() {
            Ok(qemu) => qemu.would_take(guest)?,
            Err(error) => Err(PrepareError::Vm(error.into())),
        };
        Some(self.prepared(compared))
    }

    fn release(&self) -> String {
        self.qemu.as_ref().map_or_else(String::new, QemuDestination::release)
    }

    fn load(&mut self, state: &[u8]) -> Result<(), VmError> {
        self.order(|qemu| qemu.load(state))?;
        self.keep_qemu(Keep::WithGuest);
        Ok(())
    }

    fn takes_post_copy(&self) -> Result<(), VmError> {
        self.qemu.as_ref().ok_or("QEMU does not run")?.takes_post_copy()
    }

    fn fetch_begins(&mut self, fetch: FetchHandle) {
        if let Some(qemu) = &mut self.qemu {
            qemu.fetch_begins(fetch);
        }
    }

    fn ended_in_order(&mut self) -> bool {
        self.qemu.as_mut().is_some_and(QemuDestination::ended_in_order)
    }

    fn fetch_ends(&mut self) {
        if let Some(qemu) = &mut self.qemu {
            qemu.fetch_ends();
        }
    }

    fn register_faults(&mut self, memory: &GuestMemory) -> Result<FaultRanges, VmError> {
        self.order(|qemu| qemu.register_faults(memory))
    }

    fn late_streams(&mut self) -> Result<LateStreams, VmError> {
        self.order(QemuDestination::late_streams)
    }

    fn reconnect(&mut self) -> Result<LateStreams, VmError> {
        self.order(QemuDestination::reconnect)
    }

    fn storage(&mut self) -> Option<&mut dyn DestinationStorage> {
        self.qemu.as_mut()?.storage()
    }

    fn late_end(&mut self) -> Result<LateEnd, VmError> {
        self.order(QemuDestination::late_end)
    }

    fn stay_paused(&mut self) -> Result<(), VmError> {
        self.order(QemuDestination::stay_paused)
    }

    fn opened(&mut self, session: SessionId, journals: &Path) -> Result<(), VmError> {
        self.order(|qemu| qemu.opened(session, journals))
    }

    fn discard(&mut self) {
        self.keep_qemu(Keep::Nothing);
        let spent = self.qemu.as_mut().is_some_and(|qemu| {
            qemu.discard();
            qemu.is_spent()
        });
        if spent {
            self.end();
        }
    }

    fn run(&mut self) -> Result<(), VmError> {
        self.order(QemuDestination::run)
    }
}
