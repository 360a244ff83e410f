//! The KVM machine: creates, starts, pauses, saves and loads it.

use std::sync::Arc;
use std::time::Duration;

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::VmFd;
use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::Bitmap;
use vmferry_dirty::{DirtyLogError, DirtyRings, KvmSlot, enable_dirty_ring, max_ring_entries};
use vmferry_memory::SlotId;

use super::boot::{GuestRam, set_entry};
use super::config::{DirtyRing, KvmConfig};
use super::devices::{self, Devices};
use super::setup::{
    add_interrupt_controllers, add_memory, keep_exceptions_apart, open, vcpu_cpuid,
};
use super::stop::StopRecord;
use super::throttle::Vcpus;
use super::vcpu::{Reply, Vcpu, VcpuContext};
use super::vcpu_state::{self, KvmFeatures, VcpuState};
use super::vm_state::{self, VmState};
use super::{GuestStop, KvmError, MemorySlot, StopCause, ioctl};
use crate::pace::Pace;
use crate::state::{SectionKind, StateReader, StateWriter};

/// The guest has tables for this number of vCPUs.
const VCPUS_MAX: u8 = 8;

/// A machine that runs on KVM. Dropping it ends its vCPU threads.
pub struct KvmBackend {
    // First, so that every vCPU thread has ended before anything that it uses is dropped.
    vcpus: Vcpus,
    vm: Arc<VmFd>,
    memory: Arc<dyn GuestRam>,
    slots: Vec<MemorySlot>,
    rings: Option<Arc<DirtyRings>>,
    pub(super) devices: Arc<Devices>,
    stop: Arc<StopRecord>,
    features: KvmFeatures,
    command_line: String,
    balloon_address: u64,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The machine is neither started nor loaded.
    Created,
    Paused,
    Running,
    /// A request failed half-way. The state of the vCPUs is unknown.
    Broken,
}

impl Phase {
    fn describe(self) -> &'static str {
        match self {
            Phase::Created => "has neither been started nor loaded",
            Phase::Paused => "is paused",
            Phase::Running => "is running",
            Phase::Broken => "failed in the middle of an earlier request and must be created again",
        }
    }
}

impl KvmBackend {
    /// Checks whether this process can use KVM.
    ///
    /// # Errors
    /// [`KvmError::Unavailable`] with the reason and what to do about it.
    pub fn available() -> Result<(), KvmError> {
        open().map(drop)
    }

