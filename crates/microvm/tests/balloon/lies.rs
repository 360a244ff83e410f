//! KVM guests with a hostile balloon driver (`guest/balloon_lies.c`), which violates the protocol
//! when hints are requested. Such a guest harms at most itself.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use vmferry::config::{BandwidthCap, RoundLimit, WhenStuck};
use vmferry::source::SourceOutcome;
use vmferry::{ErrorClass, SourceConfig};
use vmferry_dirty::LogChoice;
use vmferry_kit::Exclusive;
use vmferry_memory::{MemoryKind, PAGE_SIZE};
use vmferry_microvm::SharedMachine;
use vmferry_microvm::report::BalloonReport;
use vmferry_microvm::virtio::{Balloon, BalloonStatus, HintRound};

use crate::support::{Damage, MIB, PATIENCE, attempt, guest, move_on, report, wait_for, with};

const LOG: LogChoice = LogChoice::Auto;
const MEMORY: MemoryKind = MemoryKind::Private;
const PAGE: u64 = PAGE_SIZE as u64;
/// The guest's filled pages, which it uses and checks.
const FILL: u64 = 16 * MIB;
const FILL_BYTES: u64 = 24 * MIB;
/// A block of the guest's heap.
const BLOCK: u64 = 4 * MIB;

/// A kind of protocol violation, and its consequences. A round of hints has one *story*, which is a
/// sequence of violations ("lies").
struct Kind {
    word: &'static str,
    /// Minimum number of lies in one story.
    told: u64,
    /// A part of each expected warning. Each warning appears once.
    warnings: &'static [&'static str],
    /// What the device counts in one story: ranges, bytes, and whether the round was completed, if
    /// that is certain. `None` for a story without end.
    round: Option<(u64, u64, Option<bool>)>,
    /// Whether the guest loses pages that it uses.
    harms_itself: bool,
}

/// Lies without consequences and without warnings.
const HARMLESS: Kind = Kind { word: "", told: 1, warnings: &[], round: None, harms_itself: false };

const OUTSIDE: Kind = Kind {
    word: "outside",
    told: 12,
    warnings: &["are not all in guest memory", "are not whole pages"],
    round: Some((3, BLOCK + 2 * PAGE, Some(true))),
    ..HARMLESS
};
const OVERLAP: Kind = Kind {
    word: "overlap",
    told: 17,
    round: Some((18, 8 * BLOCK + 10 * 2 * MIB, Some(true))),
    ..HARMLESS
};
const USED: Kind = Kind {
    word: "used",
    told: 24,
    round: Some((24, FILL_BYTES, Some(true))),
    harms_itself: true,
    ..HARMLESS
};
const ENDLESS: Kind = Kind { word: "endless", told: 10_000, ..HARMLESS };
const NEVER: Kind = Kind { word: "never", round: Some((1, BLOCK, Some(false))), ..HARMLESS };
const ID: Kind = Kind {
    word: "id",
    told: 11,
    warnings: &["amid the hints of command"],
    round: Some((1, BLOCK, Some(true))),
    ..HARMLESS
};
const CHAIN: Kind = Kind {
    word: "chain",
    told: 14,
    warnings: &[
        "in the free page queue is malformed",
        "a buffer in the free page queue has 3 bytes",
        "are not all in guest memory",
        "the free page queue is broken",
    ],
    round: Some((0, 0, None)),
    ..HARMLESS
};
const UNMAP: Kind = Kind {
    word: "unmap",
    told: 6,
    warnings: &["the free page queue is broken"],
    round: Some((1, BLOCK, None)),
    ..HARMLESS
};

/// Lets only one test with endless hints run at a time: its driver takes one CPU, and its device
/// another.
fn alone(kind: &Kind) -> Option<Exclusive> {
    (kind.word == ENDLESS.word).then(|| Exclusive::lock("endless-hints"))
}

fn liar(kind: &Kind) -> SharedMachine {
    let workload =
        format!("fill=24,incompressible hot=4,rate=2000 freed=120 ticks lie={}", kind.word);
    guest(&workload, LOG, MEMORY)
}

fn balloon(machine: &SharedMachine) -> Balloon {
    with(machine, |machine| machine.balloon().expect("it has one"))
}

fn status(machine: &SharedMachine) -> BalloonStatus {
    balloon(machine).status()
}

fn driver(machine: &SharedMachine) -> BalloonReport {
    report(machine).balloon.expect("its driver")
}

