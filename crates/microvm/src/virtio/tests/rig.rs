//! A device and its driver: the driver accesses registers as a vCPU would, and writes rings into
//! guest memory.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_mmio::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_balloon::Features;
use vmferry_dirty::DirtyBitmap;
use vmferry_memory::{GuestMemory, MemoryKind, SlotId, SlotLayout, map_slots};

use crate::kvm::MmioWiring;
use crate::state::{StateReader, StateWriter};
use crate::virtio::BalloonDevice;

/// Ends a test that hangs. Everything here takes far less time.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
pub(super) const PAGES: u64 = 256;
pub(super) const SIZE: u16 = 8;
pub(super) const STATUS: u32 = VIRTIO_MMIO_STATUS;

pub(super) const INFLATE: u16 = 0;
pub(super) const STATISTICS: u16 = 2;
pub(super) const FREE_PAGE: u16 = 3;
pub(super) const REPORTING: u16 = 4;

pub(super) struct Rig {
    pub(super) device: BalloonDevice,
    pub(super) wiring: MmioWiring,
    pub(super) memory: GuestMemory,
    pub(super) mapped: Arc<GuestMemoryMmap<DirtyBitmap>>,
    /// Number of buffers made available, by queue.
    pub(super) offered: [u16; 5],
    /// Interrupts that the test has seen.
    seen: Cell<u64>,
}

impl Rig {
    pub(super) fn new(kind: MemoryKind) -> Self {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
        Self::with_memory(map_slots(&layout, kind).unwrap())
    }

    pub(super) fn with_memory(mapped: Arc<GuestMemoryMmap<DirtyBitmap>>) -> Self {
        let memory = GuestMemory::from_vm_memory(&mapped).unwrap();
        let (device, wiring) = BalloonDevice::new(Arc::clone(&mapped), memory.clone()).unwrap();
        Self { device, wiring, memory, mapped, offered: [0; 5], seen: Cell::new(0) }
    }

    /// A running device with a driver that supports all features but EVENT_IDX.
    pub(super) fn running(kind: MemoryKind) -> Self {
        let rig = Self::new(kind);
        rig.device.resume();
        rig.negotiate(Features::ALL.without(Features::EVENT_IDX).0);
        (0..5).for_each(|queue| rig.set_up(queue));
        rig.set(STATUS, 15);
        rig
    }

    pub(super) fn get(&self, register: u32) -> u32 {
        let mut bytes = [0; 4];
        self.wiring.device.read(register.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(super) fn set(&self, register: u32, value: u32) {
        self.wiring.device.write(register.into(), &value.to_le_bytes());
    }

    pub(super) fn negotiate(&self, features: u64) {
        self.set(STATUS, 1);
        self.set(STATUS, 3);
        for half in 0..2 {
            self.set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
            self.set(VIRTIO_MMIO_DRIVER_FEATURES, (features >> (32 * half)) as u32);
        }
        self.set(STATUS, 11);
    }

    pub(super) fn set_up(&self, queue: u16) {
        self.set(VIRTIO_MMIO_QUEUE_SEL, queue.into());
        self.set(VIRTIO_MMIO_QUEUE_NUM, SIZE.into());
        self.set(VIRTIO_MMIO_QUEUE_DESC_LOW, descriptors(queue) as u32);
        self.set(VIRTIO_MMIO_QUEUE_AVAIL_LOW, available(queue) as u32);
        self.set(VIRTIO_MMIO_QUEUE_USED_LOW, used(queue) as u32);
        self.set(VIRTIO_MMIO_QUEUE_READY, 1);
    }

    /// Makes a buffer available, without a kick.
    pub(super) fn offer(&mut self, queue: u16, start: u64, bytes: u32, writable: bool) {
        let count = &mut self.offered[usize::from(queue)];
        let place = *count % SIZE;
        *count += 1;
        let descriptor = [start, u64::from(bytes) | u64::from(writable) << 33];
        let write = |at: u64, value: u16| self.mapped.write_obj(value, GuestAddress(at)).unwrap();
        let at = GuestAddress(descriptors(queue) + 16 * u64::from(place));
        self.mapped.write_obj(descriptor, at).unwrap();
        write(available(queue) + 4 + 2 * u64::from(place), place);
        write(available(queue) + 2, self.offered[usize::from(queue)]);
    }

    pub(super) fn offer_words(&mut self, queue: u16, at: u64, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.mapped.write_slice(&bytes, GuestAddress(at)).unwrap();
        self.offer(queue, at, bytes.len() as u32, false);
    }

    /// Signals the ioeventfd, as KVM does for the guest's write.
    pub(super) fn kick(&self, queue: u16) {
        self.wiring.kicks[usize::from(queue)].write(1).unwrap();
    }

    pub(super) fn used(&self, queue: u16) -> u16 {
        self.mapped.read_obj(GuestAddress(used(queue) + 2)).unwrap()
    }

    pub(super) fn wait_used(&self, queue: u16, count: u16) {
        wait_until("used", || self.used(queue) == count);
    }

    pub(super) fn was_interrupted(&self) -> bool {
        let now = self.wiring.interrupt.pulses();
        self.seen.replace(now) != now
    }

    pub(super) fn populated(&self, page: u64) -> bool {
        self.memory.populated().unwrap().bitmap(SlotId(0)).is_set(page)
    }

    /// Moves the state to another device with the same memory.
    pub(super) fn moved(self) -> Self {
        let mut out = StateWriter::new();
        self.device.save(&mut out).unwrap();
        let state = out.finish();
        let mut other = Self::with_memory(Arc::clone(&self.mapped));
        other.device.load(&StateReader::parse(&state).unwrap()).unwrap();
        other.offered = self.offered;
        other
    }
}

pub(super) fn descriptors(queue: u16) -> u64 {
    0x1000 * (u64::from(queue) + 1)
}

pub(super) fn available(queue: u16) -> u64 {
    descriptors(queue) + 0x400
}

pub(super) fn used(queue: u16) -> u64 {
    descriptors(queue) + 0x800
}

pub(super) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "never {what}");
        // The device reports in memory, so there is no event to wait for.
        std::thread::sleep(Duration::from_millis(1));
    }
}
