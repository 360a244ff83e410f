//! Free page hinting, from the driver's and the embedder's side.

use crate::support::{Driver, Event, SIZE, warnings};
use vmferry_balloon::{BalloonError, Features, QueueKind, SavedPhase, Warning};

const FREE_PAGE: u16 = QueueKind::FreePage.number();
/// Offsets in the configuration space.
const COMMAND: u64 = 8;
const STOP: u32 = 0;
const DONE: u32 = 1;

const PLAIN: Features = Features::ALL.without(Features::EVENT_IDX);

fn hint(start: u64, bytes: u64, id: u32) -> Event {
    Event::Hint { start, bytes, id, poison: Some(0) }
}

fn without_interrupts(mut events: Vec<Event>) -> Vec<Event> {
    events.retain(|event| !matches!(event, Event::Used(_) | Event::ConfigChanged));
    events
}

#[test]
fn hints_count_between_the_command_and_stop() {
    let mut driver = Driver::new(PLAIN);
    let id = driver.device.start_hints().unwrap().number();
    assert_eq!((id, driver.config(COMMAND)), (2, 2));
    assert_eq!(driver.take_events(), [Event::ConfigChanged]);
    driver.hint(0x1000, 0x1000);
    driver.command(id);
    driver.hint(0x3000, 0x2000);
    driver.add(FREE_PAGE, &[(0x9000, 0x1000, true), (0xf_f000, 0x2000, true)]);
    driver.command(STOP);
    driver.hint(0x4000, 0x1000);
    // The same ID again, which is against the rules.
    driver.command(id);
    driver.hint(0x5000, 0x1000);
    let expected = [hint(0x3000, 0x2000, id), hint(0x9000, 0x1000, id), hint(0xf_f000, 0x1000, id)];
    let events = without_interrupts(driver.kick(FREE_PAGE));
    assert_eq!(events[..3], expected);
    assert!(matches!(events[3], Event::Warning(Warning::OutsideMemory { .. })));
    assert_eq!(events[4..], [Event::Complete(id)]);
    assert_eq!(driver.used(FREE_PAGE).len(), 8);
    assert_eq!(driver.device.awaited_hints(), None);
}

/// Section 5.5.6: a driver that negotiates `PAGE_POISON` relies on the content of its free pages,
/// zeros included.
#[test]
fn hints_contain_the_negotiated_poison_even_if_zero() {
    for (features, written, expected) in [
        (PLAIN, 0, Some(0)),
        (PLAIN, 0xaaaa_aaaa, Some(0xaaaa_aaaa)),
        (PLAIN.without(Features::PAGE_POISON), 0xaaaa_aaaa, None),
    ] {
        let mut driver = Driver::unnegotiated(Features::ALL);
        driver.negotiate(features);
        driver.device.write_config(12, &u32::to_le_bytes(written));
        driver.activate(&[0, 1, 2, 3, 4]);
        let id = driver.device.start_hints().unwrap().number();
        driver.command(id);
        driver.hint(0x3000, 0x1000);
        let expected = Event::Hint { start: 0x3000, bytes: 0x1000, id, poison: expected };
        assert_eq!(without_interrupts(driver.kick(FREE_PAGE)), [expected]);
    }
}

#[test]
fn hint_command_and_ranges_may_share_a_buffer() {
    let mut driver = Driver::new(PLAIN);
    let id = driver.device.start_hints().unwrap().number();
    let at = driver.place(&id.to_le_bytes());
    driver.add(FREE_PAGE, &[(at, 3, false), (at + 3, 1, false), (0x2800, 0x1800, true)]);
    let events = without_interrupts(driver.kick(FREE_PAGE));
    assert_eq!(events[0], hint(0x3000, 0x1000, id));
    assert!(matches!(warnings(&events)[..], [Warning::PartialPage { .. }]), "{events:?}");
}

#[test]
fn stale_commands_are_ignored_and_unexpected_ones_end_the_round() {
    let mut driver = Driver::new(PLAIN);
    let old = driver.device.start_hints().unwrap().number();
    driver.command(old);
    driver.hint(0x1000, 0x1000);
    // Before the device has processed the queue.
    driver.device.finish_hints();
    let new = driver.device.start_hints().unwrap().number();
    assert_ne!(old, new);
    driver.command(STOP);
    driver.command(new);
    driver.hint(0x2000, 0x1000);
    assert_eq!(without_interrupts(driver.kick(FREE_PAGE)), [hint(0x2000, 0x1000, new)]);
    driver.command(old);
    driver.hint(0x3000, 0x1000);
    let strange = Warning::UnexpectedCommand { command: old, current: new };
    let events = without_interrupts(driver.kick(FREE_PAGE));
    assert_eq!(events, [Event::Warning(strange), Event::Complete(new)]);
    // Commands of other lengths are ignored.
    let id = driver.device.start_hints().unwrap().number();
    driver.send(FREE_PAGE, &u64::from(id).to_le_bytes());
    driver.send(FREE_PAGE, &id.to_le_bytes()[..3]);
    driver.hint(0x4000, 0x1000);
    let events = without_interrupts(driver.kick(FREE_PAGE));
    let bad = Warning::BadLength { queue: QueueKind::FreePage, bytes: 8 };
    assert_eq!(events, [Event::Warning(bad)]);
}

#[test]
fn command_outside_memory_is_only_warned_about() {
    let mut driver = Driver::new(PLAIN);
    let id = driver.device.start_hints().unwrap().number();
    driver.add(FREE_PAGE, &[(0x10_0000, 4, false)]);
    driver.hint(0x4000, 0x1000);
    let events = without_interrupts(driver.kick(FREE_PAGE));
    assert!(
        matches!(events[..], [Event::Warning(Warning::OutsideMemory { bytes: 4, .. })]),
        "{events:?}"
    );
    assert_eq!(driver.device.awaited_hints().map(|id| id.number()), Some(id));
}

