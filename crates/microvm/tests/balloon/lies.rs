//! KVM guests whose driver lies when it is asked for hints (`guest/balloon_lies.c`): they harm themselves at most.

use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use vmferry::config::WhenStuck;
use vmferry::source::SourceOutcome;
use vmferry::{ErrorClass, SourceConfig};
use vmferry_dirty::LogChoice;
use vmferry_memory::{MemoryKind, PAGE_SIZE};
use vmferry_microvm::SharedMachine;
use vmferry_microvm::report::BalloonReport;
use vmferry_microvm::virtio::{Balloon, BalloonStatus, HintRound};

use crate::support::{MIB, PATIENCE, attempt, guest, move_on, report, wait_for, with};

const LOG: LogChoice = LogChoice::Auto;
const MEMORY: MemoryKind = MemoryKind::Private;
const PAGE: u64 = PAGE_SIZE as u64;
/// Where the guest's fill begins, which it needs and checks.
const FILL: u64 = 16 * MIB;
const FILL_BYTES: u64 = 24 * MIB;
/// A block of the guest's heap.
const BLOCK: u64 = 4 * MIB;

/// A way to lie, and what comes of it.
struct Kind {
    word: &'static str,
    /// Lies of one story at least.
    told: u64,
    /// What each warning has in it; each comes once.
    warnings: &'static [&'static str],
    /// What the device tells of one story: ranges, bytes, and whether the round has ended, where the driver says so.
    /// `None` for a story that goes on for ever.
    round: Option<(u64, u64, Option<bool>)>,
    /// Whether the guest loses what it needs, where its lies are believed.
    harms_itself: bool,
}

/// Lies that come to nothing, of which nothing is told.
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

/// An endless liar takes a CPU, and its device another one. Two at a time would test the scheduler.
fn alone(kind: &Kind) -> Option<MutexGuard<'static, ()>> {
    static ENDLESS_ONE: Mutex<()> = Mutex::new(());
    (kind.word == ENDLESS.word).then(|| ENDLESS_ONE.lock().unwrap_or_else(PoisonError::into_inner))
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

/// Waits until the device has heard a story that was not begun `before`, to its end: a story may end with a reset of
/// the device, and a command that is given before one is forgotten by it.
fn wait_for_story(machine: &SharedMachine, kind: &Kind, before: &BalloonReport) {
    wait_for(machine, "through with its story", |report| {
        let now = report.balloon.expect("its driver");
        now.rounds > before.rounds && now.lies >= before.lies + kind.told
    });
}

/// Does what must come to an end although the guest lies.
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

/// All but the driver of the balloon is as it should be, and has looked at all of its memory. Returns the pages that it
/// has found damaged.
fn goes_on(machine: &SharedMachine) -> u64 {
    let before = report(machine);
    wait_for(machine, "at work again, its blocks given back", |report| {
        report.ticks > before.ticks + 20
            && report.has_checked_all_since(&before)
            && report.balloon.is_some_and(|driver| driver.held_blocks == 0)
    });
    report(machine).corruptions
}

/// Asks for hints, as soon as the device can be asked: the driver may be resetting it.
fn ask(balloon: &Balloon) -> u32 {
    let mut id = None;
    wait_until("the device can be asked", || {
        id = balloon.start_hints();
        id.is_some()
    });
    id.expect("it was waited for")
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "not yet: {what}");
        // A guest that resets its device wakes nobody.
        thread::sleep(Duration::from_millis(1));
    }
}

