//! A guest: memory, what runs it, and its device.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::GuestMemoryMmap;
use vmferry_dirty::{
    DEFAULT_RING_ENTRIES, DirtyBitmap, DirtyLog, LogChoice, RING_FROM_BYTES, SoftwareLog, UnionLog,
};
use vmferry_memory::{GuestBytes, GuestMemory, map_slots};
use vmferry_wire::PROTOCOL_VERSION_MAX;

use crate::backend::Backend;
use crate::config::{GuestKind, MachineConfig, check_name};
use crate::error::MachineError;
use crate::heartbeat::{self, Heartbeat};
use crate::kvm::{DirtyRing, KvmBackend, KvmConfig, MmioWiring};
use crate::pace::Pace;
use crate::process::ProcessBackend;
use crate::report::Report;
use crate::state::{SectionKind, StateReader, StateWriter};
use crate::virtio::{self, Balloon, BalloonDevice};

/// A machine that several threads have a hand on: the control socket while the engine migrates it.
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
    /// Why the vCPUs are run by what they are run by, in words.
    choice: String,
    // Before the memory: dropping it ends the vCPUs.
    backend: Box<dyn Backend>,
    heartbeat: Heartbeat,
    balloon: Option<BalloonDevice>,
    mapped: Arc<GuestMemoryMmap<DirtyBitmap>>,
    memory: GuestMemory,
    phase: Phase,
}

impl Machine {
    /// Makes a machine that has not begun. No page of its memory is populated.
    ///
    /// # Errors
    /// Settings out of bounds, or what this host lacks.
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

    /// The same, for several threads.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn shared(config: MachineConfig) -> Result<SharedMachine, MachineError> {
        Ok(Arc::new(Mutex::new(Self::new(config)?)))
    }

    /// What it is made of.
    #[must_use]
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// `kvm` or `process`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.backend.kind()
    }

    /// Why it is that kind, in words.
    #[must_use]
    pub fn choice(&self) -> &str {
        &self.choice
    }

    /// `not started`, `running` or `paused`.
    #[must_use]
    pub fn phase(&self) -> &'static str {
        self.phase.name()
    }

    /// Whether it runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Its memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// What the guest says of itself.
    ///
    /// # Errors
    /// If its memory can't be read.
    pub fn report(&self) -> Result<Report, MachineError> {
        Ok(Report::read(&self.memory)?)
    }

    /// Its balloon, if it has one.
    #[must_use]
    pub fn balloon(&self) -> Option<Balloon> {
        self.balloon.as_ref().map(BalloonDevice::handle)
    }

    /// Why the guest has stopped by itself, if it has.
    #[must_use]
    pub fn crash(&self) -> Option<String> {
        self.backend.crash()
    }

    /// What the guest has printed lately.
    #[must_use]
    pub fn serial_text(&self) -> String {
        self.backend.serial_text()
    }

    /// Boots the guest.
    ///
    /// # Errors
    /// If it has begun already, or what the back end says.
    pub fn start(&mut self) -> Result<(), MachineError> {
        self.must_be(Phase::New)?;
        self.backend.start()?;
        self.run_devices(true);
        self.phase = Phase::Running;
        Ok(())
    }

    /// Pauses vCPUs and device; nothing writes guest memory when it returns. Idempotent.
    ///
    /// # Errors
    /// If it has not begun, or what the back end says; the device then goes on.
    pub fn pause(&mut self) -> Result<(), MachineError> {
        if self.phase == Phase::Paused {
            return Ok(());
        }
        self.must_be(Phase::Running)?;
        self.run_devices(false);
        if let Err(error) = self.backend.pause() {
            self.run_devices(true);
            return Err(error);
        }
        self.phase = Phase::Paused;
        Ok(())
    }

    /// Lets a paused or loaded guest run. Idempotent.
    ///
    /// # Errors
    /// If it has neither begun nor been loaded, or what the back end says.
    pub fn resume(&mut self) -> Result<(), MachineError> {
        if self.phase == Phase::Running {
            return Ok(());
        }
        self.must_be(Phase::Paused)?;
        self.backend.resume()?;
        self.run_devices(true);
        self.phase = Phase::Running;
        Ok(())
    }

    /// Takes `percent` hundredths of their time from the vCPUs, up to 99, in periods of about 10 ms, so that
    /// the guest is slow but goes on; 0 takes nothing any more. It holds over pauses, and is not saved.
    ///
    /// # Errors
    /// More than 99, a machine that has not begun, or what the back end says.
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
    /// If it is not paused, or what the back end says.
    pub fn save(&mut self) -> Result<GuestBytes, MachineError> {
        self.save_for(PROTOCOL_VERSION_MAX)
    }

    /// The same, for a host that speaks this version of the protocol: in versions of the sections that it reads.
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

    /// Loads what [`save`](Self::save) wrote. All memory must be there.
    ///
    /// # Errors
    /// State that is damaged or of another machine, or a machine that has begun.
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

    /// The log of everything that writes its memory, as the configuration chose it.
    ///
    /// # Errors
    /// What this host lacks.
    pub fn dirty_log(&self) -> Result<Arc<dyn DirtyLog>, MachineError> {
        let (log, sees_all) = self.backend.dirty_log(self.config.dirty_log, &self.memory)?;
        let mut logs = vec![log];
        if !sees_all {
            logs.push(Arc::new(SoftwareLog::in_way(&self.mapped, self.config.device_log)));
        }
        Ok(Arc::new(UnionLog::new(logs)))
    }

    /// Lets the devices work, or makes them quiet.
    fn run_devices(&self, running: bool) {
        self.heartbeat.run(running);
        if let Some(balloon) = &self.balloon {
            balloon.run(running);
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

/// A machine's lock: a panic elsewhere does not take the guest away.
pub(crate) fn lock(machine: &SharedMachine) -> MutexGuard<'_, Machine> {
    machine.lock().unwrap_or_else(PoisonError::into_inner)
}

type Chosen = (Box<dyn Backend>, String);

fn choose_backend(
    config: &MachineConfig,
    mapped: &Arc<GuestMemoryMmap<DirtyBitmap>>,
    balloon: Option<MmioWiring>,
) -> Result<Chosen, MachineError> {
    let guest = &config.guest;
    let process = |choice: String| -> Result<Chosen, MachineError> {
        if guest.balloon {
            let reason = format!("it takes a guest on KVM, and this one would be {choice}");
            return Err(MachineError::Config { setting: "balloon", reason });
        }
        let memory = Arc::clone(mapped);
        let backend = ProcessBackend::new(guest.vcpus, &guest.command_line, memory)?;
        Ok((Box::new(backend), choice))
    };
    let unavailable = match config.kind {
        GuestKind::Process => return process("threads of a process, as asked for".into()),
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
                    _ => DirtyRing::Off,
                },
                balloon,
            };
            let backend = KvmBackend::new(kvm, Arc::clone(mapped))?;
            Ok((Box::new(backend), "/dev/kvm serves".into()))
        }
    }
}

#[cfg(test)]
mod tests;
