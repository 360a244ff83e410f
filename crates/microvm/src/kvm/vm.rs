//! The machine: made, started, paused, saved, loaded.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::VmFd;
use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::Bitmap;
use vmferry_dirty::{DirtyLogError, DirtyRings, KvmSlot, enable_dirty_ring, max_ring_entries};
use vmferry_memory::SlotId;

use super::boot::{GuestRam, set_entry};
use super::devices::{self, Devices};
use super::mmio::MmioWiring;
use super::setup::{
    add_interrupt_controllers, add_memory, keep_exceptions_apart, open, vcpu_cpuid,
};
use super::stop::StopRecord;
use super::throttle::Vcpus;
use super::vcpu::{Reply, Surroundings, Vcpu};
use super::vcpu_state::{self, Abilities, VcpuState};
use super::vm_state::{self, VmState};
use super::{GuestStop, KvmError, MemorySlot, StopCause, ioctl};
use crate::pace::Pace;
use crate::state::{SectionKind, StateReader, StateWriter};

/// The guest has room for so many.
const VCPUS_MAX: u8 = 8;

/// What is to be made.
#[derive(Default)]
pub struct KvmConfig {
    /// 1 to 8.
    pub vcpus: u8,
    /// For the guest's workload, at most 4,095 bytes.
    pub command_line: String,
    /// Where serial output is copied to, besides the 64 KiB that are always kept.
    pub serial: Option<Box<dyn Write + Send>>,
    /// Whether the machine has KVM's dirty rings.
    pub dirty_ring: DirtyRing,
    /// A balloon.
    pub balloon: Option<MmioWiring>,
}

/// Whether a machine has dirty rings, with so many entries for each vCPU (a power of two from 1,024 on),
/// or fewer if KVM allows only fewer. It then has no dirty bitmaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirtyRing {
    /// It has bitmaps.
    #[default]
    Off,
    /// If this KVM has rings.
    Preferred(u32),
    /// Or the machine is not made.
    Required(u32),
}

/// A machine that runs on KVM. Dropping it ends its vCPU threads.
pub struct KvmBackend {
    // First, so that on drop every vCPU thread has ended before anything that it uses goes away.
    vcpus: Vcpus,
    vm: Arc<VmFd>,
    memory: Arc<dyn GuestRam>,
    slots: Vec<MemorySlot>,
    rings: Option<Arc<DirtyRings>>,
    pub(super) devices: Arc<Devices>,
    stop: Arc<StopRecord>,
    abilities: Abilities,
    command_line: String,
    balloon_address: u64,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No vCPU has a state yet.
    Made,
    Paused,
    Running,
    /// Some request failed half-way; what state the vCPUs have is not known.
    Broken,
}

impl Phase {
    fn describe(self) -> &'static str {
        match self {
            Phase::Made => "has neither been started nor loaded",
            Phase::Paused => "is paused",
            Phase::Running => "is running",
            Phase::Broken => "failed half-way through an earlier request and must be made anew",
        }
    }
}

impl KvmBackend {
    /// Whether KVM can be used by this process, and if not, why not and what to do about it.
    ///
    /// # Errors
    /// [`KvmError::Unavailable`].
    pub fn available() -> Result<(), KvmError> {
        open().map(drop)
    }