/// Waits until the device has processed a complete story that began after `before`. A story may
/// end with a reset of the device, which discards earlier commands.
fn wait_for_story(machine: &SharedMachine, kind: &Kind, before: &BalloonReport) {
    wait_for(machine, "through with its story", |report| {
        let now = report.balloon.expect("its driver");
        now.rounds > before.rounds && now.lies >= before.lies + kind.told
    });
}

/// Runs something that must end in time although the driver is hostile.
fn in_time<T: Send + 'static>(what: &str, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || done.send(act()));
    is_done.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{what} does not end: {error}"))
}

fn assert_warned(kind: &Kind, warnings: &[String]) {
    for part in kind.warnings {
        let count = warnings.iter().filter(|warning| warning.contains(part)).count();
        assert_eq!(count, 1, "{}: {part}: {warnings:?}", kind.word);
    }
    assert_eq!(warnings.len(), kind.warnings.len(), "{}: {warnings:?}", kind.word);
}

/// Waits until the rest of the guest has continued and has checked all its memory. Returns the
/// number of damaged pages.
fn damaged_pages(machine: &SharedMachine) -> u64 {
    let before = report(machine);
    wait_for(machine, "running with its blocks returned", |report| {
        report.ticks > before.ticks + 20
            && report.has_checked_all_since(&before)
            && report.balloon.is_some_and(|driver| driver.held_blocks == 0)
    });
    report(machine).corruptions
}

/// Requests hints as soon as that is possible: the driver may be resetting the device.
fn request_hints(balloon: &Balloon) -> u32 {
    let mut id = None;
    wait_until("the device accepts requests", || {
        id = balloon.start_hints();
        id.is_some()
    });
    id.expect("it was waited for")
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "not yet: {what}");
        // There is no event to wait for.
        thread::sleep(Duration::from_millis(1));
    }
}

/// Requests several rounds of hints without a migration. Checks what the device counts in each
/// story, and that each warning appears once.
fn hints_without_migration(kind: &Kind) {
    let _alone = alone(kind);
    let machine = liar(kind);
    let balloon = balloon(&machine);
    for _ in 0..12 {
        let before = driver(&machine);
        let id = request_hints(&balloon);
        wait_for_story(&machine, kind, &before);
        let now = balloon.status();
        let round = now.hints.expect("a round");
        if let Some((ranges, bytes, complete)) = kind.round {
            let complete = complete.unwrap_or(round.complete);
            let expected = HintRound { id, ranges, bytes, complete };
            assert_eq!(round, expected, "{}: {now:?}", kind.word);
        }
        let other = balloon.clone();
        in_time("stop_hints", move || other.stop_hints());
    }
    balloon.finish_hints();
    assert_eq!(damaged_pages(&machine), 0, "without a migration nothing is lost");
    assert_warned(kind, &status(&machine).warnings);
}

/// Several rounds, with a first round that is long enough for the story.
fn slow(config: &mut SourceConfig) {
    config.downtime_limit = Duration::ZERO;
    config.max_rounds = RoundLimit::new(5).unwrap();
    config.when_stuck = WhenStuck::SwitchOver;
    config.max_bandwidth = Some(BandwidthCap::new(48 * MIB).unwrap());
}

/// Migrates there and back.
fn moves(kind: &Kind) {
    let _alone = alone(kind);
    let mut machine = liar(kind);
    let mut warnings = Vec::new();
    for way in ["there", "back"] {
        let case = format!("{} {way}", kind.word);
        let before = driver(&machine);
        let moved = move_on(&machine, LOG, MEMORY, Damage::None, slow);
        assert_eq!(moved.stats.verify_match, Some(true), "{case}");
        wait_for_story(&moved.machine, kind, &before);
        let damaged = damaged_pages(&moved.machine);
        assert_eq!(damaged > 0, kind.harms_itself, "{case}: {:?}", moved.stats);
        if way == "there" {
            assert_eq!(moved.equal, !kind.harms_itself, "{case}: {:?}", moved.stats);
            assert_lost_there_alone(kind, &machine, &moved.machine);
        }
        warnings.extend(status(&machine).warnings);
        machine = moved.machine;
    }
    warnings.extend(status(&machine).warnings);
    assert_warned(kind, &warnings);
}

