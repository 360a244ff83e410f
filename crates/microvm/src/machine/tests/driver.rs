//! The balloon driver of the bare-metal guest with the device: complete guests on KVM.

use std::sync::Mutex;

use vmferry_memory::{PAGE_SIZE, PageRun};

use super::*;
use crate::account::{BLOCK_BYTES, FreeAccount};
use crate::report::{BalloonReport, DriverState};
use crate::virtio::{Balloon, BalloonListener};

const BLOCK_PAGES: u64 = BLOCK_BYTES / PAGE_SIZE as u64;
const DONE: u32 = 1;

fn config_of(memory_bytes: u64, vcpus: u8, line: &str) -> MachineConfig {
    let mut config = config(GuestKind::Kvm, vcpus, line);
    config.guest.memory_bytes = memory_bytes;
    config.guest.balloon = true;
    config
}

fn driver(machine: &Machine) -> BalloonReport {
    machine.report().unwrap().balloon.expect("a driver")
}

fn await_driver(machine: &Machine, what: &str, done: impl Fn(&BalloonReport) -> bool) {
    wait_for(machine, what, |report| report.balloon.as_ref().is_some_and(&done));
}

fn account(machine: &Machine) -> FreeAccount {
    FreeAccount::read(machine.memory()).unwrap().unwrap()
}

/// Collects hints.
struct Hints {
    pages: Mutex<PageSet>,
    poison: Mutex<Vec<Option<u32>>>,
}

impl BalloonListener for Hints {
    fn hint(&self, run: PageRun, poison: Option<u32>) {
        self.pages.lock().unwrap().bitmap_mut(run.slot).set_run(run.first, run.pages);
        let mut seen = self.poison.lock().unwrap();
        if !seen.contains(&poison) {
            seen.push(poison);
        }
    }

    fn discarded(&self, _: PageRun) {}

    fn complete(&self) {}
}

impl Hints {
    fn listen(machine: &Machine) -> (Arc<Self>, Balloon) {
        let pages = Mutex::new(PageSet::for_memory(machine.memory()));
        let hints = Arc::new(Self { pages, poison: Mutex::default() });
        let balloon = machine.balloon().unwrap();
        balloon.set_listener(Some(hints.clone()));
        (hints, balloon)
    }

    fn take(&self, machine: &Machine) -> PageSet {
        std::mem::replace(&mut *self.pages.lock().unwrap(), PageSet::for_memory(machine.memory()))
    }
}

/// Runs one complete round of hints.
fn hint_all(machine: &Machine, balloon: &Balloon) {
    let id = balloon.start_hints().expect("a driver that hints");
    let is_complete = || balloon.status().hints.is_some_and(|hints| hints.complete);
    wait_for(machine, "hinted all", |_| is_complete());
    assert_eq!(balloon.status().hints.unwrap().id, id);
    balloon.stop_hints();
}

#[test]
fn hints_cover_exactly_the_free_pages_until_done() {
    for (line, poison) in [
        ("ticks fill=20,text freed=60", None),
        ("ticks freed=60 poison", Some(0xaaaa_aaaa)),
        ("ticks freed=60 init-on-free", Some(0)),
    ] {
        let mut machine = started(config_of(128 * MIB, 2, line));
        let (hints, balloon) = Hints::listen(&machine);
        for round in 1..4 {
            hint_all(&machine, &balloon);
            await_driver(&machine, "stopped", |driver| driver.command == 0);
            let hinted = hints.take(&machine);
            machine.pause().unwrap();
            let account = account(&machine);
            assert_eq!(account.hinted, account.blocks, "{line}");
            if round == 1 {
                assert!(hinted == account.pages, "{line}");
            } else {
                assert!(hinted.is_empty(), "held blocks are not hinted again: {line}");
            }
            machine.resume().unwrap();
        }
        balloon.finish_hints();
        await_driver(&machine, "done", |driver| driver.command == DONE && driver.held_blocks == 0);
        hint_all(&machine, &balloon);
        balloon.finish_hints();
        await_driver(&machine, "idle", |driver| {
            driver.state == DriverState::Idle && driver.command == DONE
        });
        let driver = driver(&machine);
        assert_eq!(*hints.poison.lock().unwrap(), [poison], "{line}");
        let blocks = u64::from(account(&machine).blocks);
        assert_eq!((driver.hinted_blocks, driver.rounds, driver.rounds_ended), (2 * blocks, 4, 4));
        assert_eq!(balloon.status().warnings, Vec::<String>::new());
        assert_eq!(check_all(&machine).corruptions, 0, "{line}");
    }
}

