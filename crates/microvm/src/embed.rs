//! The worked example of making a VMM migratable.
//!
//! [`MigratingMachine`] lends a machine to [`vmferry::source::migrate`], and [`IncomingMachine`]
//! creates one for [`vmferry::destination::receive`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry::destination::FetchHandle;
use vmferry::vmm::FAULT_SHARES;
use vmferry::vmm::free_pages::FreePages;
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, Resume, SourceVm, VmError};
use vmferry_dirty::{DirtyLog, LogChoice, SoftwareWay};
use vmferry_faults::FaultRanges;
use vmferry_memory::{GuestBytes, GuestMemory, MemoryError, MemoryKind};
use vmferry_wire::PROTOCOL_VERSION_MAX;

use crate::config::{GuestConfig, GuestKind, MachineConfig, check_name};
use crate::error::MachineError;
use crate::kvm::KvmBackend;
use crate::machine::{Machine, SharedMachine};
use crate::virtio::BalloonPages;

/// The release of this VMM, which is sent to the peer.
const RELEASE: &str = concat!("microvm ", env!("CARGO_PKG_VERSION"));

/// A machine that migrates to another host. Dropping this lifts the machine's throttle.
pub struct MigratingMachine {
    machine: SharedMachine,
    log: Arc<dyn DirtyLog>,
    balloon: Option<Arc<BalloonPages>>,
}

impl MigratingMachine {
    /// Creates the machine's dirty log.
    ///
    /// # Errors
    /// If this host lacks the log that the machine's configuration names.
    pub fn new(machine: SharedMachine) -> Result<Self, MachineError> {
        let (log, balloon) = {
            let machine = machine.lock();
            let balloon = machine.balloon();
            let balloon = balloon.map(|it| Arc::new(BalloonPages::new(it, machine.memory())));
            (machine.dirty_log()?, balloon)
        };
        Ok(Self { machine, log, balloon })
    }
}

impl Resume for MigratingMachine {
    fn resume(&mut self) -> Result<(), VmError> {
        let mut machine = self.machine.lock();
        // The migration that throttled the guest has failed.
        machine.throttle(0)?;
        Ok(machine.resume()?)
    }
}

impl Drop for MigratingMachine {
    fn drop(&mut self) {
        // Fails only if the thread of a vCPU has ended, which the machine reports as a crash.
        let _ = self.machine.lock().throttle(0);
    }
}

impl SourceVm for MigratingMachine {
    fn describe(&self) -> GuestDescription {
        let machine = self.machine.lock();
        GuestDescription {
            identity: machine.config().identity.clone(),
            vmm: format!("microvm/{}", machine.kind()),
            config: serde_json::to_vec(&machine.config().guest).unwrap_or_default(),
            layout: machine.memory().layout(),
        }
    }

    fn memory(&self) -> GuestMemory {
        self.machine.lock().memory().clone()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        Arc::clone(&self.log)
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        let begun = Instant::now();
        self.machine.lock().pause()?;
        Ok(begun.elapsed())
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        self.save_for(PROTOCOL_VERSION_MAX)
    }

    fn save_for(&mut self, protocol: u16) -> Result<GuestBytes, VmError> {
        Ok(self.machine.lock().save_for(protocol)?)
    }

    fn release(&self) -> String {
        RELEASE.into()
    }

    fn throttle(&mut self, percent: u8) -> Result<(), VmError> {
        Ok(self.machine.lock().throttle(percent)?)
    }

    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        self.balloon.iter().map(|balloon| Arc::clone(balloon) as Arc<dyn FreePages>).collect()
    }
}

/// Takes a machine that runs, and the progress of the pages that it lacks. It returns quickly.
pub type FetchWatcher = Box<dyn FnMut(SharedMachine, FetchHandle) + Send>;

/// A machine for an incoming guest, and what is expected of that guest.
#[derive(Default)]
pub struct IncomingMachine {
    /// The only guest name to accept. `None` accepts any.
    pub expect_name: Option<String>,
    /// The only guest UUID to accept. `None` accepts any.
    pub expect_uuid: Option<uuid::Uuid>,
    /// The only memory size in bytes to accept. `None` accepts any.
    pub expect_memory: Option<u64>,
    /// The kind of memory to give the guest on this host.
    pub memory_kind: MemoryKind,
    /// The dirty log of the guest's next migration.
    pub dirty_log: LogChoice,
    /// How the log of the devices' writes is read in that migration.
    pub device_log: SoftwareWay,
    /// Called when the guest runs and still lacks pages.
    pub on_fetch: Option<FetchWatcher>,
    /// The machine, once a guest has been announced.
    pub machine: Option<SharedMachine>,
}