    /// The sections that [`KvmBackend::load`] knows. The caller passes them to
    /// [`StateReader::refuse_unknown`], together with its own.
    #[must_use]
    pub fn sections() -> &'static [&'static [SectionKind]] {
        &[vcpu_state::SECTIONS, vm_state::SECTIONS, &[devices::SERIAL]]
    }

    /// Creates a machine with all its devices and parked vCPU threads. Does not access guest
    /// memory.
    ///
    /// # Errors
    /// [`KvmError`] if KVM, a capability or a setting is not available.
    pub fn new<B: Bitmap + Send + Sync + 'static>(
        config: KvmConfig,
        memory: Arc<GuestMemoryMmap<B>>,
    ) -> Result<Self, KvmError> {
        if !(1..=VCPUS_MAX).contains(&config.vcpus) {
            let reason = format!("{} vCPUs; choose 1 to {VCPUS_MAX}", config.vcpus);
            return Err(KvmError::Config { reason });
        }
        let kvm = open()?;
        let vm = kvm.create_vm().map_err(KvmError::vm("KVM_CREATE_VM"))?;
        keep_exceptions_apart(&vm)?;
        let slots = add_memory(&vm, &memory)?;
        let vm = Arc::new(vm);
        // KVM requires this before the first vCPU is created.
        let rings = match config.dirty_ring {
            DirtyRing::Off => None,
            DirtyRing::Preferred(_) if max_ring_entries(&vm).is_err() => None,
            DirtyRing::Preferred(entries) | DirtyRing::Required(entries) => {
                Some(Arc::new(enable_rings(&vm, entries, kvm_slots(&slots))?))
            }
        };
        let memory: Arc<dyn GuestRam> = memory;
        let interrupt = add_interrupt_controllers(&vm)?;
        if let Some(wiring) = &config.balloon {
            wiring.connect(&vm)?;
        }
        let balloon_address = config.balloon.as_ref().map_or(0, |wiring| wiring.address);
        let features = KvmFeatures {
            sregs2: ioctl::has_sregs2(&vm),
            xsave_bytes: ioctl::xsave_bytes(&vm),
            msrs: kvm
                .get_msr_index_list()
                .map_err(KvmError::vm("KVM_GET_MSR_INDEX_LIST"))?
                .as_slice()
                .to_vec(),
        };
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let supported = supported.map_err(KvmError::vm("KVM_GET_SUPPORTED_CPUID"))?;
        let stop = Arc::new(StopRecord::default());
        let devices =
            Arc::new(Devices::new(interrupt, config.serial, Arc::clone(&stop), config.balloon));
        let mut vcpus = Vec::new();
        for index in 0..u32::from(config.vcpus) {
            let fd = vm
                .create_vcpu(u64::from(index))
                .map_err(KvmError::vcpu(index, "KVM_CREATE_VCPU"))?;
            let cpuid = vcpu_cpuid(supported.clone(), index);
            fd.set_cpuid2(&cpuid).map_err(KvmError::vcpu(index, "KVM_SET_CPUID2"))?;
            if let Some(rings) = &rings {
                rings.add_vcpu(&fd)?;
            }
            let context = VcpuContext {
                devices: Arc::clone(&devices),
                stop: Arc::clone(&stop),
                rings: rings.clone(),
                _memory: Arc::clone(&memory),
            };
            vcpus.push(Vcpu::spawn(index, fd, context)?);
        }
        let command_line = config.command_line;
        Ok(Self {
            vcpus: Vcpus::new(vcpus),
            vm,
            memory,
            slots,
            rings,
            devices,
            stop,
            features,
            command_line,
            balloon_address,
            phase: Phase::Created,
        })
    }

    /// "kvm".
    #[must_use]
    pub fn kind(&self) -> &'static str {
        "kvm"
    }

    /// Loads the guest into memory and starts every vCPU at its entry point.
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] unless the machine is new.
    pub fn start(&mut self) -> Result<(), KvmError> {
        self.require_phase(&[Phase::Created], "started")?;
        let vcpus = self.vcpus.each().len() as u32;
        let entry =
            self.memory.load_guest(&self.slots, vcpus, &self.command_line, self.balloon_address)?;
        self.change_phase(Phase::Paused, |this| {
            this.on_each(move |fd, vcpu| set_entry(fd, vcpu, entry)).map(drop)
        })?;
        self.resume()
    }

    /// Stops every vCPU. On return no vCPU is in the guest and no device access is incomplete, so
    /// only this process writes to guest memory. Does nothing if the machine is paused already.
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] if it was never started.
    pub fn pause(&mut self) -> Result<(), KvmError> {
        self.require_phase(&[Phase::Running, Phase::Paused], "paused")?;
        if self.phase == Phase::Running {
            self.change_phase(Phase::Paused, |this| {
                this.vcpus.stop();
                // Each vCPU answers once it is parked.
                this.on_each(|_, _| Ok(())).map(drop)
            })?;
        }
        Ok(())
    }

    /// Runs every vCPU. Does nothing if the machine is running already.
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] if it was neither started nor loaded.
    pub fn resume(&mut self) -> Result<(), KvmError> {
        self.require_phase(&[Phase::Running, Phase::Paused], "resumed")?;
        if self.phase == Phase::Paused {
            self.change_phase(Phase::Running, |this| this.vcpus.run())?;
        }
        Ok(())
    }

    /// Throttles the vCPUs. `None` lifts the throttle. It stays in force across pauses, and is not
    /// part of the saved state.
    ///
    /// # Errors
    /// [`KvmError::Throttle`], or [`KvmError::Thread`] if the thread of a vCPU has ended.
    pub(crate) fn throttle(&mut self, pace: Option<Pace>) -> Result<(), KvmError> {
        self.vcpus.throttle(pace)
    }

    /// Appends the state of a paused machine, without its memory.
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] unless the machine is paused, or if its guest has stopped
    /// and no host could continue it.
    pub fn save(&mut self, out: &mut StateWriter) -> Result<(), KvmError> {
        self.require_phase(&[Phase::Paused], "saved")?;
        if let Some(stop) = self.stopped().filter(|stop| stop.cause != StopCause::Panicked) {
            return Err(KvmError::Phase { wanted: "saved", phase: format!("has stopped: {stop}") });
        }
        let features = self.features.clone();
        let states = self.on_each(move |fd, vcpu| VcpuState::save(fd, vcpu, &features))?;
        for (vcpu, state) in (0..).zip(&states) {
            state.write(vcpu, out)?;
        }
        VmState::save(&self.vm)?.write(out)?;
        self.devices.save(out)
    }

    /// Loads the state of a saved machine into a new one, which is then paused. Everything is
    /// parsed before anything is changed. The caller must have called
    /// [`StateReader::refuse_unknown`].
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] unless the machine is new.
    pub fn load(&mut self, from: &StateReader<'_>) -> Result<(), KvmError> {
        self.require_phase(&[Phase::Created], "loaded")?;
        let serial = devices::read_serial(from)?;
        let machine = VmState::read(from)?;
        let count = self.vcpus.each().len() as u32;
        let mut states = Vec::new();
        for vcpu in 0..count {
            states.push(VcpuState::read(vcpu, from, &self.features)?);
        }
        if let Some(section) =
            from.sections().iter().find(|s| is_vcpu_section(s.name()) && s.instance() >= count)
        {
            return Err(section.invalid(format!("this machine has {count} vCPUs")).into());
        }
        self.change_phase(Phase::Paused, |this| {
            let mut replies = Vec::new();
            for ((index, vcpu), state) in (0..).zip(this.vcpus.each()).zip(states) {
                let features = this.features.clone();
                replies.push(vcpu.call(move |fd| state.load(fd, index, &features))?);
            }
            replies.into_iter().try_for_each(Reply::wait)?;
            machine.load(&this.vm)?;
            this.devices.load(&serial)
        })
    }

    /// Why the guest has stopped by itself, if it has.
    #[must_use]
    pub fn stopped(&self) -> Option<GuestStop> {
        self.stop.first()
    }

    /// Waits until the guest stops by itself, for at most `timeout`.
    #[must_use]
    pub fn wait_stopped(&self, timeout: Duration) -> Option<GuestStop> {
        self.stop.wait(timeout)
    }

    /// The last 64 KiB of the guest's serial output.
    #[must_use]
    pub fn serial_text(&self) -> String {
        self.devices.serial_text()
    }

    /// KVM's memory slots.
    #[must_use]
    pub fn slots(&self) -> &[MemorySlot] {
        &self.slots
    }

    /// KVM's memory slots, in the form that the dirty logs need.
    #[must_use]
    pub fn kvm_slots(&self) -> Vec<KvmSlot> {
        kvm_slots(&self.slots)
    }

    /// The dirty rings, if the machine was created with them.
    #[must_use]
    pub fn rings(&self) -> Option<&Arc<DirtyRings>> {
        self.rings.as_ref()
    }

    /// The machine's file descriptor, for the dirty logs.
    #[must_use]
    pub fn vm(&self) -> &Arc<VmFd> {
        &self.vm
    }

    /// Runs `work` on all vCPU threads in parallel, and waits for all of them.
    fn on_each<T: Send + 'static>(
        &self,
        work: impl Fn(&kvm_ioctls::VcpuFd, u32) -> Result<T, KvmError> + Clone + Send + 'static,
    ) -> Result<Vec<T>, KvmError> {
        let begin = |(index, vcpu): (u32, &Vcpu)| {
            let work = work.clone();
            vcpu.call(move |fd| work(fd, index))
        };
        let replies: Result<Vec<_>, _> = (0..).zip(self.vcpus.each()).map(begin).collect();
        replies?.into_iter().map(Reply::wait).collect()
    }

    fn require_phase(&self, phases: &[Phase], wanted: &'static str) -> Result<(), KvmError> {
        if phases.contains(&self.phase) {
            return Ok(());
        }
        Err(KvmError::Phase { wanted, phase: self.phase.describe().into() })
    }

    /// Changes to `phase` if `work` succeeds. Otherwise the machine stays in [`Phase::Broken`].
    fn change_phase(
        &mut self,
        phase: Phase,
        work: impl FnOnce(&Self) -> Result<(), KvmError>,
    ) -> Result<(), KvmError> {
        self.phase = Phase::Broken;
        work(self)?;
        self.phase = phase;
        Ok(())
    }
}

