//! A QEMU that waits for a guest, as the engine's destination.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use uuid::Uuid;
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
use vmferry_memory::Backing;
use vmferry_wire::{GuestIdentity, SessionId};

use crate::arrived::{Note, Whereabouts};
use crate::carried::{self, Arrival, Description, Place};
use crate::error::QemuError;
use crate::guest::{self, host};
use crate::lock::Lock;
use crate::machine::{self, Machine};
use crate::memory_file::{self, Examiner, MemoryFiles};
use crate::process::ProcessIdentity;
use crate::qmp::Qmp;
use crate::ram::{Block, Carrier, Located, Ram};
use crate::settings::Settings;
use crate::source::VMM;
use crate::starter::{DirectView, Looker, View};
use crate::state;
use crate::vcpu::{self, Vcpu};

/// How long QEMU may take to answer. The source waits for 30 s until its guest is loaded, and would blame the link before
/// it heard that QEMU does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// A QEMU that was started with `-incoming defer`. It takes guests that are attached, if its memory can be filled
/// from outside, and guests that are carried.
pub struct QemuDestination {
    qmp: Qmp,
    /// The memory that can be filled from outside, or why there is none.
    ram: Result<Ram, QemuError>,
    /// The files that its memory is in; none if the process can't be looked into.
    files: Option<MemoryFiles>,
    description: Description,
    vcpu: Option<Vcpu>,
    settings: Settings,
    expected: Expected,
    /// A carried guest, on its way.
    arrival: Option<Arrival>,
    /// Where QEMU listens for the streams of a guest, if they are several. Made while there is the right to.
    place: Option<Arc<Place>>,
    /// Sees whether QEMU is stopped.
    looker: Looker,
    /// A state was loaded, or tried to be: this QEMU can take no other guest.
    used: bool,
    /// If it is seen from here.
    process: Option<ProcessIdentity>,
    /// The receiver that this QEMU belongs to, for the one that comes after it.
    receiver: Option<String>,
    note: Option<Note>,
    _lock: Option<Lock>,
    /// The guest was paused at the source, and stays so.
    stays_paused: bool,
}

/// The guest that is welcome; any, by default.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// Its name.
    pub name: Option<String>,
    /// Its UUID. A QEMU that was started with `-uuid` takes no other guest than that one either.
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

/// What the source says of itself.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offered {
    host: String,
    machine: Machine,
    blocks: Vec<Block>,
}

impl QemuDestination {
    /// Attaches to the QEMU whose QMP socket this is.
    ///
    /// # Errors
    /// If it does not wait for a migration.
    pub fn attach(socket: &Path, expected: Expected) -> Result<Self, QemuError> {
        Self::attach_by(socket, expected, &mut DirectView, None)
    }

    /// The same where somebody else looks into the process. `place` is one that was made for the QEMU before, if
    /// there was one.
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
        // While QEMU waits, `stop` is what `-S` is: the guest stands still once its state is loaded,
        // until COMMIT.
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
        // Without one, guests whose QEMU sends several streams are refused when they come.
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
        })
    }

    /// Names the receiver that this QEMU belongs to: the next one of that name
    /// [finds](crate::Arrived::find) the guest.
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

    /// The QEMU process, if it is seen from here.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.qmp.pid()
    }

    /// The QEMU process, if it is seen from here or by a starter.
    pub(crate) fn known_process(&self) -> Option<u32> {
        self.pid().or_else(|| Some(self.process.as_ref()?.pid))
    }

    /// The directory that is kept for a socket between QEMU and this process: a process that is restricted must be able
    /// to remove files from it, and the directory itself.
    #[must_use]
    pub fn place(&self) -> Option<&Path> {
        self.place.as_deref().map(Place::path)
    }

    /// The same, for the next QEMU.
    pub(crate) fn share_place(&self) -> Option<Arc<Place>> {
        self.place.clone()
    }

    /// Has somebody else look whose the memory files are from now on: this process may be about to
    /// lose the right to.
    pub fn examine_by(&mut self, examiner: Examiner) {
        if let Some(files) = &mut self.files {
            files.examine_by(examiner);
        }
    }

    /// Ends the QEMU.
    ///
    /// # Errors
    /// QMP's.
    pub fn quit(&mut self) -> Result<(), QemuError> {
        self.qmp.execute("quit", json!({}))?;
        Ok(())
    }

    /// Makes sure that this QEMU's vCPUs have what the source's guest knows of. Where both sides
    /// say what they have, that counts, and the name that `offered` has for them does not.
    fn compare_vcpus(&self, config: &[u8], offered: &mut Machine) -> Result<(), PrepareError> {
        let theirs: Option<Vcpu> = vmferry::newer::optional(config, vcpu::MEMBER);
        let (Some(theirs), Some(ours)) = (theirs, &self.vcpu) else { return Ok(()) };
        let model = offered.cpu.take().unwrap_or_default();
        match theirs.misses(ours, &model) {
            Some(difference) => Err(PrepareError::Incompatible(difference)),
            None => Ok(()),
        }
    }

    /// Makes this QEMU's memory what a guest that is attached is put into.
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
        // Now, and not while the guest stands still.
        Settings::for_loading(&mut self.qmp)
            .map_err(|error| PrepareError::Vm(QemuError::from(error).into()))?;
        Ok(Landing::Memory(ram.memory.clone()))
    }

    /// Lets this QEMU take the streams of one that is carried.
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

