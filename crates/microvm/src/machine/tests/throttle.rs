//! Guests that lose a part of their vCPUs' time.

use super::*;

/// As fast as the vCPUs can.
const BUSY: &str = "ticks fill=4,incompressible hot=8,random";

fn visits(report: &Report) -> u64 {
    report.pages_written + report.pages_checked
}

/// Pages that the guest visits in a second, as it says itself.
fn speed(machine: &Machine) -> f64 {
    let visits = || visits(&machine.report().unwrap());
    let (begun, before) = (Instant::now(), visits());
    std::thread::sleep(Duration::from_millis(100));
    (visits() - before) as f64 / begun.elapsed().as_secs_f64()
}

/// What is taken from the slow ones. On a busy host a guest that sleeps most of the time is let run
/// whenever it wants, and one that never sleeps is not: a tenth of the time may be as much work as the
/// free one gets done there, but a hundredth is not.
const MOST: u8 = 99;

/// Compares a guest that `free` has let run with one that `slow` has throttled: by turns, so that what
/// else the host does weighs on both, and for as many turns as it takes to tell them apart. Two that are
/// equally fast are told apart by none.
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
fn a_throttled_guest_does_less_until_the_throttle_is_lifted() {
    for kind in KINDS {
        for vcpus in [1, 2] {
            let machine = std::cell::RefCell::new(started(config(kind, vcpus, BUSY)));
            let at = |percent| {
                machine.borrow_mut().throttle(percent).unwrap();
                speed(&machine.borrow())
            };
            compare(&format!("{kind}, {vcpus} vCPUs"), || at(0), || at(MOST));
            // Over a pause, too.
            let after_a_pause = |percent| {
                let mut machine = machine.borrow_mut();
                machine.throttle(percent).unwrap();
                machine.pause().unwrap();
                machine.resume().unwrap();
                speed(&machine)
            };
            let what = format!("{kind}, {vcpus} vCPUs, after a pause");
            compare(&what, || after_a_pause(0), || after_a_pause(MOST));
            let mut machine = machine.into_inner();
            machine.throttle(0).unwrap();
            assert_eq!(check_all(&machine).corruptions, 0);
        }
    }
}

#[test]
fn a_throttled_guest_pauses_at_any_time() {
    for kind in KINDS {
        let mut machine = started(config(kind, 3, BUSY));
        for turn in 0..60 {
            // Also while it is paused, and from one setting to another.
            machine.throttle([99, 50, 0, 90][turn % 4]).unwrap();
            // Now in a slice, now in a rest.
            std::thread::sleep(Duration::from_micros(turn as u64 * 311));
            machine.pause().unwrap();
            let before = machine.report().unwrap();
            machine.throttle([99, 0, 20][turn % 3]).unwrap();
            // Longer than a period: no rest that ends may let it run.
            std::thread::sleep(Duration::from_millis(12));
            assert_eq!(machine.report().unwrap(), before, "a paused guest went on");
            machine.resume().unwrap();
            wait_for(&machine, "went on", |now| visits(now) > visits(&before));
        }
        machine.throttle(0).unwrap();
        assert_eq!(check_all(&machine).corruptions, 0);
    }
}

#[test]
fn a_throttled_guest_ends_at_any_time() {
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
fn a_guest_that_moves_leaves_its_throttle_behind() {
    for kind in KINDS {
        let machine = std::cell::RefCell::new(started(config(kind, 2, BUSY)));
        let throttled = || {
            machine.borrow_mut().throttle(MOST).unwrap();
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
            // The first visit to a page of new memory takes longer.
            wait_for(&source, "was everywhere", |now| now.rounds >= before + 2);
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
fn a_migration_that_ends_takes_its_throttle_back() {
    for kind in KINDS {
        let machine = Machine::shared(config(kind, 2, BUSY)).unwrap();
        lock(&machine).start().unwrap();
        wait_for(&lock(&machine), "populated", |report| report.populated);
        let migrating = || MigratingMachine::new(Arc::clone(&machine)).unwrap();
        let speed = || speed(&lock(&machine));
        let throttled = || {
            let mut migrating = migrating();
            migrating.throttle(MOST).unwrap();
            speed()
        };
        let dropped = || {
            migrating().throttle(MOST).unwrap();
            speed()
        };
        compare(&format!("{kind}, against one that was dropped"), dropped, throttled);
        let resumed = || {
            let mut migrating = migrating();
            migrating.throttle(MOST).unwrap();
            migrating.pause().unwrap();
            migrating.resume().unwrap();
            speed()
        };
        compare(&format!("{kind}, against one that failed paused"), resumed, throttled);
        assert_eq!(check_all(&lock(&machine)).corruptions, 0);
    }
}

#[test]
fn what_cannot_be_throttled_is_said() {
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
