//! A QEMU that waits for a guest, as the engine's destination.

mod faults;
mod memory;
mod prepare;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use serde_json::{Value, json};
use uuid::Uuid;
use vmferry::vmm::storage::{Comparison, DestinationStorage};
use vmferry::vmm::streamed::{LateEnd, LateStreams};
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
use vmferry_faults::FaultRanges;
use vmferry_memory::{GuestMemory, Slot};
use vmferry_wire::{GuestIdentity, SessionId};

use self::faults::Faults;
use self::memory::{empty, find_memory};
use crate::arrived::{Note, Whereabouts};
use crate::carried::{Arrival, Description, Place};
use crate::direct_view::DirectView;
use crate::error::QemuError;
use crate::fault_access::FaultAccess;
use crate::guest;
use crate::identity::ProcessIdentity;
use crate::inventory::{Disk, Inventory};
use crate::lock::Lock;
use crate::memory_file::{Examiner, MemoryFiles};
use crate::qmp::Qmp;
use crate::ram::Ram;
use crate::sample::{self, BlockReader, Sample};
use crate::settings::Settings;
use crate::state;
use crate::view::{Looker, View};

/// How long QEMU may take to answer. It must be less than the 30 s for which the source waits for
/// the load: the source would then blame the link before it heard that QEMU does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the storage may take to be compared. It reads for 2 s at most once it is open.
const COMPARISON_TIMEOUT: Duration = Duration::from_secs(5);

/// A QEMU that was started with `-incoming defer`. It receives attached guests, if its memory can
/// be filled from outside, and carried guests.
pub struct QemuDestination {
    qmp: Qmp,
    /// The memory that can be filled from outside, or the reason why there is none.
    ram: Result<Ram, QemuError>,
    /// The files of its memory; `None` if the process is not accessible.
    files: Option<MemoryFiles>,
    description: Description,
    /// What it has, and what was changed in it for a guest.
    inventory: Inventory,
    /// Disks that may be others than the source's.
    unknown_disks: Vec<Disk>,
    block_reader: BlockReader,
    settings: Settings,
    expected: Expected,
    /// A carried guest that is being received.
    arrival: Option<Arrival>,
    /// Where QEMU listens for the streams of a guest with several. Created while this process may
    /// still do so.
    place: Option<Arc<Place>>,
    /// QEMU may keep the connection: a later process could take it from there.
    may_be_kept: bool,
    /// QEMU keeps the connection.
    is_kept: bool,
    /// Checks whether QEMU is stopped.
    looker: Looker,
    /// Loading a state was at least attempted: this QEMU can receive no other guest.
    used: bool,
    /// `None` if it is not visible from here.
    process: Option<ProcessIdentity>,
    /// The receiver that this QEMU belongs to, for that receiver's next process.
    receiver: Option<String>,
    note: Option<Note>,
    _lock: Option<Lock>,
    /// The guest was paused at the source, and stays paused.
    stays_paused: bool,
    /// Makes QEMU report missing pages.
    fault_access: Arc<dyn FaultAccess>,
    /// Reports missing pages, with post-copy, or the reason why nothing does. `None` for a guest
    /// that is not attached.
    faults: Option<Result<Faults, QemuError>>,
}

/// The guest that is accepted; any guest by default.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// Its name.
    pub name: Option<String>,
    /// Its UUID. A QEMU that was started with `-uuid` accepts only that guest, too.
    pub uuid: Option<Uuid>,
}

impl Expected {
    fn check(&self, guest: &GuestIdentity) -> Result<(), PrepareError> {
        let refused =
            |expected: String, offered: String| Err(PrepareError::Identity { expected, offered });
        match (&self.name, self.uuid) {
            (Some(name), _) if *name != guest.name => refused(name.clone(), guest.name.clone()),
            (_, Some(uuid)) if uuid != guest.uuid => {
                refused(uuid.to_string(), guest.uuid.to_string())
            }
            _ => Ok(()),
        }
    }
}