/// Round after round of hints, without a migration: what the device makes of each story, and that each warning comes once.
fn hears(kind: &Kind) {
    let _alone = alone(kind);
    let machine = liar(kind);
    let balloon = balloon(&machine);
    for _ in 0..12 {
        let before = driver(&machine);
        let id = ask(&balloon);
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
    assert_eq!(goes_on(&machine), 0, "nothing has moved, so nothing was lost");
    assert_warned(kind, &status(&machine).warnings);
}

/// Several rounds, of which the first takes the guest as long as it needs to be heard.
fn slow(config: &mut SourceConfig) {
    config.downtime_limit = Duration::ZERO;
    config.max_rounds = 5;
    config.when_stuck = WhenStuck::SwitchOver;
    config.max_bandwidth = Some(48 * MIB);
}

/// There and back.
fn moves(kind: &Kind) {
    let _alone = alone(kind);
    let mut machine = liar(kind);
    let mut warnings = Vec::new();
    for way in ["there", "back"] {
        let case = format!("{} {way}", kind.word);
        let before = driver(&machine);
        let moved = move_on(&machine, LOG, MEMORY, false, slow);
        assert_eq!(moved.stats.verify_match, Some(true), "{case}");
        wait_for_story(&moved.machine, kind, &before);
        let damaged = goes_on(&moved.machine);
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

/// What the guest has at the destination was right where it came from.
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
    // A guest that was stopped amid its check of this page found the word where it went on.
    let here = page(here);
    let mut words = here.chunks_exact(8);
    assert!(words.any(|word| word == lost.expected.to_le_bytes()), "{lost:x?}: {here:x?}");
    assert!(page(there) == [0; PAGE_SIZE], "hinted, so it was not sent");
}

/// A migration that is cancelled amid the lies. Then one that is not.
fn stays(kind: &Kind) {
    let _alone = alone(kind);
    let machine = liar(kind);
    let before = driver(&machine);
    let cancelled = attempt(
        &machine,
        LOG,
        MEMORY,
        false,
        |config| config.max_bandwidth = Some(MIB),
        |orders| {
            wait_for_story(&machine, kind, &before);
            orders.cancel();
        },
    );
    let SourceOutcome::Kept { error, .. } = cancelled.outcome else { panic!("it was given away") };
    assert_eq!(error.class(), ErrorClass::Cancelled, "{}", vmferry::chain(&error));
    assert_eq!(goes_on(&machine), 0, "{}", kind.word);
    let moved = move_on(&machine, LOG, MEMORY, false, slow);
    assert_eq!(moved.stats.verify_match, Some(true), "{}", kind.word);
    assert_eq!(report(&machine).corruptions, 0, "{}", kind.word);
    assert_eq!(goes_on(&moved.machine) > 0, kind.harms_itself, "{}", kind.word);
    let warnings = [status(&machine).warnings, status(&moved.machine).warnings].concat();
    assert_warned(kind, &warnings);
}

macro_rules! liars {
    ($($module:ident: $kind:expr;)*) => {$(
        mod $module {
            use super::*;

            #[test]
            fn each_story_is_heard_and_each_fault_told_once() {
                hears(&$kind);
            }

            #[test]
            fn moves_there_and_back() {
                moves(&$kind);
            }

            #[test]
            fn stays_when_the_migration_is_cancelled() {
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
fn an_endless_liar_holds_nobody_up() {
    let _alone = alone(&ENDLESS);
    let machine = liar(&ENDLESS);
    let balloon = balloon(&machine);
    for _ in 0..20 {
        let before = driver(&machine);
        let id = ask(&balloon);
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
        assert_eq!(balloon.status().hints, told, "what comes too late counts for nothing");
        let resumed = machine.clone();
        in_time("resume", move || with(&resumed, |machine| machine.resume().unwrap()));
    }
    balloon.finish_hints();
    assert_eq!(goes_on(&machine), 0);
    assert_eq!(status(&machine).warnings, Vec::<String>::new());
}

#[test]
fn the_other_queues_of_a_liar_go_on() {
    let machine = liar(&CHAIN);
    let balloon = balloon(&machine);
    for blocks in [4, 1, 6] {
        let before = driver(&machine);
        ask(&balloon);
        wait_for_story(&machine, &CHAIN, &before);
        balloon.set_target(blocks * BLOCK).unwrap();
        wait_for(&machine, "as large as it shall be", |report| {
            report.balloon.is_some_and(|driver| u64::from(driver.inflated_blocks) == blocks)
        });
        balloon.stop_hints();
    }
    balloon.finish_hints();
    assert_eq!(goes_on(&machine), 0);
}
