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
/// "VFRY"; nobody assigns these.
const VENDOR: u32 = 0x5952_4656;

pub(super) type Device = Balloon<Arc<GuestMemoryMmap<DirtyBitmap>>, Host, Line>;

/// The interrupt's line, and what the driver reads when it rings.
#[derive(Clone)]
pub(super) struct Line(Arc<LineState>);

struct LineState {
    /// InterruptStatus.
    status: AtomicU32,
    /// ConfigGeneration.
    generation: AtomicU32,
    /// Whether the guest runs. What happens while it does not is told when it does again.
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

    /// Lets interrupts through, and makes up for those that were not, or holds them back.
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

/// The registers, as they are saved.
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

/// What a write asks for beyond the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Nothing,
    /// A queue has something.
    Kick(u16),
    /// Every queue may have something: the driver has just begun.
    KickAll,
}

/// Registers, and the device behind them.
pub(super) struct Transport {
    pub(super) device: Device,
    line: Line,
    registers: Registers,
}

impl Transport {
    pub(super) fn new(device: Device, line: Line) -> Self {
        Self { device, line, registers: Registers::default() }
    }

    /// The guest reads. Registers have 32 bits; other accesses to them, and registers that are not there, read as
    /// zeros. The configuration space may be read in any way.
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
            // There is no shared memory, and this is how that is said.
            VIRTIO_MMIO_SHM_LEN_LOW
            | VIRTIO_MMIO_SHM_LEN_HIGH
            | VIRTIO_MMIO_SHM_BASE_LOW
            | VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    /// The guest writes. Accesses to registers that have not 32 bits are ignored.
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

    /// The registers of the selected queue, which are fixed while it is ready.
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

    /// A queue that can't be does not get ready, and one can't while the device is in use, which begins with all
    /// that are.
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

    /// A queue as its registers say, if there can be one.
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

    /// Bits are only ever added, until 0 resets the device (section 2.1).
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
            // Without features nothing begins.
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

    /// Takes over what another machine has saved. Nobody is interrupted.
    pub(super) fn restore(&mut self, device: Device, registers: Registers) {
        self.line.0.status.store(registers.interrupt_status, Ordering::SeqCst);
        self.line.0.generation.store(registers.generation, Ordering::SeqCst);
        self.device = device;
        self.registers = registers;
    }
}

/// A half of a number of 64 bits.
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
