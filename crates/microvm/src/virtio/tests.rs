//! The device with a driver that is played by the test: it reads and writes registers as a vCPU would, and
//! writes rings into guest memory.

use std::cell::Cell;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use virtio_bindings::virtio_mmio::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_balloon::Features;
use vmferry_dirty::{DirtyBitmap, DirtyLog, SoftwareLog};
use vmferry_memory::{GuestMemory, MemoryKind, PageRun, PageSet, SlotId, SlotLayout, map_slots};

use super::*;
use crate::kvm::MmioWiring;
use crate::state::{StateReader, StateWriter};

mod golden;

/// Far more than anything here takes: a limit for what hangs, not a measure.
const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: u64 = 256;
const SIZE: u16 = 8;
const STATUS: u32 = VIRTIO_MMIO_STATUS;

const INFLATE: u16 = 0;
const STATISTICS: u16 = 2;
const FREE_PAGE: u16 = 3;
const REPORTING: u16 = 4;

struct Rig {
    device: BalloonDevice,
    wiring: MmioWiring,
    memory: GuestMemory,
    mapped: Arc<GuestMemoryMmap<DirtyBitmap>>,
    /// Buffers that were made available, by queue.
    offered: [u16; 5],
    /// Interrupts that the test has seen.
    seen: Cell<u64>,
}