/// The memory of a QEMU that waits, and the files that it is in.
///
/// # Errors
/// If another process has one of the files mapped: no guest may come here then, in whatever way.
fn find_memory(
    qmp: &mut Qmp,
    view: &mut dyn View,
) -> Result<(Result<Ram, QemuError>, Option<MemoryFiles>), QemuError> {
    let located = match Located::find(qmp, view) {
        Ok(located) => located,
        Err(error) => return Ok((Err(error), None)),
    };
    let files = MemoryFiles::of(&located, view.examiner());
    files.nobody_else_is_seen()?;
    let ram = Ram::of(&located, qmp, view).and_then(|ram| {
        may_be_emptied(&located, &ram)?;
        files.are_ours_alone()?;
        Ok(ram)
    });
    Ok((ram, Some(files)))
}

/// Makes sure that the blocks that guests are put into may be emptied by what they are.
fn may_be_emptied(located: &Located, ram: &Ram) -> Result<(), QemuError> {
    for (block, slot) in ram.carried().zip(ram.memory.slots()) {
        let found = located.blocks.iter().find(|(listed, _)| listed.name == block.name);
        let (Some((_, Some(mapping))), Backing::File { file, .. }) = (found, slot.backing()) else {
            continue;
        };
        let used = located.backends.use_of(&block.name);
        memory_file::may_be_emptied(&block.name, &used, mapping, file)?;
    }
    Ok(())
}

/// Empties the memory, so that nothing of an earlier guest or of the firmware is left.
fn empty(ram: &Ram, files: Option<&MemoryFiles>) -> Result<(), QemuError> {
    match files {
        Some(files) => files.empty(&ram.memory),
        None => Ok(()),
    }
}

/// Why a memory file is left alone, for the source.
fn not_ours(error: QemuError) -> PrepareError {
    match error {
        QemuError::FileInUse { .. } | QemuError::Unproved { .. } => {
            PrepareError::InUse(vmferry::chain(&error))
        }
        other => PrepareError::Vm(other.into()),
    }
}

fn parse<T: DeserializeOwned>(config: &[u8]) -> Result<T, PrepareError> {
    vmferry::newer::read(config)
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
        // The next receiver may be started in another directory.
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
        // One that has loaded a state can't take another; one that has not can be filled again, if
        // its memory is still its own.
        let emptied = match &self.ram {
            Ok(ram) if !self.used => empty(ram, self.files.as_ref()),
            _ => Ok(()),
        };
        self.used |= emptied.is_err();
        // What fails here is seen by the next guest.
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
        // The guest is here. Notes and settings are worth no failure.
        if let Some(note) = &mut self.note
            && !self.stays_paused
        {
            let _ = note.run();
        }
        let _ = self.settings.restore(&mut self.qmp);
        Ok(())
    }
}

/// Both QEMUs must have the same blocks, carried by the same side.
fn compare(theirs: &[Block], ours: &[Block]) -> Result<(), PrepareError> {
    let words = |blocks: &[Block]| {
        let all: Vec<String> = blocks
            .iter()
            .filter(|block| block.carrier == Carrier::Vmferry)
            .map(|block| format!("{} of {} MiB", block.name, block.bytes >> 20))
            .collect();
        all.join(", ")
    };
    let carried = |blocks: &[Block]| -> Vec<(String, u64)> {
        let ours = blocks.iter().filter(|block| block.carrier == Carrier::Vmferry);
        ours.map(|block| (block.name.clone(), block.bytes)).collect()
    };
    if carried(theirs) == carried(ours) {
        return Ok(());
    }
    Err(PrepareError::Layout { expected: words(ours), offered: words(theirs) })
}

#[cfg(test)]
mod tests {
    use vmferry_memory::SlotId;