impl QemuDestination {
    /// Attaches to the QEMU at this QMP socket.
    ///
    /// # Errors
    /// If it does not wait for a migration.
    pub fn attach(socket: &Path, expected: Expected) -> Result<Self, QemuError> {
        Self::attach_by(socket, expected, &mut DirectView, None)
    }

    /// The same with the access to the process through `view`. `place` is the place of the QEMU
    /// before it, if there was one.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub(crate) fn attach_by(
        socket: &Path,
        mut expected: Expected,
        view: &mut dyn View,
        place: Option<Arc<Place>>,
    ) -> Result<Self, QemuError> {
        let mut qmp = Qmp::connect(socket)?;
        let lock = Lock::take_if_seen(qmp.pid())?;
        qmp.be_patient_for(ANSWER_TIMEOUT);
        let status = qmp.execute("query-status", json!({}))?;
        if status["status"] != "inmigrate" {
            return Err(QemuError::State {
                found: status["status"].as_str().unwrap_or_default().to_owned(),
                wanted: "waiting for a guest: start it with `-incoming defer`",
            });
        }
        // While QEMU waits, `stop` has the effect of `-S`: the guest stays paused after its state
        // is loaded, until COMMIT.
        qmp.execute("stop", json!({}))?;
        let own = guest::identity(&mut qmp)?.uuid;
        if expected.uuid.is_none() && !own.is_nil() {
            expected.uuid = Some(own);
        }
        let description = Description::read(&mut qmp, 0)?;
        let inventory = Inventory::read(&mut qmp, view)?;
        let (ram, files) = find_memory(&mut qmp, view)?;
        let settings = Settings::read(&mut qmp)?;
        let arrival = None;
        // Without a place, guests whose QEMU sends several streams are refused when they are
        // offered.
        let place = place.or_else(|| Place::new(&qmp).ok().map(Arc::new));
        let pid = view.process(&qmp).filter(|_| qmp.connection().is_some());
        let may_be_kept = pid.is_some_and(|pid| view.gives_descriptors(pid));
        let looker = view.looker();
        let fault_access = view.fault_access();
        let block_reader = view.block_reader();
        let process = view.process(&qmp).map(|pid| view.identify(pid)).transpose()?;
        Ok(Self {
            qmp,
            ram,
            files,
            description,
            inventory,
            unknown_disks: Vec::new(),
            block_reader,
            settings,
            expected,
            arrival,
            place,
            may_be_kept,
            is_kept: false,
            looker,
            used: false,
            process,
            receiver: None,
            note: None,
            _lock: lock,
            stays_paused: false,
            fault_access,
            faults: None,
        })
    }

    /// Names the receiver that this QEMU belongs to: its next process [finds](crate::Arrived::find)
    /// the guest by this name.
    #[must_use]
    pub fn received_by(mut self, receiver: &str) -> Self {
        self.receiver = Some(receiver.to_owned());
        self
    }

    /// The QMP socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.qmp.path()
    }

    /// The QEMU process, if it is visible from here.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.qmp.pid()
    }

    /// The QEMU process, if it is visible from here or to a starter.
    pub(crate) fn known_process(&self) -> Option<u32> {
        self.pid().or_else(|| Some(self.process.as_ref()?.pid))
    }

    /// The directory that is kept for a socket between QEMU and this process. A sandboxed process
    /// must be allowed to remove files from it, and the directory itself.
    #[must_use]
    pub fn place(&self) -> Option<&Path> {
        self.place.as_deref().map(Place::path)
    }

    /// The same, for the next QEMU.
    pub(crate) fn share_place(&self) -> Option<Arc<Place>> {
        self.place.clone()
    }

    /// Replaces the examiner of the memory files: this process may be about to lose the rights to
    /// examine them itself.
    pub fn examine_by(&mut self, examiner: Examiner) {
        if let Some(files) = &mut self.files {
            files.examine_by(examiner);
        }
    }

    /// Replaces the access to QEMU's missing pages, for the same reason.
    pub fn receive_faults_by(&mut self, access: Arc<dyn FaultAccess>) {
        self.fault_access = access;
    }

    /// Replaces the access to QEMU's images, for the same reason.
    pub fn read_blocks_by(&mut self, reader: BlockReader) {
        self.block_reader = reader;
    }

    /// Quits the QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn quit(&mut self) -> Result<(), QemuError> {
        self.qmp.quit()?;
        Ok(())
    }

    /// Lets other clients connect to QEMU after this process.
    fn free_monitor(&mut self) {
        if std::mem::take(&mut self.is_kept) {
            // Then the connection stays until QEMU ends.
            let _ = self.qmp.end_keeping();
        }
    }

    fn close_faults(&mut self) {
        if let Some(Ok(faults)) = self.faults.take() {
            faults.close();
        }
    }

    /// Has QEMU create what reports its missing pages.
    fn create_faults(&mut self) -> Result<Faults, QemuError> {
        let unseen = || QemuError::Unseen { path: self.qmp.path().to_owned() };
        let pid = self.known_process().ok_or_else(unseen)?;
        if self.ram.as_ref().is_ok_and(|ram| ram.memory.slots().iter().any(Slot::has_huge_pages)) {
            return Err(QemuError::HugePages);
        }
        Faults::create(&mut self.qmp, pid, &self.fault_access)
    }
}