impl Rig {
    fn new(kind: MemoryKind) -> Self {
        let layout = [SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }];
        Self::with_memory(map_slots(&layout, kind).unwrap())
    }

    fn with_memory(mapped: Arc<GuestMemoryMmap<DirtyBitmap>>) -> Self {
        let memory = GuestMemory::from_vm_memory(&mapped).unwrap();
        let (device, wiring) = BalloonDevice::new(Arc::clone(&mapped), memory.clone()).unwrap();
        Self { device, wiring, memory, mapped, offered: [0; 5], seen: Cell::new(0) }
    }

    /// A device that runs, with a driver that knows everything.
    fn running(kind: MemoryKind) -> Self {
        let rig = Self::new(kind);
        rig.device.run(true);
        rig.negotiate(Features::ALL.without(Features::EVENT_IDX).0);
        (0..5).for_each(|queue| rig.set_up(queue));
        rig.set(STATUS, 15);
        rig
    }

    fn get(&self, register: u32) -> u32 {
        let mut bytes = [0; 4];
        self.wiring.device.read(register.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn set(&self, register: u32, value: u32) {
        self.wiring.device.write(register.into(), &value.to_le_bytes());
    }

    fn negotiate(&self, features: u64) {
        self.set(STATUS, 1);
        self.set(STATUS, 3);
        for half in 0..2 {
            self.set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
            self.set(VIRTIO_MMIO_DRIVER_FEATURES, (features >> (32 * half)) as u32);
        }
        self.set(STATUS, 11);
    }

    fn set_up(&self, queue: u16) {
        self.set(VIRTIO_MMIO_QUEUE_SEL, queue.into());
        self.set(VIRTIO_MMIO_QUEUE_NUM, SIZE.into());
        self.set(VIRTIO_MMIO_QUEUE_DESC_LOW, descriptors(queue) as u32);
        self.set(VIRTIO_MMIO_QUEUE_AVAIL_LOW, available(queue) as u32);
        self.set(VIRTIO_MMIO_QUEUE_USED_LOW, used(queue) as u32);
        self.set(VIRTIO_MMIO_QUEUE_READY, 1);
    }

    /// Makes a buffer available, without a kick.
    fn offer(&mut self, queue: u16, start: u64, bytes: u32, writable: bool) {
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

    fn offer_words(&mut self, queue: u16, at: u64, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.mapped.write_slice(&bytes, GuestAddress(at)).unwrap();
        self.offer(queue, at, bytes.len() as u32, false);
    }

    /// As KVM does for the guest's write.
    fn kick(&self, queue: u16) {
        self.wiring.kicks[usize::from(queue)].write(1).unwrap();
    }

    fn used(&self, queue: u16) -> u16 {
        self.mapped.read_obj(GuestAddress(used(queue) + 2)).unwrap()
    }

    fn wait_used(&self, queue: u16, count: u16) {
        wait_until("used", || self.used(queue) == count);
    }

    fn was_interrupted(&self) -> bool {
        let now = self.wiring.interrupt.pulses();
        self.seen.replace(now) != now
    }

    fn populated(&self, page: u64) -> bool {
        self.memory.populated().unwrap().bitmap(SlotId(0)).is_set(page)
    }

    /// Another device with this one's state and memory.
    fn moved(self) -> Self {
        let mut out = StateWriter::new();
        self.device.save(&mut out).unwrap();
        let state = out.finish();
        let mut other = Self::with_memory(Arc::clone(&self.mapped));
        other.device.load(&StateReader::parse(&state).unwrap()).unwrap();
        other.offered = self.offered;
        other
    }
}

fn descriptors(queue: u16) -> u64 {
    0x1000 * (u64::from(queue) + 1)
}

fn available(queue: u16) -> u64 {
    descriptors(queue) + 0x400
}

fn used(queue: u16) -> u64 {
    descriptors(queue) + 0x800
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "never {what}");
        // The device reports by memory, which wakes nobody.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn registers_are_those_of_the_specification() {
    let rig = Rig::new(MemoryKind::Private);
    let identity = [0, 4, 8].map(|register| rig.get(register));
    assert_eq!(identity, [0x7472_6976, 2, 5]);
    rig.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
    assert_eq!(rig.get(VIRTIO_MMIO_DEVICE_FEATURES), 1);
    rig.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
    assert_eq!(rig.get(VIRTIO_MMIO_DEVICE_FEATURES), 0x3000_003f);
    rig.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 2);
    assert_eq!(rig.get(VIRTIO_MMIO_DEVICE_FEATURES), 0);
    rig.set(VIRTIO_MMIO_QUEUE_SEL, 4);
    assert_eq!(rig.get(VIRTIO_MMIO_QUEUE_NUM_MAX), 128);
    rig.set(VIRTIO_MMIO_QUEUE_SEL, 5);
    assert_eq!(rig.get(VIRTIO_MMIO_QUEUE_NUM_MAX), 0);
    rig.set(VIRTIO_MMIO_QUEUE_SEL, 1 << 16);
    assert_eq!(rig.get(VIRTIO_MMIO_QUEUE_NUM_MAX), 0, "65536 is not 0");
    assert_eq!(rig.get(VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
    // What is only written reads as zeros, and so does what is not there.
    assert_eq!([0x14, 0x38, 0x50, 0x64, 0x80, 0xf0, 0x102].map(|at| rig.get(at)), [0; 7]);
    // Other widths than 32 bits are no registers.
    let mut bytes = [7; 8];
    rig.wiring.device.read(0, &mut bytes[..1]);
    rig.wiring.device.read(0, &mut bytes[2..]);
    assert_eq!(bytes, [0, 7, 0, 0, 0, 0, 0, 0]);
    rig.wiring.device.write(STATUS.into(), &[1]);
    rig.wiring.device.write(STATUS.into(), &[1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.get(STATUS), 0);
}

#[test]
fn the_driver_begins_as_it_must() {
    let rig = Rig::new(MemoryKind::Private);
    // Not without VERSION_1, nor with what was not offered.
    for features in [0, Features::VERSION_1.0 | 1 << 33] {
        rig.negotiate(features);
        assert_eq!(rig.get(STATUS), 3, "{features:#x}");
        rig.set(STATUS, 7);
        assert_eq!(rig.get(STATUS), 3, "no DRIVER_OK without FEATURES_OK");
        rig.set(STATUS, 0);
        assert_eq!(rig.get(STATUS), 0);
    }
    rig.negotiate(Features::VERSION_1.0);
    assert_eq!(rig.get(STATUS), 11);
    rig.set_up(0);
    rig.set_up(1);
    assert_eq!(rig.get(VIRTIO_MMIO_QUEUE_READY), 1);
    // A queue of no power of two, one that is not aligned, and one that does not exist.
    rig.set(VIRTIO_MMIO_QUEUE_SEL, 2);
    for (register, bad, good) in
        [(VIRTIO_MMIO_QUEUE_NUM, 7, 8), (VIRTIO_MMIO_QUEUE_DESC_LOW, 8, 16)]
    {
        rig.set(register, bad);
        rig.set(VIRTIO_MMIO_QUEUE_READY, 1);
        assert_eq!(rig.get(VIRTIO_MMIO_QUEUE_READY), 0);
        rig.set(register, good);
    }
    rig.set(VIRTIO_MMIO_QUEUE_SEL, 77);
    rig.set(VIRTIO_MMIO_QUEUE_READY, 1);
    assert_eq!(rig.get(VIRTIO_MMIO_QUEUE_READY), 0);
    rig.set(STATUS, 15);
    assert!(rig.device.handle().status().driver);
    // Too late.
    rig.set(VIRTIO_MMIO_QUEUE_SEL, 2);
    rig.set(VIRTIO_MMIO_QUEUE_READY, 1);
    assert_eq!(rig.get(VIRTIO_MMIO_QUEUE_READY), 0);
    rig.set(VIRTIO_MMIO_QUEUE_SEL, 1);
    rig.set(VIRTIO_MMIO_QUEUE_READY, 0);
    assert_eq!(rig.get(VIRTIO_MMIO_QUEUE_READY), 0);
    rig.set(STATUS, 0);
    assert!(!rig.device.handle().status().driver);
    rig.set(VIRTIO_MMIO_QUEUE_SEL, 0);
    assert_eq!(rig.get(VIRTIO_MMIO_QUEUE_READY), 0);
}

#[test]
fn a_target_is_a_change_of_the_configuration() {
    let rig = Rig::running(MemoryKind::Private);
    let balloon = rig.device.handle();
    let generation = rig.get(VIRTIO_MMIO_CONFIG_GENERATION);
    assert!(balloon.set_target((PAGES + 1) << 12).is_err());
    assert!(!rig.was_interrupted());
    balloon.set_target(100 << 12).unwrap();
    assert!(rig.was_interrupted());
    assert_eq!(rig.get(VIRTIO_MMIO_INTERRUPT_STATUS), 2);
    assert_ne!(rig.get(VIRTIO_MMIO_CONFIG_GENERATION), generation);
    assert_eq!(rig.get(VIRTIO_MMIO_CONFIG), 100);
    rig.set(VIRTIO_MMIO_INTERRUPT_ACK, 2);
    assert_eq!(rig.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    rig.set(VIRTIO_MMIO_CONFIG + 4, 60);
    let status = balloon.status();
    assert_eq!((status.target_bytes, status.actual_bytes), (100 << 12, 60 << 12));
    let names = ["stats-vq", "free-page-hint", "version-1"];
    assert!(names.iter().all(|name| status.features.contains(name)), "{status:?}");
}

#[test]
fn inflating_gives_memory_back_and_leaves_marks_for_the_dirty_log() {
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        let mut rig = Rig::running(kind);
        for page in 100..110 {
            rig.mapped.write_obj(7_u64, GuestAddress(page << 12)).unwrap();
        }
        let log = SoftwareLog::new(&rig.mapped);
        log.start().unwrap();
        let mut dirty = PageSet::for_memory(&rig.memory);
        rig.offer_words(INFLATE, 0x2_0000, &[100, 101, 105]);
        log.collect(&mut dirty).unwrap();
        dirty = PageSet::for_memory(&rig.memory);
        rig.kick(INFLATE);
        rig.wait_used(INFLATE, 1);
        wait_until("interrupted", || rig.was_interrupted());
        assert_eq!(rig.get(VIRTIO_MMIO_INTERRUPT_STATUS), 1);
        assert_eq!(
            (100..107).filter(|page| rig.populated(*page)).collect::<Vec<_>>(),
            [102, 103, 104, 106]
        );
        log.collect(&mut dirty).unwrap();
        let written: Vec<_> = dirty.bitmap(SlotId(0)).runs().collect();
        assert_eq!(written, [(used(INFLATE) >> 12, 1)], "{kind}: the ring");
        assert_eq!(rig.device.handle().status().discarded_bytes, 3 << 12);
    }
}

#[derive(Default)]
struct Listener(Mutex<Vec<(&'static str, u64, u64)>>);

impl BalloonListener for Listener {
    fn hint(&self, run: PageRun, _: Option<u32>) {
        self.0.lock().unwrap().push(("hint", run.first, run.pages));
    }

    fn discarded(&self, run: PageRun) {
        self.0.lock().unwrap().push(("discarded", run.first, run.pages));
    }

    fn complete(&self) {
        self.0.lock().unwrap().push(("complete", 0, 0));
    }
}

#[test]
fn a_listener_hears_of_hints_and_discards() {
    let mut rig = Rig::running(MemoryKind::Private);
    let balloon = rig.device.handle();
    let listener = Arc::new(Listener::default());
    balloon.set_listener(Some(Arc::clone(&listener) as Arc<dyn BalloonListener>));
    let id = balloon.start_hints().unwrap();
    assert_eq!(rig.get(VIRTIO_MMIO_CONFIG + 8), id);
    rig.offer_words(FREE_PAGE, 0x2_0000, &[id]);
    rig.offer(FREE_PAGE, 200 << 12, 3 << 12, true);
    rig.offer_words(FREE_PAGE, 0x2_0100, &[0]);
    // One kick by a register, as if there were no ioeventfd.
    rig.set(VIRTIO_MMIO_QUEUE_NOTIFY, FREE_PAGE.into());
    rig.wait_used(FREE_PAGE, 3);
    rig.offer_words(INFLATE, 0x2_0200, &[150]);
    rig.kick(INFLATE);
    rig.wait_used(INFLATE, 1);
    let heard = listener.0.lock().unwrap().clone();
    assert_eq!(heard, [("hint", 200, 3), ("complete", 0, 0), ("discarded", 150, 1)]);
    let round = HintRound { id, ranges: 1, bytes: 3 << 12, complete: true };
    assert_eq!(balloon.status().hints, Some(round));
    balloon.finish_hints();
    assert_eq!(rig.get(VIRTIO_MMIO_CONFIG + 8), 1);
}

#[test]
fn a_quiet_device_touches_nothing_and_makes_up_for_it() {
    let mut rig = Rig::running(MemoryKind::Private);
    let balloon = rig.device.handle();
    let id = balloon.start_hints().unwrap();
    rig.device.run(false);
    rig.was_interrupted();
    rig.set(VIRTIO_MMIO_INTERRUPT_ACK, 3);
    rig.mapped.write_obj(7_u64, GuestAddress(100 << 12)).unwrap();
    rig.offer_words(INFLATE, 0x2_0000, &[100]);
    rig.offer_words(FREE_PAGE, 0x2_0100, &[id]);
    rig.offer(FREE_PAGE, 200 << 12, 3 << 12, true);
    rig.kick(INFLATE);
    rig.kick(FREE_PAGE);
    balloon.stop_hints();
    balloon.set_target(5 << 12).unwrap();
    assert!(!balloon.refresh_statistics(Duration::ZERO));
    // Not that it was slow: whoever has the lock has seen that it does not run.
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((rig.used(INFLATE), rig.used(FREE_PAGE)), (0, 0));
    assert!(rig.populated(100));
    assert!(!rig.was_interrupted());
    assert_eq!(rig.get(VIRTIO_MMIO_INTERRUPT_STATUS), 2);
    rig.device.run(true);
    assert!(rig.was_interrupted());
    rig.wait_used(INFLATE, 1);
    rig.wait_used(FREE_PAGE, 2);
    assert!(!rig.populated(100));
    assert_eq!(balloon.status().hints.unwrap().ranges, 0, "stopped before they were seen");
}

#[test]
fn a_device_that_has_moved_goes_on() {
    let mut rig = Rig::running(MemoryKind::Private);
    let id = rig.device.handle().start_hints().unwrap();
    rig.offer_words(STATISTICS, 0x2_0000, &[4, 0, 0]);
    rig.kick(STATISTICS);
    wait_until("statistics", || rig.device.handle().statistics().is_some());
    rig.device.run(false);
    // These come too late for the old device.
    rig.offer_words(FREE_PAGE, 0x2_0100, &[id]);
    rig.offer(FREE_PAGE, 200 << 12, 3 << 12, true);
    rig.kick(FREE_PAGE);

    let mut rig = rig.moved();
    assert_eq!((rig.get(STATUS), rig.get(VIRTIO_MMIO_CONFIG + 8)), (15, id));
    assert!(!rig.was_interrupted());
    rig.device.run(true);
    assert!(rig.was_interrupted(), "of DONE");
    assert_eq!(rig.get(VIRTIO_MMIO_CONFIG + 8), 1);
    rig.wait_used(FREE_PAGE, 2);
    let balloon = rig.device.handle();
    assert_eq!(balloon.status().hints, None);
    assert_eq!(rig.used(STATISTICS), 0, "held there, and here");

    // The held buffer is what statistics are asked for with.
    let asking = std::thread::spawn(move || balloon.refresh_statistics(PATIENCE));
    rig.wait_used(STATISTICS, 1);
    rig.offer(STATISTICS, 0x2_0200, 10, false);
    rig.mapped.write_slice(&[5, 0, 9, 0, 0, 0, 0, 0, 0, 0], GuestAddress(0x2_0200)).unwrap();
    rig.kick(STATISTICS);
    assert!(asking.join().unwrap());
    let status = rig.device.handle().status();
    assert_eq!(status.statistics.unwrap().into_iter().collect::<Vec<_>>(), [("total-memory", 9)]);
}

#[test]
fn a_state_that_is_no_balloons_is_refused() {
    let rig = Rig::running(MemoryKind::Private);
    rig.device.run(false);
    let mut out = StateWriter::new();
    rig.device.save(&mut out).unwrap();
    let state = out.finish();
    let reader = StateReader::parse(&state).unwrap();
    let good = String::from_utf8(reader.sections()[0].payload().to_vec()).unwrap();
    for (old, new) in [("\"size\":8", "\"size\":9"), ("\"hints\"", "\"hats\""), ("{", "")] {
        assert!(good.contains(old), "{good}");
        let mut out = StateWriter::new();
        out.section(&SECTIONS[0], 0, good.replace(old, new).as_bytes()).unwrap();
        let bytes = out.finish();
        let other = Rig::with_memory(Arc::clone(&rig.mapped));
        let error = other.device.load(&StateReader::parse(&bytes).unwrap()).unwrap_err();
        assert!(error.to_string().contains("section \"balloon\""), "{error}");
    }
}

#[test]
fn a_driver_that_lies_is_told_to_reset() {
    let rig = Rig::running(MemoryKind::Private);
    rig.mapped.write_obj(1000_u16, GuestAddress(available(INFLATE) + 2)).unwrap();
    rig.kick(INFLATE);
    wait_until("noticed", || rig.get(STATUS) == 15 | 64);
    wait_until("interrupted", || rig.was_interrupted());
    let status = rig.device.handle().status();
    assert!(status.needs_reset);
    assert!(status.warnings[0].contains("inflate queue is broken"), "{status:?}");
    rig.set(STATUS, 0);
    assert_eq!(rig.get(STATUS), 0);
}

/// A driver that makes a buffer with a hint available for each that is used.
struct Endless {
    mapped: Arc<GuestMemoryMmap<DirtyBitmap>>,
    offered: AtomicU16,
}

impl BalloonListener for Endless {
    fn hint(&self, _: PageRun, _: Option<u32>) {
        let index = self.offered.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        self.mapped.write_obj(index, GuestAddress(available(FREE_PAGE) + 2)).unwrap();
    }

    fn discarded(&self, _: PageRun) {}

    fn complete(&self) {}
}

#[test]
fn a_queue_without_end_leaves_the_others_their_turn() {
    let mut rig = Rig::running(MemoryKind::Private);
    let balloon = rig.device.handle();
    let id = balloon.start_hints().unwrap();
    rig.offer_words(FREE_PAGE, 0x2_0000, &[id]);
    rig.kick(FREE_PAGE);
    rig.wait_used(FREE_PAGE, 1);
    (0..SIZE).for_each(|_| rig.offer(FREE_PAGE, 0x4_0000, 0x1000, true));
    let offered = AtomicU16::new(rig.offered[usize::from(FREE_PAGE)]);
    balloon.set_listener(Some(Arc::new(Endless { mapped: Arc::clone(&rig.mapped), offered })));
    rig.kick(FREE_PAGE);
    let hints = || balloon.status().hints.unwrap().ranges;
    wait_until("hinted for ever", || hints() > 100);

    rig.offer(REPORTING, 0x5_0000, 0x1000, true);
    rig.kick(REPORTING);
    rig.wait_used(REPORTING, 1);
    rig.offer_words(INFLATE, 0x2_1000, &[0x60]);
    rig.kick(INFLATE);
    rig.wait_used(INFLATE, 1);
    let before = hints();
    wait_until("still hinted", || hints() > before);
    balloon.stop_hints();
    let last = hints();
    rig.device.run(false);
    assert_eq!(hints(), last, "none after it was stopped");
}