#[test]
fn hints_begin_with_the_used_blocks() {
    #[derive(Default)]
    struct Order(Mutex<Vec<PageRun>>);
    impl BalloonListener for Order {
        fn hint(&self, run: PageRun, _: Option<u32>) {
            self.0.lock().unwrap().push(run);
        }
        fn discarded(&self, _: PageRun) {}
        fn complete(&self) {}
    }
    let machine = started(config_of(128 * MIB, 1, "freed=40"));
    let used = account(&machine).used;
    let (order, balloon) = (Arc::new(Order::default()), machine.balloon().unwrap());
    balloon.set_listener(Some(order.clone()));
    hint_all(&machine, &balloon);
    let order = order.0.lock().unwrap();
    let is_used = |run: &PageRun| used.bitmap(run.slot).is_set(run.first);
    assert_eq!(order.iter().position(|run| !is_used(run)), Some(10), "{order:?}");
    assert!(!order[10..].iter().any(is_used));
}

/// How a migration uses hints.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HintUse {
    /// Hinted pages are left out of the first copy only.
    FirstCopy,
    /// Hinted pages are left out of all copies, which loses writes.
    AllCopies,
}

/// A minimal live migration with hints.
fn migrate_with_hints(mut source: Machine, config: &MachineConfig, hint_use: HintUse) -> Machine {
    let (hints, balloon) = Hints::listen(&source);
    let mut target = Machine::new(config.clone()).unwrap();
    let log = source.dirty_log().unwrap();
    log.start().unwrap();
    // Under memory pressure there is not always a free block to hint.
    let hint = |_| {
        hint_all(&source, &balloon);
        hints.take(&source)
    };
    let hinted = (0..MOST_MOVES).map(hint).find(|hinted| !hinted.is_empty());
    let hinted = hinted.expect("free pages");
    let poison = [hints.poison.lock().unwrap()[0].unwrap_or(0) as u8; PAGE_SIZE];
    if poison[0] != 0 {
        for run in hinted.runs() {
            for page in 0..run.pages {
                let page = PageRun { first: run.first + page, pages: 1, ..run };
                target.memory().copy_in(page, &poison).unwrap();
            }
        }
    }
    let mut first = source.memory().populated().unwrap();
    first.subtract(&hinted);
    copy(&first, source.memory(), target.memory());
    let mut dirty = PageSet::for_memory(source.memory());
    for round in 0..4 {
        dirty.clear_all();
        log.collect(&mut dirty).unwrap();
        for slot in source.memory().slots() {
            log.rearm(slot.id(), 0, dirty.bitmap(slot.id()).words()).unwrap();
        }
        if hint_use == HintUse::AllCopies {
            dirty.subtract(&hinted);
        }
        copy(&dirty, source.memory(), target.memory());
        // Hints of pages that were freed meanwhile. They are not used, but the guest holds them.
        if round % 2 == 0 {
            hint_all(&source, &balloon);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    source.pause().unwrap();
    dirty.clear_all();
    log.collect_last(&mut dirty).unwrap();
    if hint_use == HintUse::AllCopies {
        dirty.subtract(&hinted);
    }
    copy(&dirty, source.memory(), target.memory());
    log.stop().unwrap();
    target.load(&source.save().unwrap()).unwrap();
    drop(source);
    target.resume().unwrap();
    target
}

/// Three moves are nearly always enough.
const MOST_MOVES: u32 = 12;

const BUSY: &str = "ticks hot=4,rate=20000 freed=160 churn=40 pressure rewrite";

#[test]
fn hints_lose_no_write_to_hinted_pages() {
    for line in [BUSY.to_owned(), format!("{BUSY} poison"), format!("{BUSY} poison reporting")] {
        let config = config_of(288 * MIB, 2, &line);
        let mut machine = started(config.clone());
        let mut moves = 0;
        // Under memory pressure there is not always a free block to write to.
        while moves < 3 || driver(&machine).rewrites <= 15 || account(&machine).taken_early <= 10 {
            assert!(moves < MOST_MOVES, "{line}: {:?}", driver(&machine));
            moves += 1;
            machine = migrate_with_hints(machine, &config, HintUse::FirstCopy);
            await_driver(&machine, "done", |driver| {
                driver.command == DONE && driver.held_blocks == 0
            });
            let before = driver(&machine);
            check_all(&machine);
            await_driver(&machine, "checked its writes", |driver| {
                driver.rewrite_rounds >= before.rewrite_rounds + 2
            });
            let report = machine.report().unwrap();
            assert_eq!(report.corruptions, 0, "{line}: {report:?}");
        }
    }
}

#[test]
fn guest_detects_a_migration_that_uses_stale_hints() {
    let config = config_of(288 * MIB, 2, BUSY);
    let machine = migrate_with_hints(started(config.clone()), &config, HintUse::AllCopies);
    wait_for(&machine, "found it", |report| report.corruptions > 0);
}

#[test]
fn balloon_reaches_its_target_and_deflates_again() {
    for line in ["ticks freed=60 churn=20", "ticks freed=60 churn=20 poison"] {
        let mut machine = started(config_of(160 * MIB, 2, line));
        let balloon = machine.balloon().unwrap();
        for mib in [64, 8, 100, 0, 30, 0] {
            balloon.set_target(mib * MIB).unwrap();
            let whole = mib / 4 * 4 * MIB;
            wait_for(&machine, "of its size", |_| balloon.status().actual_bytes == whole);
            machine.pause().unwrap();
            let account = account(&machine);
            assert_eq!(u64::from(account.inflated) * BLOCK_BYTES, whole, "{line} {mib}");
            assert_eq!(driver(&machine).target_blocks, account.inflated);
            // The host has discarded the memory of the balloon. The guest writes poison into pages
            // that leave the balloon.
            let mut gone = machine.memory().populated().unwrap();
            gone.set_to_intersection(&machine.memory().populated().unwrap(), &account.pages);
            gone.subtract(&account.used);
            assert!(gone.count() < BLOCK_PAGES, "{line}: {} pages", gone.count());
            machine.resume().unwrap();
        }
        let discarded = balloon.status().discarded_bytes;
        assert!(discarded >= (64 + 92 + 28) * MIB, "the sum of all inflations");
        assert_eq!(balloon.status().warnings, Vec::<String>::new());
        assert_eq!(check_all(&machine).corruptions, 0, "{line}");
    }
}

#[test]
fn balloon_deflates_when_the_guest_runs_out_of_memory() {
    let machine = started(config_of(128 * MIB, 2, "ticks churn=90 poison"));
    let balloon = machine.balloon().unwrap();
    balloon.set_target(100 * MIB).unwrap();
    await_driver(&machine, "out of memory", |driver| driver.deflated_on_demand > 0);
    let before = machine.report().unwrap();
    wait_for(&machine, "gone on", |now| now.buffers_allocated > before.buffers_allocated + 100);
    balloon.set_target(0).unwrap();
    wait_for(&machine, "deflated", |_| balloon.status().actual_bytes == 0);
    assert_eq!(check_all(&machine).corruptions, 0);
}

#[test]
fn reporting_discards_free_pages_without_poison() {
    for line in ["ticks freed=80 reporting", "ticks freed=80 reporting poison"] {
        let machine = started(config_of(128 * MIB, 1, line));
        await_driver(&machine, "reported", |driver| driver.reported_blocks >= 20);
        let account = account(&machine);
        assert!(account.used.is_empty(), "{line}");
        assert_eq!(account.pages.count(), u64::from(account.blocks) * BLOCK_PAGES);
        let kept = line.ends_with("poison");
        assert_eq!(
            machine.balloon().unwrap().status().discarded_bytes,
            if kept { 0 } else { 80 * MIB }
        );
    }
    // Reported pages are used again.
    let machine = started(config_of(128 * MIB, 2, "ticks freed=80 churn=60 reporting poison"));
    let before = machine.report().unwrap();
    wait_for(&machine, "churned", |now| {
        now.buffers_allocated > before.buffers_allocated + 200
            && now.balloon.is_some_and(|driver| driver.reported_blocks > 20)
    });
    assert_eq!(check_all(&machine).corruptions, 0);
}

/// Interrupts may be late on a busy host. The driver then finds the change by polling.
#[test]
fn driver_sees_every_target_while_the_guest_is_busy() {
    for _ in 0..20 {
        let machine = started(config_of(64 * MIB, 1, "hot=3"));
        let balloon = machine.balloon().unwrap();
        for blocks in [5, 0, 3, 1, 0] {
            balloon.set_target(u64::from(blocks) * BLOCK_BYTES).unwrap();
            await_driver(&machine, "updated", |driver| driver.target_blocks == blocks);
        }
        let driver = driver(&machine);
        if driver.unheard > 0 {
            eprintln!("{} interrupts of this host were late", driver.unheard);
        }
    }
}

#[test]
fn statistics_report_total_and_free_memory() {
    let machine = started(config_of(128 * MIB, 1, "hot=3"));
    let balloon = machine.balloon().unwrap();
    for target in [0, 40] {
        balloon.set_target(target * MIB).unwrap();
        wait_for(&machine, "of its size", |_| balloon.status().actual_bytes == target * MIB);
        assert!(balloon.refresh_statistics(PATIENCE));
        let statistics = balloon.status().statistics.unwrap();
        assert!(statistics.values().any(|value| *value == 128 * MIB), "total: {statistics:?}");
        assert!(
            statistics.values().any(|value| *value == (108 - target) * MIB),
            "free: {statistics:?}"
        );
    }
    await_driver(&machine, "sent statistics", |driver| driver.statistics >= 2);
}

/// A guest of 8 GiB has about 2,000 free blocks.
#[test]
fn hints_of_2000_blocks_need_few_notifications() {
    let machine = started(config_of(8 << 30, 1, "ticks"));
    let (hints, balloon) = Hints::listen(&machine);
    let mut times = Vec::new();
    for _ in 0..5 {
        let before = driver(&machine).notifications;
        let begun = Instant::now();
        balloon.start_hints().unwrap();
        while !balloon.status().hints.unwrap().complete {
            assert!(begun.elapsed() < PATIENCE, "{:?}", driver(&machine));
            std::thread::yield_now();
        }
        times.push(begun.elapsed());
        let account = account(&machine);
        let pages = u64::from(account.blocks) * BLOCK_PAGES;
        assert_eq!(hints.take(&machine).count(), pages);
        await_driver(&machine, "idle", |driver| driver.state == DriverState::Holding);
        let notifications = driver(&machine).notifications - before;
        assert!(notifications < 200, "{notifications} for {} blocks", account.blocks);
        balloon.finish_hints();
        await_driver(&machine, "done", |driver| driver.held_blocks == 0);
        eprintln!(
            "{} blocks hinted in {:?}, {notifications} notifications",
            account.blocks,
            times.last()
        );
    }
}
