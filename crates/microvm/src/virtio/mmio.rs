//! The registers of virtio-mmio, version 2 (VIRTIO 1.2, section 4.2.2).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
};
use virtio_bindings::virtio_mmio::*;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmferry_balloon::{Balloon, DEVICE_ID, Features, Interrupt, MAX_QUEUES};
use vmferry_dirty::DirtyBitmap;

use super::host::Host;
use crate::kvm::InterruptPin;

/// "virt".
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "VFRY". Vendor IDs are not assigned by a registry.
const VENDOR: u32 = 0x5952_4656;

pub(super) type Device = Balloon<Arc<GuestMemoryMmap<DirtyBitmap>>, Host, Line>;

/// The device's interrupt, and the registers that the driver reads after an interrupt.
#[derive(Clone)]
pub(super) struct Line(Arc<LineState>);

struct LineState {
    /// InterruptStatus.
    status: AtomicU32,
    /// ConfigGeneration.
    generation: AtomicU32,
    /// Whether the guest runs. Interrupts of a paused guest are raised when it is resumed.
    live: AtomicBool,
    pin: Arc<InterruptPin>,
}

impl Line {
    pub(super) fn new(pin: Arc<InterruptPin>) -> Self {
        Self(Arc::new(LineState {
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            live: AtomicBool::new(false),
            pin,
        }))
    }

    /// Enables interrupts and raises a pending one, or disables them.
    pub(super) fn set_live(&self, live: bool) {
        self.0.live.store(live, Ordering::SeqCst);
        if live && self.0.status.load(Ordering::SeqCst) != 0 {
            self.0.pin.pulse();
        }
    }

    fn raise(&self, reason: u32) {
        self.0.status.fetch_or(reason, Ordering::SeqCst);
        if self.0.live.load(Ordering::SeqCst) {
            self.0.pin.pulse();
        }
    }
}

impl Interrupt for Line {
    fn used_buffers(&mut self, _: u16) {
        self.raise(VIRTIO_MMIO_INT_VRING);
    }

    fn config_changed(&mut self) {
        self.0.generation.fetch_add(1, Ordering::SeqCst);
        self.raise(VIRTIO_MMIO_INT_CONFIG);
    }
}

/// The registers of one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueRegisters {
    size: u32,
    ready: bool,
    descriptors: u64,
    driver: u64,
    device: u64,
}

/// The registers in their saved form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Registers {
    status: u32,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    queues: [QueueRegisters; MAX_QUEUES],
    interrupt_status: u32,
    generation: u32,
}

/// What the caller must do after a register write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Nothing,
    /// A queue has buffers.
    Kick(u16),
    /// Every queue may have buffers, because the driver has just started.
    KickAll,
}

/// The registers and their device.
pub(super) struct Transport {
    pub(super) device: Device,
    line: Line,
    registers: Registers,
}

impl Transport {
    pub(super) fn new(device: Device, line: Line) -> Self {
        Self { device, line, registers: Registers::default() }
    }

