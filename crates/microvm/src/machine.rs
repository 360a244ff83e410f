//! A guest: its memory, the back end that runs its vCPUs, and its devices.

use std::sync::Arc;

use parking_lot::Mutex;
use vm_memory::GuestMemoryMmap;
use vmferry_dirty::{
    DEFAULT_RING_ENTRIES, DirtyBitmap, DirtyLog, LogChoice, RING_FROM_BYTES, SoftwareLog, UnionLog,
};
use vmferry_memory::{GuestBytes, GuestMemory, map_slots};
use vmferry_wire::PROTOCOL_VERSION_MAX;

use crate::backend::{Backend, BackendLog, LogCoverage};
use crate::config::{GuestKind, MachineConfig, check_name};
use crate::error::MachineError;
use crate::heartbeat::{self, Heartbeat};
use crate::kvm::{DirtyRing, KvmBackend, KvmConfig, MmioWiring};
use crate::pace::Pace;
use crate::process::ProcessBackend;
use crate::report::Report;
use crate::state::{SectionKind, StateReader, StateWriter};
use crate::virtio::{self, Balloon, BalloonDevice};

/// A machine that is shared by threads: the control socket's and the migration's.
pub type SharedMachine = Arc<Mutex<Machine>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    New,
    Running,
    Paused,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::New => "not started",
            Self::Running => "running",
            Self::Paused => "paused",
        }
    }
}

/// A guest and its machine.
pub struct Machine {
    config: MachineConfig,
    /// Why this back end was chosen, in words.
    choice: String,
    // Before the memory, because dropping the back end ends the vCPUs.
    backend: Box<dyn Backend>,
    heartbeat: Heartbeat,
    balloon: Option<BalloonDevice>,
    mapped: Arc<GuestMemoryMmap<DirtyBitmap>>,
    memory: GuestMemory,
    phase: Phase,
}

impl Machine {
    /// Creates a machine that is not started. No page of its memory is populated.
    ///
    /// # Errors
    /// If a setting is out of bounds, or if this host lacks something that the machine needs.
    pub fn new(config: MachineConfig) -> Result<Self, MachineError> {
        check_name(&config.identity.name)?;
        config.guest.check()?;
        let mapped = map_slots::<DirtyBitmap>(&config.guest.layout(), config.memory_kind)?;
        let memory = GuestMemory::from_vm_memory(&mapped)?;
        let mut balloon = None;
        let mut wiring = None;
        if config.guest.balloon {
            let (device, wires) = BalloonDevice::new(Arc::clone(&mapped), memory.clone())?;
            (balloon, wiring) = (Some(device), Some(wires));
        }
        let (backend, choice) = choose_backend(&config, &mapped, wiring)?;
        let heartbeat = Heartbeat::new(Arc::clone(&mapped))?;
        let phase = Phase::New;
        Ok(Self { config, choice, backend, heartbeat, balloon, mapped, memory, phase })
    }

