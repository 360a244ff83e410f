//! The device from the point of view of a driver and an embedder.

use crate::support::{self, Driver, Event, SIZE, available, queue, warnings};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};
use vmferry_balloon::{BalloonError, Features, Progress, QueueKind, Warning};

const INFLATE: u16 = QueueKind::Inflate.number();
const DEFLATE: u16 = QueueKind::Deflate.number();
const STATISTICS: u16 = QueueKind::Statistics.number();
const REPORTING: u16 = QueueKind::Reporting.number();

/// All features except EVENT_IDX.
const PLAIN: Features = Features::ALL.without(Features::EVENT_IDX);

#[test]
fn inflate_discards_neighbors_together_and_deflate_reports_them() {
    let mut driver = Driver::new(PLAIN);
    let head = driver.send_numbers(INFLATE, &[7, 3, 4, 5, 9, 8]);
    let discards = [Event::Discard(0x3000, 0x3000), Event::Discard(0x7000, 0x3000)];
    assert_eq!(driver.kick(INFLATE), [&discards[..], &[Event::Used(INFLATE)]].concat());
    assert_eq!(driver.used(INFLATE), [head]);
    driver.send_numbers(DEFLATE, &[3, 4]);
    assert_eq!(driver.kick(DEFLATE), [Event::Deflated(0x3000, 0x2000), Event::Used(DEFLATE)]);
}

#[test]
fn inflate_accepts_a_split_array_and_survives_an_invalid_one() {
    let mut driver = Driver::new(PLAIN);
    let at = driver.place(&[3, 0, 0, 0, 4, 0, 0, 0, 5, 0]);
    // The second number spans both descriptors, and two bytes are left over.
    driver.add(INFLATE, &[(at, 6, false), (at + 6, 4, false)]);
    let events = driver.kick(INFLATE);
    assert_eq!(events[1], Event::Discard(0x3000, 0x2000));
    assert_eq!(warnings(&events), [&Warning::BadLength { queue: QueueKind::Inflate, bytes: 10 }]);
    // In the hole, at the very end, and beyond all memory.
    driver.send_numbers(INFLATE, &[0x100, 0x1ff, 0x200, u32::MAX]);
    let events = driver.kick(INFLATE);
    assert!(events.contains(&Event::Discard(0x20_0000, 0x1000)), "{events:?}");
    assert!(matches!(warnings(&events)[..], [Warning::OutsideMemory { .. }]), "{events:?}");
    // The same mistake again is not reported.
    driver.send_numbers(INFLATE, &[u32::MAX]);
    assert_eq!(driver.kick(INFLATE), [Event::Used(INFLATE)]);
    // An array that is itself not in guest memory.
    driver.add(INFLATE, &[(0x18_0000, 8, false)]);
    assert_eq!(driver.kick(INFLATE), [Event::Used(INFLATE)]);
    // A device-writable descriptor, which this queue does not have.
    driver.add(INFLATE, &[(at, 4, true)]);
    let events = driver.kick(INFLATE);
    assert_eq!(warnings(&events), [&Warning::WrongDirection { queue: QueueKind::Inflate }]);
    assert_eq!(driver.used(INFLATE).len(), 5);
    assert!(!driver.device.needs_reset());
}

#[test]
fn failed_discard_is_warned_once() {
    let mut driver = Driver::new(PLAIN);
    *driver.host.discard_fails.lock().unwrap() = true;
    driver.send_numbers(INFLATE, &[3, 5]);
    let events = driver.kick(INFLATE);
    let kind = std::io::ErrorKind::OutOfMemory;
    let failed = Warning::DiscardFailed { start: GuestAddress(0x3000), bytes: 0x1000, kind };
    assert_eq!(warnings(&events), [&failed]);
    assert_eq!(driver.used(INFLATE).len(), 1);
}