    /// The sections that a state may have for [`KvmBackend::load`]: for
    /// [`StateReader::refuse_unknown`], beside the caller's own.
    #[must_use]
    pub fn sections() -> &'static [&'static [SectionKind]] {
        &[vcpu_state::SECTIONS, vm_state::SECTIONS, &[devices::SERIAL]]
    }

    /// Makes a machine with all its devices and vCPU threads, parked. Touches no guest memory.
    ///
    /// # Errors
    /// [`KvmError`]: no KVM, a capability or a setting that it does not have.
    pub fn new<B: Bitmap + Send + Sync + 'static>(
        config: KvmConfig,
        memory: Arc<GuestMemoryMmap<B>>,
    ) -> Result<Self, KvmError> {
        if !(1..=VCPUS_MAX).contains(&config.vcpus) {
            let reason =
                format!("{} vCPUs asked for, and it can have 1 to {VCPUS_MAX}", config.vcpus);
            return Err(KvmError::Config { reason });
        }
        let kvm = open()?;
        let vm = kvm.create_vm().map_err(KvmError::vm("KVM_CREATE_VM"))?;
        keep_exceptions_apart(&vm)?;
        let slots = add_memory(&vm, &memory)?;
        let vm = Arc::new(vm);
        // Before any vCPU is made: KVM wants it so.
        let rings = match config.dirty_ring {
            DirtyRing::Off => None,
            DirtyRing::Preferred(_) if max_ring_entries(&vm).is_err() => None,
            DirtyRing::Preferred(entries) | DirtyRing::Required(entries) => {
                Some(Arc::new(make_rings(&vm, entries, kvm_slots(&slots))?))
            }
        };
        let memory: Arc<dyn GuestRam> = memory;
        let interrupt = add_interrupt_controllers(&vm)?;
        if let Some(wiring) = &config.balloon {
            wiring.connect(&vm)?;
        }
        let balloon_address = config.balloon.as_ref().map_or(0, |wiring| wiring.address);
        let abilities = Abilities {
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
            let surroundings = Surroundings {
                devices: Arc::clone(&devices),
                stop: Arc::clone(&stop),
                rings: rings.clone(),
                _memory: Arc::clone(&memory),
            };
            vcpus.push(Vcpu::spawn(index, fd, surroundings)?);
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
            abilities,
            command_line,
            balloon_address,
            phase: Phase::Made,
        })
    }

    /// "kvm".
    #[must_use]
    pub fn kind(&self) -> &'static str {
        "kvm"
    }

    /// Loads the guest into memory and starts every vCPU at its entry.
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] unless the machine is new.
    pub fn start(&mut self) -> Result<(), KvmError> {
        self.need(&[Phase::Made], "started")?;
        let vcpus = self.vcpus.each().len() as u32;
        let entry =
            self.memory.load_guest(&self.slots, vcpus, &self.command_line, self.balloon_address)?;
        self.broken_until(Phase::Paused, |this| {
            this.on_each(move |fd, vcpu| set_entry(fd, vcpu, entry)).map(drop)
        })?;
        self.resume()
    }

    /// Stops every vCPU. On return none is in the guest and no access to a device is half done, so
    /// that nothing but this process writes to guest memory. Does nothing if the machine is paused
    /// already.
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] if it was never started.
    pub fn pause(&mut self) -> Result<(), KvmError> {
        self.need(&[Phase::Running, Phase::Paused], "paused")?;
        if self.phase == Phase::Running {
            self.broken_until(Phase::Paused, |this| {
                this.vcpus.hold();
                // Each answers when it is parked.
                this.on_each(|_, _| Ok(())).map(drop)
            })?;
        }
        Ok(())
    }

    /// Lets every vCPU run. Does nothing if the machine is running already.
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] if it was neither started nor loaded.
    pub fn resume(&mut self) -> Result<(), KvmError> {
        self.need(&[Phase::Running, Phase::Paused], "resumed")?;
        if self.phase == Phase::Paused {
            self.broken_until(Phase::Running, |this| this.vcpus.run())?;
        }
        Ok(())
    }

    /// Takes a part of their time from the vCPUs, or with `None` no longer. It holds over pauses, and is
    /// no part of the state.
    ///
    /// # Errors
    /// [`KvmError::Throttle`], or a vCPU whose thread has ended.
    pub(crate) fn throttle(&mut self, pace: Option<Pace>) -> Result<(), KvmError> {
        self.vcpus.throttle(pace)
    }

    /// Appends the state of a paused machine, without its memory.
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] unless the machine is paused, or if its guest stopped in a
    /// way that cannot be continued anywhere.
    pub fn save(&mut self, out: &mut StateWriter) -> Result<(), KvmError> {
        self.need(&[Phase::Paused], "saved")?;
        if let Some(stop) = self.stopped().filter(|stop| stop.cause != StopCause::Panicked) {
            return Err(KvmError::Phase { wanted: "saved", phase: format!("has stopped: {stop}") });
        }
        let abilities = self.abilities.clone();
        let states = self.on_each(move |fd, vcpu| VcpuState::save(fd, vcpu, &abilities))?;
        for (vcpu, state) in (0..).zip(&states) {
            state.write(vcpu, out)?;
        }
        VmState::save(&self.vm)?.write(out)?;
        self.devices.save(out)
    }

    /// Puts a new machine into the state of a saved one; afterwards it is paused. Everything is
    /// parsed before anything is changed. The caller has called [`StateReader::refuse_unknown`].
    ///
    /// # Errors
    /// [`KvmError`]; [`KvmError::Phase`] unless the machine is new.
    pub fn load(&mut self, from: &StateReader<'_>) -> Result<(), KvmError> {
        self.need(&[Phase::Made], "loaded")?;
        let serial = devices::read_serial(from)?;
        let machine = VmState::read(from)?;
        let count = self.vcpus.each().len() as u32;
        let mut states = Vec::new();
        for vcpu in 0..count {
            states.push(VcpuState::read(vcpu, from, &self.abilities)?);
        }
        if let Some(section) =
            from.sections().iter().find(|s| is_vcpu_section(s.name()) && s.instance() >= count)
        {
            return Err(section.invalid(format!("this machine has {count} vCPUs")).into());
        }
        self.broken_until(Phase::Paused, |this| {
            let mut replies = Vec::new();
            for ((index, vcpu), state) in (0..).zip(this.vcpus.each()).zip(states) {
                let abilities = this.abilities.clone();
                replies.push(vcpu.call(move |fd| state.load(fd, index, &abilities))?);
            }
            replies.into_iter().try_for_each(Reply::wait)?;
            machine.load(&this.vm)?;
            this.devices.load(&serial)
        })
    }

    /// Why the guest stopped by itself, if it did.
    #[must_use]
    pub fn stopped(&self) -> Option<GuestStop> {
        self.stop.first()
    }

    /// Waits until the guest stops by itself, or `timeout` has passed.
    #[must_use]
    pub fn wait_stopped(&self, timeout: Duration) -> Option<GuestStop> {
        self.stop.wait(timeout)
    }

    /// The last 64 KiB that the guest wrote to its serial port.
    #[must_use]
    pub fn serial_text(&self) -> String {
        self.devices.serial_text()
    }

    /// KVM's memory slots.
    #[must_use]
    pub fn slots(&self) -> &[MemorySlot] {
        &self.slots
    }

    /// The same, for the dirty logs.
    #[must_use]
    pub fn kvm_slots(&self) -> Vec<KvmSlot> {
        kvm_slots(&self.slots)
    }

    /// The dirty rings, if the machine was made with them.
    #[must_use]
    pub fn rings(&self) -> Option<&Arc<DirtyRings>> {
        self.rings.as_ref()
    }

    /// The machine's descriptor, for the dirty logs.
    #[must_use]
    pub fn vm(&self) -> &Arc<VmFd> {
        &self.vm
    }

    /// Does `work` on every vCPU's thread at once, and waits for all.
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

    fn need(&self, phases: &[Phase], wanted: &'static str) -> Result<(), KvmError> {
        if phases.contains(&self.phase) {
            return Ok(());
        }
        Err(KvmError::Phase { wanted, phase: self.phase.describe().into() })
    }

    /// Reaches `phase` if `work` succeeds; the machine is of no use otherwise.
    fn broken_until(
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

/// Turns dirty rings on.
fn make_rings(
    vm: &Arc<VmFd>,
    entries: u32,
    slots: Vec<KvmSlot>,
) -> Result<DirtyRings, DirtyLogError> {
    let entries = entries.min(max_ring_entries(vm)?);
    enable_dirty_ring(vm, entries)?;
    DirtyRings::new(Arc::clone(vm), entries, slots)
}

/// Parses the sections of a saved machine with so many vCPUs as [`KvmBackend::load`] does before it changes anything,
/// as on a host whose KVM has everything: for whoever looks at a state without a machine.
///
/// # Errors
/// [`KvmError`], naming the section.
pub fn check_sections(from: &StateReader<'_>, vcpus: u32) -> Result<(), KvmError> {
    let has = Abilities { sregs2: true, xsave_bytes: usize::MAX, msrs: Vec::new() };
    devices::read_serial(from)?;
    VmState::read(from)?;
    (0..vcpus).try_for_each(|vcpu| VcpuState::read(vcpu, from, &has).map(|_| ()))
}

fn is_vcpu_section(name: &str) -> bool {
    vcpu_state::SECTIONS.iter().any(|kind| kind.name == name)
}