    use super::*;
    use crate::carried::StreamedBlock;
    use crate::ram;

    fn machine() -> Machine {
        let devices = vec!["virtio-blk-pci at 00:03.0".into()];
        Machine { kind: "pc-q35-10.0".into(), vcpus: 2, cpu: None, devices }
    }

    /// What a source says of a QEMU that is attached: frozen, with both versions of the protocol.
    const ATTACHED: &str = r#"{"host":"boot","machine":{"kind":"pc-q35-10.0","vcpus":2,"devices":["virtio-blk-pci at 00:03.0"]},"blocks":[{"name":"pc.ram","bytes":134217728,"carrier":"vmferry","file":[27,9]},{"name":"pc.bios","bytes":262144,"carrier":"qemu","file":[0,0]}]}"#;
    /// The same of one that is carried.
    const CARRIED: &str = r#"{"host":"boot","machine":{"kind":"pc-q35-10.0","vcpus":2,"devices":["virtio-blk-pci at 00:03.0"]},"blocks":[{"name":"pc.ram","bytes":134217728,"most":134217728}],"files":[[27,9]],"multifd":2}"#;

    fn refusal<T: std::fmt::Debug + DeserializeOwned>(json: &str) -> String {
        parse::<T>(json.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn golden_description_of_an_attached_guest() {
        let block =
            |name: &str, bytes, carrier, file| Block { name: name.into(), bytes, carrier, file };
        let blocks = [
            block("pc.ram", 128 << 20, Carrier::Vmferry, (27, 9)),
            block("pc.bios", 256 << 10, Carrier::Qemu, (0, 0)),
        ];
        let written = ram::describe(&machine(), None, &blocks, "boot");
        let written: serde_json::Value = serde_json::from_slice(&written).unwrap();
        assert_eq!(written, serde_json::from_str::<serde_json::Value>(ATTACHED).unwrap());
        let read: Offered = parse(ATTACHED.as_bytes()).unwrap();
        assert_eq!(
            (read.host.as_str(), read.machine, &read.blocks[..]),
            ("boot", machine(), &blocks[..])
        );
    }

    #[test]
    fn golden_description_with_vcpus_is_read_by_older_releases() {
        let features = ["avx2".to_owned()].into();
        let vcpu = Vcpu { vendor: "GenuineIntel".into(), features };
        let written = ram::describe(&machine(), Some(&vcpu), &[], "boot");
        let text = String::from_utf8(written.clone()).unwrap();
        let member = r#""optional":{"vcpu":{"vendor":"GenuineIntel","features":["avx2"]}}"#;
        assert!(text.contains(member), "{text}");
        assert_eq!(parse::<Offered>(&written).unwrap().machine, machine());
        assert_eq!(vmferry::newer::optional(&written, vcpu::MEMBER), Some(vcpu));
    }

    #[test]
    fn golden_description_of_a_carried_guest() {
        let block = StreamedBlock { name: "pc.ram".into(), bytes: 128 << 20, most: 128 << 20 };
        let description = Description {
            host: "boot".into(),
            machine: machine(),
            blocks: vec![block],
            files: vec![(27, 9)],
            multifd: 2,
        };
        assert_eq!(json!(description), serde_json::from_str::<serde_json::Value>(CARRIED).unwrap());
        assert_eq!(parse::<Description>(CARRIED.as_bytes()).unwrap(), description);
        assert_eq!(description.layout()[0].slot, SlotId(0));
    }

    #[test]
    fn what_a_newer_source_asks_for_is_refused_by_name_unless_it_is_optional() {
        for (json, is_read) in [
            (ATTACHED.replacen('{', r#"{"optional":{"firmware":"x"},"#, 1), true),
            (ATTACHED.replacen('{', r#"{"firmware":"x","#, 1), false),
            (ATTACHED.replacen(r#""vcpus":2"#, r#""vcpus":2,"firmware":"x""#, 1), false),
        ] {
            let read = parse::<Offered>(json.as_bytes());
            assert_eq!(read.is_ok(), is_read, "{read:?}");
            if !is_read {
                assert!(refusal::<Offered>(&json).contains("unknown field `firmware`"));
            }
        }
        let newer = CARRIED.replacen('{', r#"{"dirty_limit":1,"#, 1);
        assert!(refusal::<Description>(&newer).contains("unknown field `dirty_limit`"));
        let optional = CARRIED.replacen('{', r#"{"optional":{"dirty_limit":1},"#, 1);
        assert!(parse::<Description>(optional.as_bytes()).is_ok());
    }
}
