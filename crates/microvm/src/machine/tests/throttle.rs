//! Throttled guests.

use super::*;

/// A workload that never rests.
const BUSY: &str = "ticks fill=4,incompressible hot=8,random";

fn visits(report: &Report) -> u64 {
    report.pages_written + report.pages_checked
}

/// Pages that the guest visits in a second, by its own report.
fn speed(machine: &Machine) -> f64 {
    let visits = || visits(&machine.report().unwrap());
    let (begun, before) = (Instant::now(), visits());
    std::thread::sleep(Duration::from_millis(100));
    (visits() - before) as f64 / begun.elapsed().as_secs_f64()
}

/// The throttle of the slow guests. On a busy host, the scheduler prefers a guest that sleeps most
/// of the time to one that never sleeps. So a guest with a tenth of the time may do as much work as
/// one without a throttle, but a guest with a hundredth cannot.
const MAX_THROTTLE: u8 = 99;

/// Asserts that the guest after `slow` has less than half the speed of the guest after `free`.
/// Measures both in turn, so that other load on the host affects both, and takes more turns while
/// the difference is unclear.
fn compare(what: &str, mut free: impl FnMut() -> f64, mut slow: impl FnMut() -> f64) {
    let (mut free_sum, mut slow_sum, mut turns) = (0.0, 0.0, 0);
    while turns < 4 || (slow_sum >= free_sum / 2.0 && turns < 40) {
        free_sum += free();
        slow_sum += slow();
        turns += 1;
    }
    let percent = slow_sum / free_sum * 100.0;
    eprintln!("{what}: {percent:.1} % of its speed, after {turns} turns");
    assert!(slow_sum < free_sum / 2.0, "{what}: {percent:.1} % of its speed, after {turns} turns");
}

#[test]
fn throttle_slows_the_guest_until_it_is_lifted() {
    for kind in KINDS {
        for vcpus in [1, 2] {
            let machine = std::cell::RefCell::new(started(config(kind, vcpus, BUSY)));
            let at = |percent| {
                machine.borrow_mut().throttle(percent).unwrap();
                speed(&machine.borrow())
            };
            compare(&format!("{kind}, {vcpus} vCPUs"), || at(0), || at(MAX_THROTTLE));
            // The throttle stays in force across a pause.
            let after_a_pause = |percent| {
                let mut machine = machine.borrow_mut();
                machine.throttle(percent).unwrap();
                machine.pause().unwrap();
                machine.resume().unwrap();
                speed(&machine)
            };
            let what = format!("{kind}, {vcpus} vCPUs, after a pause");
            compare(&what, || after_a_pause(0), || after_a_pause(MAX_THROTTLE));
            let mut machine = machine.into_inner();
            machine.throttle(0).unwrap();
            assert_eq!(check_all(&machine).corruptions, 0);
        }
    }
}

#[test]
fn throttled_guest_pauses_at_any_time() {
    for kind in KINDS {
        let mut machine = started(config(kind, 3, BUSY));
        for turn in 0..60 {
            // Changes the throttle of running and paused guests.
            machine.throttle([99, 50, 0, 90][turn % 4]).unwrap();
            // Pauses sometimes in a slice and sometimes in a rest.
            std::thread::sleep(Duration::from_micros(turn as u64 * 311));
            machine.pause().unwrap();
            let before = machine.report().unwrap();
            machine.throttle([99, 0, 20][turn % 3]).unwrap();
            // Longer than a period: the end of a rest must not run the guest.
            std::thread::sleep(Duration::from_millis(12));
            assert_eq!(machine.report().unwrap(), before, "a paused guest ran");
            machine.resume().unwrap();
            wait_for(&machine, "went on", |now| visits(now) > visits(&before));
        }
        machine.throttle(0).unwrap();
        assert_eq!(check_all(&machine).corruptions, 0);
    }
}

#[test]
fn throttled_guest_ends_at_any_time() {
    for kind in KINDS {
        for turn in 0..10 {
            let mut machine = started(config(kind, 2, "ticks hot=1,random"));
            let mapped = Arc::downgrade(&machine.mapped);
            machine.throttle(99).unwrap();
            std::thread::sleep(Duration::from_millis(turn));
            if turn % 3 == 0 {
                machine.pause().unwrap();
            }
            drop(machine);
            assert!(mapped.upgrade().is_none(), "a thread of {kind} holds the memory");
        }
    }
}

#[test]
fn throttle_does_not_move_with_the_guest() {
    for kind in KINDS {
        let machine = std::cell::RefCell::new(started(config(kind, 2, BUSY)));
        let throttled = || {
            machine.borrow_mut().throttle(MAX_THROTTLE).unwrap();
            speed(&machine.borrow())
        };
        let moved = || {
            let mut source = machine.borrow_mut();
            source.pause().unwrap();
            let mut next = Machine::new(config(kind, 2, BUSY)).unwrap();
            copy(&source.memory().populated().unwrap(), source.memory(), next.memory());
            next.load(&source.save().unwrap()).unwrap();
            *source = next;
            let before = source.report().unwrap().rounds;
            source.resume().unwrap();
            // The first access to each page of new memory is slow.
            wait_for(&source, "populated again", |now| now.rounds >= before + 2);
            speed(&source)
        };
        throttled();
        compare(&format!("{kind}, against the one that has moved"), moved, throttled);
        let mut machine = machine.into_inner();
        machine.throttle(0).unwrap();
        assert_eq!(check_all(&machine).corruptions, 0);
    }
}

#[test]
fn throttle_is_lifted_when_the_migration_ends() {
    for kind in KINDS {
        let machine = Machine::shared(config(kind, 2, BUSY)).unwrap();
        machine.lock().start().unwrap();
        wait_for(&machine.lock(), "populated", |report| report.populated);
        let migrating = || MigratingMachine::new(Arc::clone(&machine)).unwrap();
        let speed = || speed(&machine.lock());
        let throttled = || {
            let mut migrating = migrating();
            migrating.throttle(MAX_THROTTLE).unwrap();
            speed()
        };
        let dropped = || {
            migrating().throttle(MAX_THROTTLE).unwrap();
            speed()
        };
        compare(&format!("{kind}, against one that was dropped"), dropped, throttled);
        let resumed = || {
            let mut migrating = migrating();
            migrating.throttle(MAX_THROTTLE).unwrap();
            migrating.pause().unwrap();
            migrating.resume().unwrap();
            speed()
        };
        compare(&format!("{kind}, against one that failed paused"), resumed, throttled);
        assert_eq!(check_all(&machine.lock()).corruptions, 0);
    }
}

#[test]
fn throttle_refuses_bad_values_and_machines_that_are_not_started() {
    for kind in KINDS {
        let mut machine = Machine::new(config(kind, 1, "ticks")).unwrap();
        let text = machine.throttle(10).unwrap_err().to_string();
        assert_eq!(text, "the guest is not started, and must be running");
        machine.throttle(0).unwrap();
        machine.start().unwrap();
        let text = machine.throttle(100).unwrap_err().to_string();
        assert!(text.contains("throttle") && text.contains("0 to 99"), "{text}");
        machine.throttle(99).unwrap();
    }
}