#[test]
fn reported_pages_are_discarded_unless_poisoned() {
    let mut driver = Driver::new(PLAIN);
    driver.add(REPORTING, &[(0x5000, 0x3000, true), (0x20_0000, 0x1000, true)]);
    let expected = [Event::Discard(0x5000, 0x3000), Event::Discard(0x20_0000, 0x1000)];
    assert_eq!(driver.kick(REPORTING)[..2], expected);

    let mut driver = Driver::unnegotiated(Features::ALL);
    driver.negotiate(PLAIN);
    driver.device.write_config(12, &0xaaaa_aaaa_u32.to_le_bytes());
    driver.activate(&[0, 1, 2, 3, 4]);
    // Too late, so it is ignored.
    driver.device.write_config(12, &[0; 4]);
    assert_eq!(driver.config(12), 0xaaaa_aaaa);
    driver.add(REPORTING, &[(0x5000, 0x3000, true)]);
    assert_eq!(driver.kick(REPORTING), [Event::Used(REPORTING)]);
    // The guest initializes pages when they leave the balloon, so inflating still discards them.
    driver.send_numbers(INFLATE, &[3]);
    assert_eq!(driver.kick(INFLATE)[0], Event::Discard(0x3000, 0x1000));
}

#[test]
fn statistics_are_requested_and_received() {
    let mut driver = Driver::new(PLAIN);
    assert!(!driver.device.request_statistics(), "there is no buffer yet");
    let entry = |tag: u16, value: u64| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();
    let first = [entry(4, 1 << 30), entry(500, 1), entry(15, 3)].concat();
    let head = driver.send(STATISTICS, &first);
    let events = driver.kick(STATISTICS);
    let [Event::Statistics(statistics)] = &events[..] else { panic!("{events:?}") };
    let named: Vec<_> = statistics.named().collect();
    assert_eq!(named, [("free-memory", 1 << 30), ("direct-reclaims", 3)]);
    assert_eq!(driver.used(STATISTICS).len(), 0, "it is kept");

    // The kept buffer is part of the state.
    driver.move_device();
    assert_eq!(driver.device.statistics().unwrap().get(4), Some(1 << 30));
    assert!(driver.device.request_statistics());
    assert_eq!((driver.used(STATISTICS), driver.take_events()), (vec![head], vec![Event::Used(2)]));
    assert!(!driver.device.request_statistics(), "the driver has not answered");

    // A driver that sends a second one gets the first back.
    let second = driver.send(STATISTICS, &entry(5, 9));
    let third = driver.send(STATISTICS, &entry(5, 10)[..9]);
    let events = driver.kick(STATISTICS);
    let bad = Warning::BadLength { queue: QueueKind::Statistics, bytes: 9 };
    assert_eq!(warnings(&events), [&bad, &Warning::SecondStatistics]);
    assert_eq!(driver.used(STATISTICS), [second]);
    assert!(driver.device.request_statistics());
    assert_eq!(driver.used(STATISTICS), [third]);
}

#[test]
fn config_writes_are_limited_to_writable_fields() {
    let mut driver = Driver::unnegotiated(Features::ALL);
    driver.device.set_target(0x0102_0304);
    driver.negotiate(PLAIN.without(Features::PAGE_POISON));
    driver.device.write_config(0, &[0xff; 32]);
    assert_eq!([0, 4, 8, 12, 16].map(|at| driver.config(at)), [0x0102_0304, u32::MAX, 0, 0, 0]);
    driver.device.write_config(6, &[0, 1, 2, 3]);
    assert_eq!(driver.device.actual_pages(), 0x0100_ffff);
    let mut bytes = [9; 3];
    driver.device.read_config(3, &mut bytes);
    assert_eq!(bytes, [1, 0xff, 0xff]);
    driver.device.read_config(u64::MAX, &mut bytes);
    driver.device.write_config(u64::MAX, &bytes);
    assert_eq!(bytes, [0; 3]);
    assert_eq!(driver.take_events(), [], "nobody listens yet");
    driver.activate(&[0, 1]);
    driver.device.set_target(5);
    driver.device.set_target(5);
    assert_eq!(driver.take_events(), [Event::ConfigChanged]);
}

