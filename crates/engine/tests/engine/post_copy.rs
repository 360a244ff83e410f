//! Switchovers with post-copy: the guest runs at the destination while its pages are fetched from
//! the source.

use std::time::Duration;

use crate::support::content::{let_work_between_rounds, random, random_guest};
use crate::support::cutter::{Channels, Cut, Cutter};
use crate::support::{
    DestinationGuest, PAGES, Scenario, SourceGuest, address, given, journals, kept, nothing, owned,
    test_all,
};
use vmferry::config::{BandwidthCap, PostCopy, RoundLimit, WhenStuck};
use vmferry::source::{Change, Report};
use vmferry::stats::{FetchStats, SourceStats};
use vmferry::{ErrorClass, MigrateError, SourceVm};
use vmferry_doubles::FilteredLog;
use vmferry_handover::journal::Verdict;
use vmferry_memory::{GuestMemory, PAGE_SIZE, SlotId, whole_hash};

/// Pages that the guest writes all the time: half of its memory.
const HOT: u64 = PAGES / 2;

fn scenario() -> Scenario {
    let mut scenario = Scenario::new();
    scenario.source.verify = false;
    scenario.source.post_copy = PostCopy::Now;
    scenario.source.when_stuck = WhenStuck::Refuse;
    // The guest never has so little to send.
    scenario.source.downtime_limit = Duration::from_nanos(1);
    scenario
}

fn taker() -> DestinationGuest {
    DestinationGuest { post_copy: true, ..DestinationGuest::default() }
}

/// A destination that does not start the guest, so that its memory stays what has arrived.
fn idle_taker() -> DestinationGuest {
    DestinationGuest { idle: true, ..taker() }
}

/// Migrates a guest that writes all the time, and checks every page at the destination.
fn run(
    scenario: &Scenario,
    destination: DestinationGuest,
    mut watch: impl FnMut(&Report),
) -> (SourceStats, FetchStats, Vec<Report>) {
    let mut reports = Vec::new();
    let (outcome, received) = scenario.run(random_guest(HOT), destination, |report| {
        eprintln!("source: {report:?}");
        watch(report);
        reports.push(report.clone());
    });
    let (vm, stats) = given(outcome);
    let owned = owned(received);
    let guest = owned.vm.guest.as_ref().unwrap();
    if guest.is_running() {
        guest.wait_for_work();
        guest.pause();
    }
    check(&vm.guest.memory, &guest.memory);
    let verdicts: Vec<Verdict> =
        journals(scenario.directory.path()).iter().map(|session| session.verdict).collect();
    assert_eq!(verdicts, [Verdict::There, Verdict::Here]);
    assert!(stats.missing_pages > 0, "{stats:?}");
    let fetch = owned.stats.fetch.clone().expect("pages were fetched");
    assert_eq!(fetch.missing_pages, stats.missing_pages, "{fetch:?}");
    assert_eq!(fetch.fault_pages + fetch.background_pages, fetch.missing_pages, "{fetch:?}");
    (stats, fetch, reports)
}

/// Each page must be the source's, except that the guest's counts have gone on.
fn check(source: &GuestMemory, destination: &GuestMemory) {
    for page in 0..PAGES {
        let read = |memory: &GuestMemory| {
            let mut bytes = vec![0; PAGE_SIZE];
            memory.read_at(address(page), &mut bytes).unwrap();
            let count = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            (count(0), count(PAGE_SIZE - 8), bytes[8..PAGE_SIZE - 8].to_vec())
        };
        let ((was, _, sent), (first, last, arrived)) = (read(source), read(destination));
        assert!(sent == arrived, "page {page} differs");
        assert!(first >= was, "page {page}: the guest has counted to {was}, and then to {first}");
        if page < HOT && first > was {
            assert_eq!(first, last, "page {page}");
        }
    }
}

#[test]
fn guest_that_never_rests_moves() {
    let mut scenario = scenario();
    // The background alone would take half a second, so the guest touches missing pages.
    scenario.source.max_bandwidth = Some(BandwidthCap::new(16 << 20).unwrap());
    let (stats, fetch, reports) = run(&scenario, taker(), |_| {});
    assert!(fetch.faults > 0 && fetch.wait_max_us > 0, "{fetch:?}");
    assert!(stats.serving_ms > 0.0 && stats.downtime_ms > 0.0, "{stats:?}");
    assert_eq!(stats.digest_match, Some(true));
    let serving = Report::Serving { pages: stats.missing_pages };
    assert!(reports.contains(&serving), "{reports:?}");
    let paused = |report: &&Report| matches!(report, Report::RoundDone(round) if round.paused);
    assert_eq!(reports.iter().filter(paused).count(), 0, "nothing is sent in the pause");
}

#[test]
fn pages_that_no_thread_touches_arrive_too() {
    let vm = random_guest(HOT);
    let memory = vm.guest.memory.clone();
    let (outcome, received) = scenario().run(vm, idle_taker(), |_| {});
    let (_, stats) = given(outcome);
    let owned = owned(received);
    let fetch = owned.stats.fetch.unwrap();
    assert_eq!((fetch.fault_pages, fetch.background_pages), (0, stats.missing_pages));
    let arrived = &owned.vm.guest.as_ref().unwrap().memory;
    assert_eq!(whole_hash(arrived).unwrap(), whole_hash(&memory).unwrap());
}

