//! A QEMU that waits for a guest, as the engine's destination.

mod faults;
mod memory;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use uuid::Uuid;
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
use vmferry_faults::FaultRanges;
use vmferry_memory::GuestMemory;
use vmferry_wire::{GuestIdentity, SessionId};

use self::faults::Faults;
use self::memory::{compare, empty, find_memory, not_ours};
use crate::arrived::{Note, Whereabouts};
use crate::carried::{self, Arrival, Description, Place};
use crate::direct_view::DirectView;
use crate::error::QemuError;
use crate::guest;
use crate::identity::ProcessIdentity;
use crate::lock::Lock;
use crate::machine::{self, Machine};
use crate::memory_file::{Examiner, MemoryFiles};
use crate::proc_stat::host;
use crate::qmp::Qmp;
use crate::ram::{Block, Carrier, Ram};
use crate::settings::Settings;
use crate::source::VMM;
use crate::state;
use crate::vcpu::{self, Vcpu};
use crate::view::{Looker, View};

/// How long QEMU may take to answer. It must be less than the 30 s for which the source waits for
/// the load: the source would then blame the link before it heard that QEMU does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// A QEMU that was started with `-incoming defer`. It receives attached guests, if its memory can
/// be filled from outside, and carried guests.
pub struct QemuDestination {
    qmp: Qmp,
    /// The memory that can be filled from outside, or the reason why there is none.
    ram: Result<Ram, QemuError>,
    /// The files of its memory; `None` if the process is not accessible.
    files: Option<MemoryFiles>,
    description: Description,
    vcpu: Option<Vcpu>,
    settings: Settings,
    expected: Expected,
    /// A carried guest that is being received.
    arrival: Option<Arrival>,
    /// Where QEMU listens for the streams of a guest with several. Created while this process may
    /// still do so.
    place: Option<Arc<Place>>,
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
    /// Reports missing pages, with post-copy.
    faults: Option<Faults>,
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

/// The source's description of itself.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offered {
    host: String,
    machine: Machine,
    blocks: Vec<Block>,
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
        let (ram, files) = find_memory(&mut qmp, view)?;
        let vcpu = Vcpu::read(&mut qmp)?;
        let settings = Settings::read(&mut qmp)?;
        let arrival = None;
        // Without a place, guests whose QEMU sends several streams are refused when they are
        // offered.
        let place = place.or_else(|| Place::new(&qmp).ok().map(Arc::new));
        let looker = view.looker();
        let process = view.process(&qmp).map(|pid| view.identify(pid)).transpose()?;
        Ok(Self {
            qmp,
            ram,
            files,
            description,
            vcpu,
            settings,
            expected,
            arrival,
            place,
            looker,
            used: false,
            process,
            receiver: None,
            note: None,
            _lock: lock,
            stays_paused: false,
            faults: None,
        })
    }

    /// Lets attached guests run here before all their pages have arrived. QEMU creates a
    /// userfaultfd for that.
    ///
    /// # Errors
    /// Its process is not visible or may not be traced, or it may not handle the faults of KVM.
    pub fn allow_post_copy(&mut self) -> Result<(), QemuError> {
        let socket = || QemuError::Unseen { path: self.qmp.path().to_owned() };
        let pid = self.pid().ok_or_else(socket)?;
        self.faults = Some(Faults::create(pid)?);
        Ok(())
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

    /// Quits the QEMU.
    ///
    /// # Errors
    /// QMP errors.
    pub fn quit(&mut self) -> Result<(), QemuError> {
        self.qmp.execute("quit", json!({}))?;
        Ok(())
    }

    /// Checks that this QEMU's vCPUs have the features that the guest uses. Where both sides list
    /// their features, these decide, and the CPU model in `offered` is ignored.
    fn compare_vcpus(&self, config: &[u8], offered: &mut Machine) -> Result<(), PrepareError> {
        let theirs: Option<Vcpu> = vmferry::vmm::newer::optional(config, vcpu::MEMBER);
        let (Some(theirs), Some(ours)) = (theirs, &self.vcpu) else { return Ok(()) };
        let model = offered.cpu.take().unwrap_or_default();
        match theirs.misses(ours, &model) {
            Some(difference) => Err(PrepareError::Incompatible(difference)),
            None => Ok(()),
        }
    }

    /// Prepares this QEMU's memory to receive an attached guest.
    fn prepare_memory(&mut self, config: &[u8]) -> Result<Landing, PrepareError> {
        let ram = match &self.ram {
            Ok(ram) => ram,
            Err(error) => {
                let why = vmferry::chain(error);
                let text =
                    format!("it can't be filled from outside, as the source needs it: {why}");
                return Err(PrepareError::Incompatible(text));
            }
        };
        let mut offered: Offered = parse(config)?;
        self.compare_vcpus(config, &mut offered.machine)?;
        if let Some(difference) = machine::difference(&offered.machine, &self.description.machine) {
            return Err(PrepareError::Incompatible(difference));
        }
        compare(&offered.blocks, &ram.blocks)?;
        if offered.host == host() {
            let ours = || ram.carried().map(|block| block.file);
            let theirs = offered.blocks.iter().filter(|block| block.carrier == Carrier::Vmferry);
            for block in theirs {
                if ours().any(|file| file == block.file) {
                    let path = PathBuf::from(&block.name);
                    return Err(PrepareError::Vm(QemuError::SameFile { path }.into()));
                }
            }
        }
        empty(ram, self.files.as_ref()).map_err(not_ours)?;
        // Done here, before the guest is paused.
        Settings::for_loading(&mut self.qmp)
            .map_err(|error| PrepareError::Vm(QemuError::from(error).into()))?;
        Ok(Landing::Memory(ram.memory.clone()))
    }

    /// Lets this QEMU receive the streams of a carried guest.
    fn prepare_streams(&mut self, config: &[u8]) -> Result<Landing, PrepareError> {
        let mut offered: Description = parse(config)?;
        self.compare_vcpus(config, &mut offered.machine)?;
        self.description.check(&offered)?;
        if let Some(files) = &self.files {
            files.nobody_else_is_seen().map_err(not_ours)?;
        }
        self.used = true;
        let place = self.place.as_deref();
        let begun =
            Arrival::begin(&mut self.qmp, &self.settings, offered.multifd, place, &self.looker);
        let (arrival, streams) = begun.map_err(|error| PrepareError::Vm(error.into()))?;
        self.arrival = Some(arrival);
        Ok(Landing::Streams(streams))
    }
}

