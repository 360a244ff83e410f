//! KVM guests whose driver hints free pages during migrations there and back.

use std::time::{Duration, Instant};

use vmferry::SourceConfig;
use vmferry::config::RoundLimit;
use vmferry_dirty::LogChoice;
use vmferry_memory::{MemoryKind, PAGE_SIZE};
use vmferry_microvm::SharedMachine;

use crate::support::{Damage, MIB, PATIENCE, account, guest, move_on, report, wait_for, with};

/// A block of the guest's heap.
const BLOCK_PAGES: u64 = 1024;

/// Asserts that the guest continues, gets its hinted pages back, and has found no damage.
fn assert_well(machine: &SharedMachine) {
    let before = report(machine);
    wait_for(machine, "running with its pages returned", |report| {
        let balloon = report.balloon.expect("its driver");
        report.ticks > before.ticks + 20 && balloon.held_blocks == 0 && balloon.command == 1
    });
    let now = report(machine);
    assert_eq!((now.corruptions, now.first_corruption), (0, None));
    let warnings = with(machine, |machine| machine.balloon().unwrap().status().warnings);
    assert_eq!(warnings, Vec::<String>::new());
}

const LOGS: [LogChoice; 4] =
    [LogChoice::KvmBitmap, LogChoice::KvmClear, LogChoice::KvmRing, LogChoice::Userfaultfd];

#[test]
fn free_pages_are_not_sent_with_every_dirty_log() {
    for (log, kind) in LOGS.into_iter().zip([MemoryKind::Private, MemoryKind::Memfd].repeat(2)) {
        let mut machine = guest("fill=24,text freed=160", log, kind);
        for way in ["there", "back"] {
            let populated = with(&machine, |machine| machine.memory().populated().unwrap());
            let moved = move_on(&machine, log, kind, Damage::None, |_| {});
            let case = format!("{log:?} {way}: {:?}", moved.stats);
            assert!(moved.equal, "{case}");
            if way == "there" {
                // All freed pages, because the guest does nothing else. On the way back they are
                // not populated.
                assert_eq!(moved.stats.free_pages, 160 * MIB / PAGE_SIZE as u64, "{case}");
            } else {
                assert!(populated.count() < 64 * MIB / PAGE_SIZE as u64, "{case}");
            }
            assert_eq!(moved.stats.verify_match, Some(true), "{case}");
            machine = moved.machine;
            assert_well(&machine);
        }
    }
}

#[test]
fn comparison_detects_a_used_page_that_did_not_arrive() {
    let (log, kind) = (LogChoice::Auto, MemoryKind::Private);
    let machine = guest("fill=24,incompressible freed=60", log, kind);
    let moved = move_on(&machine, log, kind, Damage::OnePage, |_| {});
    assert!(!moved.equal);
}

/// Never converges, so that there are several rounds, each with hints.
fn many_rounds(config: &mut SourceConfig) {
    config.downtime_limit = Duration::ZERO;
    config.max_rounds = RoundLimit::new(5).unwrap();
    config.when_stuck = vmferry::config::WhenStuck::SwitchOver;
}

/// Two moves are usually enough. On a busy machine a block is seldom free at the right time.
const MOST_MOVES: u32 = 100;

#[test]
fn hinted_pages_used_again_at_every_stage_lose_nothing() {
    let kind = MemoryKind::Private;
    let workloads = [
        "freed=120 churn=60 rewrite pressure",
        "freed=120 churn=60,rate=3000 rewrite pressure poison",
        "freed=60 churn=100 rewrite reporting",
        "freed=60 churn=60,rate=3000 rewrite init-on-free",
    ];
    let all = std::env::var_os("VMFERRY_TEST_ALL").is_some();
    for (number, workload) in workloads.into_iter().enumerate() {
        let sample = [LOGS[(number + 1) % LOGS.len()]];
        for log in if all { &LOGS[..] } else { &sample } {
            let log = *log;
            eprintln!("{workload}, {log:?}");
            let mut machine = guest(workload, log, kind);
            let mut moves = 0;
            // In each move the driver rewrites a block before it reads the command ID, during the
            // hints, after STOP and after DONE, if a block is free at that time.
            while moves < 2 || report(&machine).balloon.expect("its driver").rewrites < 4 {
                let driver = report(&machine).balloon;
                assert!(moves < MOST_MOVES, "{workload}: hardly ever a free block: {driver:?}");
                moves += 1;
                let moved = move_on(&machine, log, kind, Damage::None, many_rounds);
                // The memories are not compared: a buffer that is allocated but not written yet
                // counts as used, and may have any content. The guest checks every word it wrote.
                assert_eq!(moved.stats.verify_match, Some(true), "{workload} {log:?}");
                machine = moved.machine;
                assert_well(&machine);
                let before = report(&machine).balloon.expect("its driver");
                // Waits until the guest has checked all rewritten blocks once more.
                wait_for(&machine, "checked again", |report| {
                    report
                        .balloon
                        .is_some_and(|now| now.rewrite_rounds >= before.rewrite_rounds + 2)
                });
                assert_eq!(report(&machine).corruptions, 0, "{workload} {log:?}");
            }
        }
    }
}

