//! The device with a driver that the test plays.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use virtio_bindings::virtio_mmio::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmferry_balloon::Features;
use vmferry_dirty::{DirtyBitmap, DirtyLog, SoftwareLog};
use vmferry_memory::{MemoryKind, PageRun, PageSet, SlotId};

use self::rig::{
    FREE_PAGE, INFLATE, PAGES, PATIENCE, REPORTING, Rig, SIZE, STATISTICS, STATUS, available, used,
    wait_until,
};
use super::*;
use crate::state::{StateReader, StateWriter};

mod golden;
mod rig;

#[test]
fn registers_match_the_specification() {
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
    // Write-only and unknown registers read as zeros.
    assert_eq!([0x14, 0x38, 0x50, 0x64, 0x80, 0xf0, 0x102].map(|at| rig.get(at)), [0; 7]);
    // Accesses of other sizes than 32 bits do not reach registers.
    let mut bytes = [7; 8];
    rig.wiring.device.read(0, &mut bytes[..1]);
    rig.wiring.device.read(0, &mut bytes[2..]);
    assert_eq!(bytes, [0, 7, 0, 0, 0, 0, 0, 0]);
    rig.wiring.device.write(STATUS.into(), &[1]);
    rig.wiring.device.write(STATUS.into(), &[1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.get(STATUS), 0);
}

#[test]
fn driver_initialization_follows_the_specification() {
    let rig = Rig::new(MemoryKind::Private);
    // The device refuses features without VERSION_1, and features that it does not offer.
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
    // A queue size that is not a power of two, an unaligned address, and a queue that does not
    // exist.
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
    // The driver has started, so no other queue can become ready.
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
fn set_target_changes_the_configuration() {
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
fn inflate_discards_memory_and_marks_only_the_ring_dirty() {
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
fn listener_receives_hints_and_discards() {
    let mut rig = Rig::running(MemoryKind::Private);
    let balloon = rig.device.handle();
    let listener = Arc::new(Listener::default());
    balloon.set_listener(Some(Arc::clone(&listener) as Arc<dyn BalloonListener>));
    let id = balloon.start_hints().unwrap();
    assert_eq!(rig.get(VIRTIO_MMIO_CONFIG + 8), id);
    rig.offer_words(FREE_PAGE, 0x2_0000, &[id]);
    rig.offer(FREE_PAGE, 200 << 12, 3 << 12, true);
    rig.offer_words(FREE_PAGE, 0x2_0100, &[0]);
    // A kick by the register, as without an ioeventfd.
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
fn paused_device_touches_nothing_and_catches_up() {
    let mut rig = Rig::running(MemoryKind::Private);
    let balloon = rig.device.handle();
    let id = balloon.start_hints().unwrap();
    rig.device.pause();
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
    // A device that still ran would process the kicks in this time.
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((rig.used(INFLATE), rig.used(FREE_PAGE)), (0, 0));
    assert!(rig.populated(100));
    assert!(!rig.was_interrupted());
    assert_eq!(rig.get(VIRTIO_MMIO_INTERRUPT_STATUS), 2);
    rig.device.resume();
    assert!(rig.was_interrupted());
    rig.wait_used(INFLATE, 1);
    rig.wait_used(FREE_PAGE, 2);
    assert!(!rig.populated(100));
    assert_eq!(balloon.status().hints.unwrap().ranges, 0, "stopped before they were seen");
}

#[test]
fn moved_device_continues() {
    let mut rig = Rig::running(MemoryKind::Private);
    let id = rig.device.handle().start_hints().unwrap();
    rig.offer_words(STATISTICS, 0x2_0000, &[4, 0, 0]);
    rig.kick(STATISTICS);
    wait_until("statistics", || rig.device.handle().statistics().is_some());
    rig.device.pause();
    // The old device is paused, so it does not process these.
    rig.offer_words(FREE_PAGE, 0x2_0100, &[id]);
    rig.offer(FREE_PAGE, 200 << 12, 3 << 12, true);
    rig.kick(FREE_PAGE);

    let mut rig = rig.moved();
    assert_eq!((rig.get(STATUS), rig.get(VIRTIO_MMIO_CONFIG + 8)), (15, id));
    assert!(!rig.was_interrupted());
    rig.device.resume();
    assert!(rig.was_interrupted(), "of DONE");
    assert_eq!(rig.get(VIRTIO_MMIO_CONFIG + 8), 1);
    rig.wait_used(FREE_PAGE, 2);
    let balloon = rig.device.handle();
    assert_eq!(balloon.status().hints, None);
    assert_eq!(rig.used(STATISTICS), 0, "the new device holds the buffer, too");

    // The device requests statistics by returning the buffer that it holds.
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
fn load_refuses_an_invalid_state() {
    let rig = Rig::running(MemoryKind::Private);
    rig.device.pause();
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
fn hostile_driver_is_asked_to_reset() {
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

/// A driver that makes another hint available for each used one.
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
fn endless_queue_does_not_starve_the_others() {
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
    rig.device.pause();
    assert_eq!(hints(), last, "none after it was stopped");
}