#[test]
fn unoffered_features_are_refused() {
    let mut driver = Driver::unnegotiated(Features::STATS_VQ.with(Features(1 << 40)));
    let offered = Features::STATS_VQ.with(Features::VERSION_1);
    assert_eq!(driver.device.offered(), offered);
    for asked in
        [Features::STATS_VQ, offered.with(Features::PAGE_POISON), offered.with(Features(1 << 40))]
    {
        let refused = Err(BalloonError::Features { asked, offered });
        assert_eq!(driver.device.negotiate(asked), refused);
    }
    assert_eq!(driver.device.activate(vec![]), Err(BalloonError::NotNegotiated));
    assert_eq!(
        [0, 1, 2, 3].map(|index| driver.device.max_queue_size(index)),
        [SIZE, SIZE, SIZE, 0]
    );
}

#[test]
fn queues_numbered_by_linux_without_gaps_work() {
    let mut driver = Driver::unnegotiated(Features::ALL);
    driver.negotiate(Features::PAGE_REPORTING);
    driver.activate(&[0, 1, 2]);
    driver.add(2, &[(0x5000, 0x1000, true)]);
    assert_eq!(driver.kick(2), [Event::Discard(0x5000, 0x1000), Event::Used(2)]);
    driver.move_device();
    driver.add(2, &[(0x6000, 0x1000, true)]);
    assert_eq!(driver.kick(2)[0], Event::Discard(0x6000, 0x1000));
}

#[test]
fn interrupts_follow_the_drivers_flags_and_event_index() {
    let mut driver = Driver::new(PLAIN);
    driver.memory.write_obj(1_u16, GuestAddress(available(INFLATE))).unwrap();
    driver.send_numbers(INFLATE, &[]);
    assert_eq!(driver.kick(INFLATE), []);
    assert_eq!(driver.used(INFLATE).len(), 1);

    let mut driver = Driver::new(Features::ALL);
    // No interrupt before the second buffer is used.
    let used_event = available(INFLATE) + 4 + 2 * u64::from(SIZE);
    driver.memory.write_obj(1_u16, GuestAddress(used_event)).unwrap();
    driver.send_numbers(INFLATE, &[]);
    assert_eq!(driver.kick(INFLATE), []);
    driver.send_numbers(INFLATE, &[]);
    assert_eq!(driver.kick(INFLATE), [Event::Used(INFLATE)]);
    // The device also tells the driver at which of its buffers to kick next.
    let avail_event = support::used(INFLATE) + 4 + 8 * u64::from(SIZE);
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(avail_event)).unwrap(), 2);
}

#[test]
fn process_does_bounded_work_per_call() {
    let mut driver = Driver::new(PLAIN);
    // One call processes at most 16384 numbers of a buffer; two buffers take two calls.
    let at = driver.place(&[3, 0, 0, 0].repeat(16385));
    for _ in 0..2 {
        driver.add(INFLATE, &[(at, 16385 * 4, false)]);
    }
    assert_eq!(driver.device.process(INFLATE), Progress::More);
    assert_eq!(driver.used(INFLATE).len(), 1);
    assert_eq!(driver.device.process(INFLATE), Progress::Done);
    assert_eq!(driver.used(INFLATE).len(), 1);
    let events = driver.take_events();
    assert!(
        matches!(warnings(&events)[..], [Warning::BadLength { bytes: 65540, .. }]),
        "{events:?}"
    );
}