impl DestinationVm for QemuDestination {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        let fitting = self.check(guest)?;
        self.prepare_for(fitting, &guest.config)
    }

    fn would_take(&mut self, guest: &GuestDescription) -> Option<Result<(), PrepareError>> {
        Some(self.check(guest).map(drop))
    }

    fn release(&self) -> String {
        self.qmp.release()
    }

    fn opened(&mut self, session: SessionId, journals: &Path) -> Result<(), VmError> {
        let Some(receiver) = self.receiver.clone() else { return Ok(()) };
        let process = self.process.clone();
        let monitor = self.qmp.path().to_owned();
        // The next receiver may be started in another working directory.
        let monitor = std::path::absolute(&monitor).unwrap_or(monitor);
        let connection = self.qmp.connection().filter(|_| self.may_be_kept);
        let whereabouts = Whereabouts { receiver, process, monitor, connection };
        self.note = Some(Note::leave(journals, session, whereabouts)?);
        Ok(())
    }

    fn fetch_ends(&mut self) {
        self.close_faults();
        self.free_monitor();
        if self.arrival.is_some() {
            let _ = self.settings.restore(&mut self.qmp);
        }
    }

    fn ended_in_order(&mut self) -> bool {
        // QEMU's ShutdownCause: all others are requests of the guest or of a person.
        let was_asked = |event: &Value| {
            let reason = event["data"]["reason"].as_str();
            event["event"] == "SHUTDOWN" && !matches!(reason, Some("guest-panic" | "host-error"))
        };
        self.qmp.look_at_events().is_ok_and(|mut events| events.any(was_asked))
    }

    fn stay_paused(&mut self) -> Result<(), VmError> {
        self.stays_paused = true;
        if let Some(note) = &mut self.note {
            note.stays_paused()?;
        }
        Ok(())
    }

    fn takes_post_copy(&self) -> Result<(), VmError> {
        match &self.faults {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(vmferry::chain(error).into()),
            None => match &self.arrival {
                Some(arrival) => Ok(arrival.takes_post_copy()?),
                None => Err("no guest is announced".into()),
            },
        }
    }

    fn late_streams(&mut self) -> Result<LateStreams, VmError> {
        let arrival = self.arrival.as_mut().ok_or("this QEMU takes no stream")?;
        let late = arrival.late_streams()?;
        // For a receiver that takes over while QEMU waits for a page. Without it, QEMU has to
        // answer.
        self.is_kept = self.may_be_kept && self.note.is_some() && self.qmp.keep().is_ok();
        Ok(late)
    }

    fn reconnect(&mut self) -> Result<LateStreams, VmError> {
        let arrival = self.arrival.as_mut().ok_or("this QEMU takes no stream")?;
        Ok(arrival.reconnect(&mut self.qmp, self.place.as_deref())?)
    }

    fn late_end(&mut self) -> Result<LateEnd, VmError> {
        Ok(Arrival::late_end(&mut self.qmp)?)
    }

    fn register_faults(&mut self, _memory: &GuestMemory) -> Result<FaultRanges, VmError> {
        let ram = self.ram.as_ref().map_err(|error| vmferry::chain(error))?;
        let faults = self.faults.as_ref().and_then(|faults| faults.as_ref().ok());
        let faults = faults.ok_or("QEMU reports no missing pages")?;
        // For a receiver that takes over, before any page is waited for.
        if let Some(note) = &mut self.note {
            note.lacks(&ram.ranges)?;
        }
        Ok(faults.register(&ram.ranges)?)
    }

    fn storage(&mut self) -> Option<&mut dyn DestinationStorage> {
        if self.unknown_disks.is_empty() || self.known_process().is_none() {
            return None;
        }
        Some(self)
    }

    fn load(&mut self, bytes: &[u8]) -> Result<(), VmError> {
        if let Some(arrival) = &self.arrival {
            return Ok(arrival.complete(&mut self.qmp)?);
        }
        self.used = true;
        state::load(&mut self.qmp, bytes)?;
        let status = self.qmp.execute("query-status", json!({}))?;
        if status["running"] == true {
            return Err("QEMU runs the guest before it may".into());
        }
        Ok(())
    }

    fn discard(&mut self) {
        if let Some(arrival) = self.arrival.take() {
            arrival.end();
        }
        if let Some(note) = self.note.take() {
            note.remove();
        }
        self.stays_paused = false;
        self.free_monitor();
        self.close_faults();
        // A QEMU that has loaded a state can't load another. One that has not can be filled again,
        // if its memory still is its own.
        let emptied = match &self.ram {
            Ok(ram) if !self.used => empty(ram, self.files.as_ref()),
            _ => Ok(()),
        };
        self.used |= emptied.is_err();
        // The next guest reports a failure here.
        let _ = if self.used {
            self.quit()
        } else {
            self.settings.restore(&mut self.qmp).map_err(QemuError::from)
        };
    }

    fn is_spent(&self) -> bool {
        self.used
    }

    fn run(&mut self) -> Result<(), VmError> {
        if !self.stays_paused {
            self.qmp.run_arrived()?;
        }
        if let Some(arrival) = &mut self.arrival {
            arrival.runs();
        }
        // The guest is here. Failures of notes and settings are ignored.
        if let Some(note) = &mut self.note
            && !self.stays_paused
        {
            let _ = note.run();
        }
        // QEMU needs those of its own post-copy until that has ended, to survive a lost stream.
        if !self.arrival.as_ref().is_some_and(Arrival::is_late) {
            let _ = self.settings.restore(&mut self.qmp);
        }
        Ok(())
    }
}

impl DestinationStorage for QemuDestination {
    fn compare(&mut self, sample: &[u8]) -> Comparison {
        let Some(pid) = self.known_process() else { return Box::new(|| Ok(())) };
        let (disks, reader) = (self.unknown_disks.clone(), Arc::clone(&self.block_reader));
        let mut media = disks.iter().filter_map(|disk| disk.medium.as_ref());
        // QEMU writes into its tables when it has loaded the state.
        let at_once = media.any(sample::has_tables);
        let sample = sample.to_vec();
        let (tell, compared) = channel();
        // A thread of its own: storage that does not answer must not hold this one.
        let begun = std::thread::Builder::new().name("sample".into()).spawn(move || {
            // Fails only if nobody waits any longer.
            let _ = tell.send(Sample::compare(&sample, &disks, pid, &reader));
        });
        let wait = move || {
            begun?;
            let late = |_| Err("its disks can't be read here, or not within 5 s".into());
            compared.recv_timeout(COMPARISON_TIMEOUT).unwrap_or_else(late)
        };
        if at_once {
            let compared = wait();
            return Box::new(move || compared);
        }
        Box::new(wait)
    }
}