#[test]
fn stop_hints_returns_all_buffers() {
    let mut driver = Driver::new(PLAIN);
    let id = driver.device.start_hints().unwrap().number();
    driver.command(id);
    assert_eq!(without_interrupts(driver.kick(FREE_PAGE)), []);
    driver.used(FREE_PAGE);
    for _ in 0..SIZE {
        driver.hint(0x3000, 0x1000);
    }
    driver.device.stop_hints();
    assert_eq!(driver.take_events(), [Event::ConfigChanged, Event::Used(FREE_PAGE)]);
    assert_eq!(driver.used(FREE_PAGE).len(), usize::from(SIZE));
    assert_eq!(driver.config(COMMAND), STOP);
    driver.hint(0x3000, 0x1000);
    driver.command(id);
    driver.hint(0x3000, 0x1000);
    assert_eq!(without_interrupts(driver.kick(FREE_PAGE)), []);
    driver.device.finish_hints();
    assert_eq!(driver.config(COMMAND), DONE);

    // For a paused guest: guest memory is not accessed, and nothing is reported later either.
    let id = driver.device.start_hints().unwrap().number();
    driver.command(id);
    driver.hint(0x3000, 0x1000);
    driver.used(FREE_PAGE);
    driver.device.withdraw_hints();
    assert_eq!(driver.used(FREE_PAGE).len(), 0);
    assert_eq!(without_interrupts(driver.kick(FREE_PAGE)), []);
    assert_eq!(driver.used(FREE_PAGE).len(), 2);
}

#[test]
fn start_hints_needs_a_driver_with_hints() {
    let mut driver = Driver::unnegotiated(Features::ALL);
    assert_eq!(driver.device.start_hints(), None);
    driver.negotiate(PLAIN.without(Features::FREE_PAGE_HINT));
    driver.activate(&[0, 1, 2, 4]);
    assert_eq!(driver.device.start_hints(), None);
    assert_eq!(driver.config(COMMAND), 0);
    assert_eq!(driver.take_events(), []);
}

#[test]
fn reset_ends_the_round() {
    let mut driver = Driver::new(PLAIN);
    let id = driver.device.start_hints().unwrap().number();
    driver.command(id);
    driver.hint(0x3000, 0x1000);
    driver.device.reset();
    assert_eq!(without_interrupts(driver.kick(FREE_PAGE)), [Event::Complete(id)]);
    driver.negotiate(PLAIN);
    driver.activate(&[0, 1, 2, 3, 4]);
    assert_eq!(driver.config(COMMAND), STOP);
    // The same buffers, which the new queue processes again.
    assert_eq!(without_interrupts(driver.kick(FREE_PAGE)), []);
    assert!(driver.device.start_hints().unwrap().number() > id);
}

#[test]
fn moved_device_sends_done_at_the_destination() {
    let mut driver = Driver::new(Features::ALL);
    let id = driver.device.start_hints().unwrap().number();
    driver.command(id);
    driver.hint(0x3000, 0x1000);
    assert_eq!(without_interrupts(driver.kick(FREE_PAGE)), [hint(0x3000, 0x1000, id)]);
    assert_eq!(driver.used(FREE_PAGE), [0, 1]);
    driver.hint(0x4000, 0x1000);
    driver.move_device();
    // No buffer is lost or used twice.
    driver.device.restored_after_migration();
    assert_eq!((driver.config(COMMAND), driver.take_events()), (DONE, vec![Event::ConfigChanged]));
    assert_eq!(without_interrupts(driver.kick(FREE_PAGE)), []);
    assert_eq!(driver.used(FREE_PAGE), [2]);
    driver.device.restored_after_migration();
    assert_eq!(driver.take_events(), [], "said already");
    assert_eq!(driver.device.start_hints().unwrap().number(), id + 1);
}

#[test]
fn load_refuses_impossible_states() {
    let mut driver = Driver::new(PLAIN);
    driver.device.start_hints().unwrap();
    let good = driver.device.save();
    type Change = fn(&mut vmferry_balloon::BalloonState);
    let changes: [(&str, Change); 12] = [
        ("offered", |state| state.offered = Features::STATS_VQ),
        ("features", |state| state.negotiated = Some(Features(1 << 50))),
        ("active", |state| state.negotiated = None),
        ("phase", |state| state.hints.phase = SavedPhase::Idle),
        ("hints", |state| state.negotiated = Some(PLAIN.without(Features::FREE_PAGE_HINT))),
        ("twice", |state| state.queues.push(state.queues[0].clone())),
        ("entries", |state| state.queues[1].size = 3),
        ("entries", |state| state.queues[1].max_size = 32),
        ("memory", |state| state.queues[1].used = 0x18_0000),
        ("align", |state| state.queues[1].descriptors = 3),
        ("buffer 16", |state| state.statistics_head = Some(SIZE)),
        ("number 9", |state| state.queues[1].index = 9),
    ];
    for (what, change) in changes {
        let mut state = good.clone();
        change(&mut state);
        let restored = vmferry_balloon::Balloon::restore(
            driver.config,
            std::sync::Arc::clone(&driver.memory),
            driver.host.clone(),
            driver.host.clone(),
            &state,
        );
        let error = restored.err().unwrap_or_else(|| panic!("{what}"));
        assert!(
            matches!(error, BalloonError::State(_) | BalloonError::Features { .. }),
            "{what}: {error}"
        );
    }
}