impl DestinationVm for IncomingMachine {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        let (kind, config) = self.check(guest)?;
        let machine = Machine::shared(MachineConfig {
            identity: guest.identity.clone(),
            guest: config,
            kind,
            memory_kind: self.memory_kind,
            dirty_log: self.dirty_log,
            device_log: self.device_log,
        })
        .map_err(|error| match error {
            MachineError::Memory(
                full @ (MemoryError::HugePages { .. } | MemoryError::Map { .. }),
            ) => PrepareError::NoRoom(vmferry::chain(&full)),
            error => PrepareError::Vm(error.into()),
        })?;
        let memory = machine.lock().memory().clone();
        self.machine = Some(machine);
        Ok(Landing::Memory(memory))
    }

    fn would_take(&mut self, guest: &GuestDescription) -> Option<Result<(), PrepareError>> {
        Some(self.check(guest).map(drop))
    }

    /// The guest's memory is mapped in this process only.
    fn takes_post_copy(&self) -> Result<(), VmError> {
        let machine = self.machine.as_ref().ok_or("no guest was announced")?;
        Ok(FaultRanges::check(machine.lock().memory())?)
    }

    fn load(&mut self, state: &[u8]) -> Result<(), VmError> {
        let machine = self.machine.as_ref().ok_or("no guest was announced")?;
        Ok(machine.lock().load(state)?)
    }

    fn release(&self) -> String {
        RELEASE.into()
    }

    fn discard(&mut self) {
        self.machine = None;
    }

    fn run(&mut self) -> Result<(), VmError> {
        let machine = self.machine.as_ref().ok_or("no guest was announced")?;
        Ok(machine.lock().resume()?)
    }

    /// Until the last page has arrived, a balloon returns none to the system.
    fn register_faults(&mut self, memory: &GuestMemory) -> Result<FaultRanges, VmError> {
        self.keep_pages(true);
        Ok(FaultRanges::register(memory, FAULT_SHARES)?)
    }

    fn fetch_ends(&mut self) {
        self.keep_pages(false);
    }

    fn fetch_begins(&mut self, fetch: FetchHandle) {
        if let (Some(watch), Some(machine)) = (&mut self.on_fetch, &self.machine) {
            watch(Arc::clone(machine), fetch);
        }
    }
}

impl IncomingMachine {
    fn keep_pages(&self, keep: bool) {
        if let Some(balloon) = self.machine.as_ref().and_then(|it| it.lock().balloon()) {
            balloon.keep_pages(keep);
        }
    }

    fn check(&self, guest: &GuestDescription) -> Result<(GuestKind, GuestConfig), PrepareError> {
        self.check_identity(guest)?;
        let kind = match guest.vmm.as_str() {
            "microvm/kvm" => GuestKind::Kvm,
            "microvm/process" => GuestKind::Process,
            other => {
                return Err(PrepareError::Incompatible(format!("this is a microvm, not {other}")));
            }
        };
        let config: GuestConfig = vmferry::vmm::newer::read(&guest.config)
            .map_err(|error| PrepareError::Incompatible(format!("its configuration: {error}")))?;
        self.check_layout(guest, &config)?;
        check_name(&guest.identity.name).map_err(incompatible)?;
        if kind == GuestKind::Kvm {
            KvmBackend::available().map_err(|error| {
                PrepareError::Incompatible(format!("this host can't run a guest on KVM: {error}"))
            })?;
        }
        Ok((kind, config))
    }

    fn check_identity(&self, guest: &GuestDescription) -> Result<(), PrepareError> {
        let identity = &guest.identity;
        let wrong =
            |expected: String| PrepareError::Identity { expected, offered: identity.to_string() };
        match (&self.expect_name, &self.expect_uuid) {
            (Some(name), _) if *name != identity.name => Err(wrong(name.clone())),
            (_, Some(uuid)) if *uuid != identity.uuid => Err(wrong(uuid.to_string())),
            _ => Ok(()),
        }
    }

    fn check_layout(
        &self,
        guest: &GuestDescription,
        config: &GuestConfig,
    ) -> Result<(), PrepareError> {
        let bytes = |bytes: u64| format!("{} MiB", bytes >> 20);
        if let Some(expected) = self.expect_memory.filter(|size| *size != config.memory_bytes) {
            let (expected, offered) = (bytes(expected), bytes(config.memory_bytes));
            return Err(PrepareError::Layout { expected, offered });
        }
        config.check().map_err(incompatible)?;
        if config.layout() != guest.layout {
            let expected = format!("the slots of {}", bytes(config.memory_bytes));
            let offered = format!("{:?}", guest.layout);
            return Err(PrepareError::Layout { expected, offered });
        }
        Ok(())
    }
}

fn incompatible(error: MachineError) -> PrepareError {
    PrepareError::Incompatible(error.to_string())
}