    /// Creates a machine that can be shared by threads.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn shared(config: MachineConfig) -> Result<SharedMachine, MachineError> {
        Ok(Arc::new(Mutex::new(Self::new(config)?)))
    }

    /// The machine's configuration.
    #[must_use]
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// The kind of back end: `kvm` or `process`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.backend.kind()
    }

    /// Why this back end was chosen, in words.
    #[must_use]
    pub fn choice(&self) -> &str {
        &self.choice
    }

    /// The machine's phase: `not started`, `running` or `paused`.
    #[must_use]
    pub fn phase(&self) -> &'static str {
        self.phase.name()
    }

    /// Whether the machine is running.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Reads the guest's report on itself.
    ///
    /// # Errors
    /// If guest memory cannot be read.
    pub fn report(&self) -> Result<Report, MachineError> {
        Ok(Report::read(&self.memory)?)
    }

    /// The machine's balloon, if it has one.
    #[must_use]
    pub fn balloon(&self) -> Option<Balloon> {
        self.balloon.as_ref().map(BalloonDevice::handle)
    }

    /// Why the guest has crashed, if it has.
    #[must_use]
    pub fn crash(&self) -> Option<String> {
        self.backend.crash()
    }

    /// The latest output of the guest's serial port.
    #[must_use]
    pub fn serial_text(&self) -> String {
        self.backend.serial_text()
    }

    /// Boots the guest.
    ///
    /// # Errors
    /// If the machine was started before, or if the back end fails.
    pub fn start(&mut self) -> Result<(), MachineError> {
        self.must_be(Phase::New)?;
        self.backend.start()?;
        self.resume_devices();
        self.phase = Phase::Running;
        Ok(())
    }

    /// Pauses the vCPUs and devices. Nothing writes guest memory after it returns. Idempotent.
    ///
    /// # Errors
    /// If the machine is not started, or if the back end fails. The devices then keep running.
    pub fn pause(&mut self) -> Result<(), MachineError> {
        if self.phase == Phase::Paused {
            return Ok(());
        }
        self.must_be(Phase::Running)?;
        self.pause_devices();
        if let Err(error) = self.backend.pause() {
            self.resume_devices();
            return Err(error);
        }
        self.phase = Phase::Paused;
        Ok(())
    }

    /// Resumes a paused or loaded guest. Idempotent.
    ///
    /// # Errors
    /// If the machine is neither started nor loaded, or if the back end fails.
    pub fn resume(&mut self) -> Result<(), MachineError> {
        if self.phase == Phase::Running {
            return Ok(());
        }
        self.must_be(Phase::Paused)?;
        self.backend.resume()?;
        self.resume_devices();
        self.phase = Phase::Running;
        Ok(())
    }

    /// Takes `percent` (0 to 99) of the vCPUs' time, in periods of about 10 ms, so that the guest
    /// slows down but never stops for long. 0 lifts the throttle. The throttle stays in force
    /// across pauses, and is not saved.
    ///
    /// # Errors
    /// If `percent` is more than 99, the machine is not started, or the back end fails.
    pub fn throttle(&mut self, percent: u8) -> Result<(), MachineError> {
        let pace = Pace::losing(percent)?;
        if self.phase == Phase::New && pace.is_some() {
            let (is, needed) = (self.phase.name(), Phase::Running.name());
            return Err(MachineError::WrongState { is, needed });
        }
        self.backend.throttle(pace)
    }

    /// Saves everything but memory, for a host of this release.
    ///
    /// # Errors
    /// If the machine is not paused, or if the back end fails.
    pub fn save(&mut self) -> Result<GuestBytes, MachineError> {
        self.save_for(PROTOCOL_VERSION_MAX)
    }

    /// Saves everything but memory, in the section versions that a host with this version of the
    /// protocol reads.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_for(&mut self, protocol: u16) -> Result<GuestBytes, MachineError> {
        self.must_be(Phase::Paused)?;
        let mut out = StateWriter::for_protocol(protocol);
        self.backend.save(&mut out)?;
        self.heartbeat.save(&mut out)?;
        if let Some(balloon) = &self.balloon {
            balloon.save(&mut out)?;
        }
        Ok(out.finish())
    }

    /// Loads what [`save`](Self::save) wrote. All of guest memory must be in place.
    ///
    /// # Errors
    /// If the state is damaged or of another machine, or if this machine was started before.
    pub fn load(&mut self, state: &[u8]) -> Result<(), MachineError> {
        self.must_be(Phase::New)?;
        let reader = StateReader::parse(state)?;
        let mut known: Vec<&[SectionKind]> = self.backend.sections();
        known.push(heartbeat::SECTIONS);
        if self.balloon.is_some() {
            known.push(virtio::SECTIONS);
        }
        reader.refuse_unknown(&known)?;
        self.backend.load(&reader)?;
        self.heartbeat.load(&reader)?;
        if let Some(balloon) = &self.balloon {
            balloon.load(&reader)?;
        }
        self.phase = Phase::Paused;
        Ok(())
    }

    /// The dirty log that the configuration chose. It sees the writes of vCPUs and devices.
    ///
    /// # Errors
    /// If this host lacks that log.
    pub fn dirty_log(&self) -> Result<Arc<dyn DirtyLog>, MachineError> {
        let BackendLog { log, coverage } =
            self.backend.dirty_log(self.config.dirty_log, &self.memory)?;
        let mut logs = vec![log];
        if coverage == LogCoverage::VcpuWrites {
            logs.push(Arc::new(SoftwareLog::in_way(&self.mapped, self.config.device_log)));
        }
        Ok(Arc::new(UnionLog::new(logs)))
    }

    fn resume_devices(&self) {
        self.heartbeat.resume();
        if let Some(balloon) = &self.balloon {
            balloon.resume();
        }
    }

    /// Stops the devices. They write no guest memory after this returns.
    fn pause_devices(&self) {
        self.heartbeat.pause();
        if let Some(balloon) = &self.balloon {
            balloon.pause();
        }
    }

    fn must_be(&self, needed: Phase) -> Result<(), MachineError> {
        if let Some(crash) = self.crash() {
            return Err(MachineError::Crashed(crash));
        }
        if self.phase == needed {
            Ok(())
        } else {
            Err(MachineError::WrongState { is: self.phase.name(), needed: needed.name() })
        }
    }
}

/// A back end, and why it was chosen.
type ChosenBackend = (Box<dyn Backend>, String);

fn choose_backend(
    config: &MachineConfig,
    mapped: &Arc<GuestMemoryMmap<DirtyBitmap>>,
    balloon: Option<MmioWiring>,
) -> Result<ChosenBackend, MachineError> {
    let guest = &config.guest;
    let process = |choice: String| -> Result<ChosenBackend, MachineError> {
        if guest.balloon {
            let reason = format!("needs a guest on KVM, but this guest would run as {choice}");
            return Err(MachineError::Config { setting: "balloon", reason });
        }
        let memory = Arc::clone(mapped);
        let backend = ProcessBackend::new(guest.vcpus, &guest.command_line, memory)?;
        Ok((Box::new(backend), choice))
    };
    let unavailable = match config.kind {
        GuestKind::Process => return process("threads of a process, as requested".into()),
        GuestKind::Auto | GuestKind::Kvm => KvmBackend::available().err(),
    };
    match unavailable {
        Some(error) if config.kind == GuestKind::Auto => {
            process(format!("threads of a process, because {error}"))
        }
        Some(error) => Err(error.into()),
        None => {
            let kvm = KvmConfig {
                vcpus: guest.vcpus,
                command_line: guest.command_line.clone(),
                serial: None,
                dirty_ring: match config.dirty_log {
                    LogChoice::KvmRing => DirtyRing::Required(DEFAULT_RING_ENTRIES),
                    LogChoice::Auto if guest.memory_bytes >= RING_FROM_BYTES => {
                        DirtyRing::Preferred(DEFAULT_RING_ENTRIES)
                    }
                    LogChoice::Auto
                    | LogChoice::KvmBitmap
                    | LogChoice::KvmClear
                    | LogChoice::Userfaultfd => DirtyRing::Off,
                },
                balloon,
            };
            let backend = KvmBackend::new(kvm, Arc::clone(mapped))?;
            Ok((Box::new(backend), "/dev/kvm is usable".into()))
        }
    }
}

#[cfg(test)]
mod tests;