#[test]
fn broken_chains_are_returned_without_effect() {
    let mut driver = Driver::new(PLAIN);
    let read = |next: u16| (0x3000_u64, 0x1000_u32, 1_u16, next);
    // A loop of two, a link outside the table, a loop of one.
    for (place, (start, bytes, flags, next)) in
        [(0, read(1)), (1, read(0)), (2, read(SIZE)), (3, read(3))]
    {
        driver.write_descriptor(REPORTING, place, start, bytes, flags | 2, next);
    }
    // A device-readable descriptor after a device-writable one.
    driver.write_descriptor(REPORTING, 4, 0x3000, 0x1000, 3, 5);
    driver.write_descriptor(REPORTING, 5, 0x3000, 0x1000, 0, 0);
    // An unreadable indirect table, a nested one, and one without entries.
    driver.write_descriptor(REPORTING, 6, 0x18_0000, 32, 4, 0);
    let inner = driver.place(&[&0x3000_u64.to_le_bytes()[..], &[16, 0, 0, 0, 4, 0, 0, 0]].concat());
    driver.write_descriptor(REPORTING, 7, inner, 16, 4, 0);
    driver.write_descriptor(REPORTING, 8, inner, 0, 4, 0);
    let heads = [0, 2, 3, 4, 6, 7, 8];
    heads.iter().for_each(|head| driver.offer(REPORTING, *head));
    let events = driver.kick(REPORTING);
    assert!(
        matches!(events[..], [Event::Warning(Warning::BadChain { .. }), Event::Used(_)]),
        "{events:?}"
    );
    assert_eq!(driver.used(REPORTING), heads);
    assert!(!driver.device.needs_reset());

    // A valid indirect table, and one with more entries than the queue.
    let entry = |flags: u8, next: u8| {
        [&0x5000_u64.to_le_bytes()[..], &[0, 0x10, 0, 0, flags, 0, next, 0]].concat()
    };
    let table = driver.place(&[entry(3, 1), entry(2, 0)].concat());
    driver.write_descriptor(REPORTING, 9, table, 32, 4, 0);
    let all: Vec<u8> = (1..=SIZE as u8 + 1).flat_map(|next| entry(3, next)).collect();
    let long = driver.place(&[all, entry(2, 0)].concat());
    driver.write_descriptor(REPORTING, 10, long, (u32::from(SIZE) + 2) * 16, 4, 0);
    driver.offer(REPORTING, 9);
    driver.offer(REPORTING, 10);
    let discard = Event::Discard(0x5000, 0x1000);
    assert_eq!(driver.kick(REPORTING), [discard.clone(), discard, Event::Used(REPORTING)]);
}

#[test]
fn invalid_ring_breaks_only_its_queue() {
    for fault in ["too far ahead", "head outside", "rings outside"] {
        let mut driver = Driver::unnegotiated(Features::ALL);
        driver.negotiate(PLAIN);
        if fault == "rings outside" {
            let mut outside = queue(INFLATE);
            outside.set_used_ring_address(Some(0x18_0000), Some(0));
            driver
                .device
                .activate(vec![(INFLATE, outside), (REPORTING, queue(REPORTING))])
                .unwrap();
        } else {
            driver.activate(&[0, 1, 2, 3, 4]);
        }
        match fault {
            "too far ahead" => driver.set_available(INFLATE, SIZE + 1),
            "head outside" => driver.offer(INFLATE, SIZE),
            _ => {}
        }
        let events = driver.kick(INFLATE);
        assert!(
            matches!(warnings(&events)[..], [Warning::QueueBroken { .. }]),
            "{fault}: {events:?}"
        );
        assert!(events.contains(&Event::ConfigChanged), "{fault}");
        assert!(driver.device.needs_reset(), "{fault}");
        assert_eq!(driver.device.start_hints(), None, "{fault}");
        driver.move_device();
        driver.send_numbers(INFLATE, &[3]);
        assert_eq!(driver.kick(INFLATE), [], "{fault}: it is not looked at");
        driver.add(REPORTING, &[(0x5000, 0x1000, true)]);
        assert_eq!(driver.kick(REPORTING)[0], Event::Discard(0x5000, 0x1000), "{fault}");
        driver.device.reset();
        assert!(!driver.device.needs_reset(), "{fault}");
    }
}

#[test]
fn disabled_queue_is_not_used() {
    let mut driver = Driver::new(PLAIN);
    driver.send(STATISTICS, &[]);
    driver.kick(STATISTICS);
    driver.device.disable_queue(STATISTICS);
    assert!(!driver.device.request_statistics());
    driver.device.disable_queue(INFLATE);
    driver.device.disable_queue(77);
    driver.send_numbers(INFLATE, &[3]);
    assert_eq!(driver.kick(INFLATE), []);
    assert_eq!(driver.used(INFLATE).len(), 0);
}