    /// The guest reads. Registers have 32 bits. Other access sizes and unknown registers read as
    /// zeros. The configuration space can be read in any size.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(VIRTIO_MMIO_CONFIG.into()) {
            return self.device.read_config(offset, data);
        }
        data.fill(0);
        if let ([_, _, _, _], Ok(register)) = (&data, u32::try_from(offset)) {
            data.copy_from_slice(&self.register(register).to_le_bytes());
        }
    }

    fn register(&self, register: u32) -> u32 {
        let Registers { device_features_sel, queue_sel, .. } = self.registers;
        let queue = self.registers.queues.get(queue_sel as usize);
        match register {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => DEVICE_ID,
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => word(self.device.offered().0, device_features_sel),
            VIRTIO_MMIO_QUEUE_NUM_MAX => {
                u16::try_from(queue_sel).map_or(0, |index| self.device.max_queue_size(index)).into()
            }
            VIRTIO_MMIO_QUEUE_READY => queue.is_some_and(|queue| queue.ready).into(),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.line.0.status.load(Ordering::SeqCst),
            VIRTIO_MMIO_STATUS if self.device.needs_reset() => {
                self.registers.status | VIRTIO_CONFIG_S_NEEDS_RESET
            }
            VIRTIO_MMIO_STATUS => self.registers.status,
            VIRTIO_MMIO_CONFIG_GENERATION => self.line.0.generation.load(Ordering::SeqCst),
            // All ones mean that there is no shared memory region.
            VIRTIO_MMIO_SHM_LEN_LOW
            | VIRTIO_MMIO_SHM_LEN_HIGH
            | VIRTIO_MMIO_SHM_BASE_LOW
            | VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    /// The guest writes. Register accesses of other sizes than 32 bits are ignored.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        if let Some(offset) = offset.checked_sub(VIRTIO_MMIO_CONFIG.into()) {
            self.device.write_config(offset, data);
            return Effect::Nothing;
        }
        match (u32::try_from(offset), data.try_into()) {
            (Ok(register), Ok(bytes)) => self.set(register, u32::from_le_bytes(bytes)),
            _ => Effect::Nothing,
        }
    }

    fn set(&mut self, register: u32, value: u32) -> Effect {
        let has = |status| self.registers.status & status != 0;
        match register {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.registers.device_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.registers.driver_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES if !has(VIRTIO_CONFIG_S_FEATURES_OK) => {
                let features = &mut self.registers.driver_features;
                set_word(features, self.registers.driver_features_sel, value);
            }
            VIRTIO_MMIO_QUEUE_SEL => self.registers.queue_sel = value,
            VIRTIO_MMIO_QUEUE_READY => self.set_ready(value),
            VIRTIO_MMIO_QUEUE_NOTIFY => {
                return u16::try_from(value).map_or(Effect::Nothing, Effect::Kick);
            }
            VIRTIO_MMIO_INTERRUPT_ACK => {
                self.line.0.status.fetch_and(!value, Ordering::SeqCst);
            }
            VIRTIO_MMIO_STATUS => return self.set_status(value),
            _ => self.set_queue(register, value),
        }
        Effect::Nothing
    }

    /// Writes a register of the selected queue. They cannot be changed while the queue is ready.
    fn set_queue(&mut self, register: u32, value: u32) {
        let selected = self.registers.queues.get_mut(self.registers.queue_sel as usize);
        let Some(queue) = selected.filter(|queue| !queue.ready) else { return };
        match register {
            VIRTIO_MMIO_QUEUE_NUM => queue.size = value,
            VIRTIO_MMIO_QUEUE_DESC_LOW => set_word(&mut queue.descriptors, 0, value),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => set_word(&mut queue.descriptors, 1, value),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_word(&mut queue.driver, 0, value),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_word(&mut queue.driver, 1, value),
            VIRTIO_MMIO_QUEUE_USED_LOW => set_word(&mut queue.device, 0, value),
            VIRTIO_MMIO_QUEUE_USED_HIGH => set_word(&mut queue.device, 1, value),
            _ => {}
        }
    }

    /// Makes the selected queue ready, if its registers are valid and the driver has not started
    /// yet: the device is activated with all queues that are ready at that time.
    fn set_ready(&mut self, value: u32) {
        let Ok(index) = u16::try_from(self.registers.queue_sel) else { return };
        let ready = value == 1 && !self.device.is_active() && self.queue(index).is_some();
        let Some(queue) = self.registers.queues.get_mut(usize::from(index)) else { return };
        if value == 0 {
            queue.ready = false;
            self.device.disable_queue(index);
        } else {
            queue.ready |= ready;
        }
    }

    /// A queue with the settings of its registers, if they are valid.
    fn queue(&self, index: u16) -> Option<Queue> {
        let registers = self.registers.queues.get(usize::from(index))?;
        let mut queue = Queue::new(self.device.max_queue_size(index)).ok()?;
        queue.try_set_size(u16::try_from(registers.size).ok()?).ok()?;
        queue.try_set_desc_table_address(GuestAddress(registers.descriptors)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(registers.driver)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(registers.device)).ok()?;
        queue.set_ready(true);
        Some(queue)
    }

    /// Sets status bits. The driver only ever adds bits, or writes 0 to reset the device (VIRTIO
    /// 1.2, section 2.1).
    fn set_status(&mut self, value: u32) -> Effect {
        if value == 0 {
            self.device.reset();
            self.line.0.status.store(0, Ordering::SeqCst);
            self.registers = Registers::default();
            return Effect::Nothing;
        }
        let mut added = value & 0xff & !self.registers.status & !VIRTIO_CONFIG_S_NEEDS_RESET;
        if added & VIRTIO_CONFIG_S_FEATURES_OK != 0 {
            let features = Features(self.registers.driver_features);
            if self.device.negotiate(features).is_err() {
                added &= !VIRTIO_CONFIG_S_FEATURES_OK;
            }
        }
        let begins = added & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        if begins {
            let ready = |index: &u16| self.registers.queues[usize::from(*index)].ready;
            let indexes = (0..MAX_QUEUES as u16).filter(ready);
            let queues = indexes.filter_map(|index| Some((index, self.queue(index)?))).collect();
            // Fails if the features have not been negotiated.
            if self.device.activate(queues).is_err() {
                added &= !VIRTIO_CONFIG_S_DRIVER_OK;
            }
        }
        self.registers.status |= added;
        if begins { Effect::KickAll } else { Effect::Nothing }
    }

    pub(super) fn save(&self) -> Registers {
        Registers {
            interrupt_status: self.line.0.status.load(Ordering::SeqCst),
            generation: self.line.0.generation.load(Ordering::SeqCst),
            ..self.registers.clone()
        }
    }

    /// Loads the registers that another machine has saved. Raises no interrupt.
    pub(super) fn restore(&mut self, device: Device, registers: Registers) {
        self.line.0.status.store(registers.interrupt_status, Ordering::SeqCst);
        self.line.0.generation.store(registers.generation, Ordering::SeqCst);
        self.device = device;
        self.registers = registers;
    }
}

/// The low (0) or high (1) half of a 64-bit number.
fn word(all: u64, place: u32) -> u32 {
    match place {
        0 => all as u32,
        1 => (all >> 32) as u32,
        _ => 0,
    }
}

fn set_word(all: &mut u64, place: u32, value: u32) {
    match place {
        0 => *all = *all & !0xffff_ffff | u64::from(value),
        1 => *all = *all & 0xffff_ffff | u64::from(value) << 32,
        _ => {}
    }
}