/// Asserts that the page that is damaged at the destination is intact at the source.
fn assert_lost_there_alone(kind: &Kind, here: &SharedMachine, there: &SharedMachine) {
    assert_eq!(report(here).corruptions, 0, "{}", kind.word);
    let Some(lost) = report(there).first_corruption else { return };
    assert!((FILL..FILL + FILL_BYTES).contains(&lost.gpa), "{lost:x?}");
    assert_eq!(lost.found, 0, "{lost:x?}");
    let page = |machine: &SharedMachine| {
        let mut page = [0; PAGE_SIZE];
        with(machine, |machine| machine.memory().read_at(lost.gpa, &mut page).unwrap());
        page
    };
    // The guest may have been stopped in the middle of its check, so the word may be anywhere in
    // the page.
    let here = page(here);
    let mut words = here.chunks_exact(8);
    assert!(words.any(|word| word == lost.expected.to_le_bytes()), "{lost:x?}: {here:x?}");
    assert!(page(there) == [0; PAGE_SIZE], "a hinted page is not sent");
}

/// Cancels a migration in the middle of the story, and then completes another one.
fn stays(kind: &Kind) {
    let _alone = alone(kind);
    let machine = liar(kind);
    let before = driver(&machine);
    let cancelled = attempt(
        &machine,
        LOG,
        MEMORY,
        Damage::None,
        |config| config.max_bandwidth = Some(BandwidthCap::new(MIB).unwrap()),
        |orders| {
            wait_for_story(&machine, kind, &before);
            orders.cancel();
        },
    );
    let SourceOutcome::Kept { error, .. } = cancelled.outcome else {
        panic!("the guest was given away")
    };
    assert_eq!(error.class(), ErrorClass::Cancelled, "{}", vmferry::chain(&error));
    assert_eq!(damaged_pages(&machine), 0, "{}", kind.word);
    let moved = move_on(&machine, LOG, MEMORY, Damage::None, slow);
    assert_eq!(moved.stats.verify_match, Some(true), "{}", kind.word);
    assert_eq!(report(&machine).corruptions, 0, "{}", kind.word);
    assert_eq!(damaged_pages(&moved.machine) > 0, kind.harms_itself, "{}", kind.word);
    let warnings = [status(&machine).warnings, status(&moved.machine).warnings].concat();
    assert_warned(kind, &warnings);
}

macro_rules! liars {
    ($($module:ident: $kind:expr;)*) => {$(
        mod $module {
            use super::*;

            #[test]
            fn is_processed_and_each_fault_warned_once() {
                hints_without_migration(&$kind);
            }

            #[test]
            fn moves_there_and_back() {
                moves(&$kind);
            }

            #[test]
            fn stays_when_the_migration_is_canceled() {
                stays(&$kind);
            }
        }
    )*};
}

liars! {
    outside: OUTSIDE;
    overlap: OVERLAP;
    used: USED;
    endless: ENDLESS;
    never: NEVER;
    id: ID;
    chain: CHAIN;
    unmap: UNMAP;
}

#[test]
fn endless_hints_delay_no_other_request() {
    let _alone = alone(&ENDLESS);
    let machine = liar(&ENDLESS);
    let balloon = balloon(&machine);
    for _ in 0..20 {
        let before = driver(&machine);
        let id = request_hints(&balloon);
        wait_for_story(&machine, &ENDLESS, &before);
        wait_until("hints come", || {
            let told = balloon.status().hints.expect("a round");
            assert!(told.id == id && !told.complete, "{told:?}");
            told.ranges > 1000
        });
        let (other, paused) = (balloon.clone(), machine.clone());
        in_time("stop_hints", move || other.stop_hints());
        let told = balloon.status().hints;
        in_time("pause", move || with(&paused, |machine| machine.pause().unwrap()));
        assert_eq!(balloon.status().hints, told, "late hints do not count");
        let resumed = machine.clone();
        in_time("resume", move || with(&resumed, |machine| machine.resume().unwrap()));
    }
    balloon.finish_hints();
    assert_eq!(damaged_pages(&machine), 0);
    assert_eq!(status(&machine).warnings, Vec::<String>::new());
}

#[test]
fn other_queues_of_a_hostile_driver_continue() {
    let machine = liar(&CHAIN);
    let balloon = balloon(&machine);
    for blocks in [4, 1, 6] {
        let before = driver(&machine);
        request_hints(&balloon);
        wait_for_story(&machine, &CHAIN, &before);
        balloon.set_target(blocks * BLOCK).unwrap();
        wait_for(&machine, "at its target", |report| {
            report.balloon.is_some_and(|driver| u64::from(driver.inflated_blocks) == blocks)
        });
        balloon.stop_hints();
    }
    balloon.finish_hints();
    assert_eq!(damaged_pages(&machine), 0);
}