/// The control for the test above: a page that the log loses is outdated.
#[test]
fn page_that_is_not_fetched_is_noticed() {
    let mut vm = random_guest(HOT);
    let (memory, guest) = (vm.guest.memory.clone(), vm.guest.clone());
    vm.log = FilteredLog::new(vm.dirty_log(), |dirty| dirty.bitmap_mut(SlotId(0)).clear(7));
    let (outcome, received) = scenario().run(vm, idle_taker(), |report| {
        let_work_between_rounds(&guest, report);
    });
    given(outcome);
    let owned = owned(received);
    let arrived = &owned.vm.guest.as_ref().unwrap().memory;
    assert_ne!(whole_hash(arrived).unwrap(), whole_hash(&memory).unwrap());
}

#[test]
fn state_may_touch_missing_pages_while_it_is_loaded() {
    let (_, fetch, _) = run(&scenario(), DestinationGuest { load_reads: true, ..taker() }, |_| {});
    assert!(fetch.fault_pages > 0, "{fetch:?}");
}

#[test]
fn number_of_channels_does_not_matter() {
    for channels in [1, 4] {
        let mut scenario = scenario();
        scenario.source.channels = vmferry::config::ChannelCount::new(channels).unwrap();
        run(&scenario, taker(), |_| {});
    }
}

/// The guest waits for its pages while the links are down, and nothing else happens to it.
#[test]
fn lost_links_delay_the_guest_only() {
    let lasts = if test_all() { Duration::from_secs(5) } else { Duration::from_millis(300) };
    for (channels, cuts) in [(Channels::All, 3), (Channels::Lane(2), 1), (Channels::Lane(4), 1)] {
        let mut scenario = scenario();
        let path = scenario.directory.path().join("link.sock");
        // Lanes 0 and 1 carry pre-copy, 2 and 3 faults, 4 and 5 the background.
        let cutter = Cutter::start(path, &scenario.listen_at, Vec::new());
        scenario.dial = Some(cutter.address());
        let (stats, _, reports) = run(&scenario, taker(), |report| {
            if let Report::PostCopy { round, .. } = report {
                for _ in 0..cuts {
                    cutter.cut(Cut { channels, round: *round, lasts });
                }
            }
        });
        assert_eq!(cutter.left(), 0, "{channels:?}: the link was cut");
        let lost = |report: &&Report| matches!(report, Report::LinkLost { .. });
        assert!(reports.iter().filter(lost).count() >= cuts, "{channels:?}: {reports:?}");
        if channels == Channels::All {
            assert!(stats.reconnections > 0, "{stats:?}");
        }
    }
}

#[test]
fn auto_switches_when_pre_copy_does_not_converge() {
    let mut scenario = scenario();
    scenario.source.post_copy = PostCopy::Auto;
    scenario.source.max_rounds = RoundLimit::new(30).unwrap();
    let (stats, ..) = run(&scenario, taker(), |_| {});
    assert!((2..30).contains(&stats.rounds.len()), "{} rounds", stats.rounds.len());
}

#[test]
fn auto_does_not_switch_when_pre_copy_fits() {
    let mut scenario = scenario();
    scenario.source.post_copy = PostCopy::Auto;
    scenario.source.downtime_limit = Duration::from_secs(60);
    let (outcome, received) = scenario.run(random_guest(HOT), taker(), |_| {});
    assert_eq!(given(outcome).1.missing_pages, 0);
    assert_eq!(owned(received).stats.fetch, None);
}

#[test]
fn stuck_migration_may_end_with_post_copy() {
    let mut scenario = scenario();
    scenario.source.post_copy = PostCopy::Never;
    scenario.source.when_stuck = WhenStuck::PostCopy;
    scenario.source.max_rounds = RoundLimit::new(3).unwrap();
    let (stats, ..) = run(&scenario, taker(), |_| {});
    assert!((2..=3).contains(&stats.rounds.len()), "{} rounds", stats.rounds.len());
}

#[test]
fn user_switches_to_post_copy_in_the_middle() {
    let mut scenario = scenario();
    scenario.source.post_copy = PostCopy::Never;
    scenario.source.max_rounds = RoundLimit::new(1000).unwrap();
    let orders = scenario.orders.clone();
    let change = Change { post_copy: Some(PostCopy::Now), ..Change::default() };
    run(&scenario, taker(), |report| {
        if matches!(report, Report::RoundStarted { round: 1, .. }) {
            orders.change(change);
        }
    });
}

fn assert_kept(
    scenario: &Scenario,
    destination: DestinationGuest,
    watch: impl FnMut(&Report),
) -> MigrateError {
    let (outcome, received) = scenario.run(random_guest(HOT), destination, watch);
    let (vm, error): (SourceGuest, _) = kept(outcome);
    vm.guest.wait_for_work();
    vm.guest.pause();
    let mut page = vec![0; PAGE_SIZE];
    vm.guest.memory.read_at(address(HOT - 1), &mut page).unwrap();
    assert!(page[8..PAGE_SIZE - 8] == random(HOT - 1)[8..PAGE_SIZE - 8]);
    let _ = nothing(received);
    error
}

#[test]
fn destination_that_can_not_fetch_refuses_before_anything_is_sent() {
    let error = assert_kept(&scenario(), DestinationGuest::default(), |report| {
        assert!(!matches!(report, Report::RoundStarted { .. }));
    });
    let MigrateError::NoPostCopy { why } = &error else { panic!("{error}") };
    assert_eq!(why, "the destination: these tests do not let it");
    assert_eq!(error.class(), ErrorClass::Incompatible);
}

#[test]
fn guest_that_is_not_committed_runs_on_at_the_source() {
    let paused = scenario();
    let orders = paused.orders.clone();
    let error = assert_kept(&paused, taker(), |report| {
        if matches!(report, Report::PostCopy { .. }) {
            orders.cancel();
        }
    });
    assert_eq!(error.class(), ErrorClass::Cancelled);
    assert_kept(&scenario(), DestinationGuest { fail_load: true, ..taker() }, |_| {});
}