fn kvm_slots(slots: &[MemorySlot]) -> Vec<KvmSlot> {
    let kvm_slot = |(index, slot): (u16, &MemorySlot)| KvmSlot {
        slot: SlotId(index),
        kvm_slot: slot.slot,
        gpa: slot.gpa,
        bytes: slot.bytes,
        host_address: slot.host_address,
    };
    (0..).zip(slots).map(kvm_slot).collect()
}

/// Enables dirty rings.
fn enable_rings(
    vm: &Arc<VmFd>,
    entries: u32,
    slots: Vec<KvmSlot>,
) -> Result<DirtyRings, DirtyLogError> {
    let entries = entries.min(max_ring_entries(vm)?);
    enable_dirty_ring(vm, entries)?;
    DirtyRings::new(Arc::clone(vm), entries, slots)
}

/// Parses the sections of a saved machine with `vcpus` vCPUs, without a machine, as
/// [`KvmBackend::load`] would on a host whose KVM has all features.
///
/// # Errors
/// [`KvmError`] that names the section.
pub fn check_sections(from: &StateReader<'_>, vcpus: u32) -> Result<(), KvmError> {
    let has = KvmFeatures { sregs2: true, xsave_bytes: usize::MAX, msrs: Vec::new() };
    devices::read_serial(from)?;
    VmState::read(from)?;
    (0..vcpus).try_for_each(|vcpu| VcpuState::read(vcpu, from, &has).map(|_| ()))
}

fn is_vcpu_section(name: &str) -> bool {
    vcpu_state::SECTIONS.iter().any(|kind| kind.name == name)
}