#[test]
fn poisoned_pages_arrive_poisoned() {
    let (log, kind) = (LogChoice::Auto, MemoryKind::Private);
    let workload = "fill=8,text freed=120 poison";
    let machine = guest(workload, log, kind);
    let moved = move_on(&machine, log, kind, Damage::None, |_| {});
    assert!(moved.equal);
    assert_eq!(moved.stats.free_pages, 0, "poisoned pages are sent");
    assert!(moved.stats.sent_bytes < 20 * MIB, "poison compresses well: {:?}", moved.stats);
    let memory = with(&moved.machine, |machine| machine.memory().clone());
    let free = account(&memory).used;
    assert!(free.count() >= 120 * MIB / PAGE_SIZE as u64);
    let mut page = [0; PAGE_SIZE];
    let layout = memory.layout();
    for run in free.runs() {
        let first = layout[usize::from(run.slot.0)].gpa + run.first * PAGE_SIZE as u64;
        for at in (first..).step_by(PAGE_SIZE).take(run.pages as usize) {
            memory.read_at(at, &mut page).unwrap();
            assert!(page == [0xaa; PAGE_SIZE], "{at:#x}");
        }
    }
    assert_well(&moved.machine);
}

#[test]
fn inflated_pages_are_not_sent_and_deflated_pages_are() {
    let (log, kind) = (LogChoice::Auto, MemoryKind::Memfd);
    let machine = guest("freed=200 churn=24", log, kind);
    let size = |machine: &SharedMachine, blocks: u64| {
        let bytes = blocks * BLOCK_PAGES * PAGE_SIZE as u64;
        with(machine, |machine| machine.balloon().unwrap().set_target(bytes).unwrap());
        wait_for(machine, "as large as it shall be", |report| {
            report.balloon.is_some_and(|it| u64::from(it.inflated_blocks) == blocks)
        });
        // The device may lag behind the driver by a block.
        let begun = Instant::now();
        while with(machine, |machine| machine.balloon().unwrap().status().actual_bytes) != bytes {
            assert!(begun.elapsed() < PATIENCE);
            // There is no event to wait for.
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    size(&machine, 30);
    let populated = with(&machine, |machine| machine.memory().populated().unwrap().count());
    let moved = move_on(&machine, log, kind, Damage::None, |_| {});
    assert!(moved.equal);
    assert!(populated < 256 * 256 - 30 * BLOCK_PAGES, "inflating gives memory back: {populated}");
    assert!(moved.stats.rounds[0].pages <= populated, "{:?}", moved.stats);
    assert_well(&moved.machine);
    // The device at the destination has the same size.
    let status = with(&moved.machine, |machine| machine.balloon().unwrap().status());
    assert_eq!(status.actual_bytes, 30 * BLOCK_PAGES * PAGE_SIZE as u64);
    size(&moved.machine, 3);
    assert_eq!(report(&moved.machine).corruptions, 0);
}

#[test]
fn without_hints_all_pages_are_sent() {
    let (log, kind) = (LogChoice::Auto, MemoryKind::Private);
    let machine = guest("fill=8,text freed=60", log, kind);
    let moved = move_on(&machine, log, kind, Damage::None, |config| config.free_page_hints = false);
    assert!(moved.equal);
    assert_eq!(moved.stats.free_pages, 0);
    assert!(moved.stats.rounds[0].encoded.content() > 60 * MIB / PAGE_SIZE as u64);
    let balloon = report(&moved.machine).balloon.expect("its driver");
    assert_eq!((balloon.rounds, balloon.hinted_blocks), (0, 0), "no hints were requested");
}