fn parse<T: DeserializeOwned>(config: &[u8]) -> Result<T, PrepareError> {
    vmferry::vmm::newer::read(config)
        .map_err(|error| PrepareError::Incompatible(format!("its description: {error}")))
}

impl DestinationVm for QemuDestination {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        if guest.vmm != VMM && guest.vmm != carried::VMM {
            let text = format!("the guest is one of `{}`, and this is a QEMU", guest.vmm);
            return Err(PrepareError::Incompatible(text));
        }
        self.expected.check(&guest.identity)?;
        if self.used {
            let text = "this QEMU has had a guest already: start a new one".to_owned();
            return Err(PrepareError::Incompatible(text));
        }
        if guest.vmm == carried::VMM {
            self.prepare_streams(&guest.config)
        } else {
            self.prepare_memory(&guest.config)
        }
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
        self.note =
            Some(Note::leave(journals, session, Whereabouts { receiver, process, monitor })?);
        Ok(())
    }

    fn stay_paused(&mut self) -> Result<(), VmError> {
        self.stays_paused = true;
        if let Some(note) = &mut self.note {
            note.stays_paused()?;
        }
        Ok(())
    }

    fn takes_post_copy(&self) -> bool {
        self.faults.is_some() && self.arrival.is_none()
    }

    fn register_faults(&mut self, _memory: &GuestMemory) -> Result<FaultRanges, VmError> {
        let ram = self.ram.as_ref().map_err(|error| vmferry::chain(error))?;
        let faults = self.faults.as_ref().ok_or("no post-copy was allowed")?;
        Ok(faults.register(&ram.ranges)?)
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
        // The guest is here. Failures of notes and settings are ignored.
        if let Some(note) = &mut self.note
            && !self.stays_paused
        {
            let _ = note.run();
        }
        let _ = self.settings.restore(&mut self.qmp);
        Ok(())
    }
}
