//! Whole migrations with every encoding of pages, and with its possible failures at the source.

use std::time::Duration;

use crate::support::compressors::{Gate, breaking};
use crate::support::content::{let_work_between_rounds, mixed_guest, random_guest, text_guest};
use crate::support::{DestinationGuest, Scenario, given, kept, nothing, owned, test_all};
use vmferry::ErrorClass;
use vmferry::config::WhenStuck;
use vmferry::config::compression::{
    CompressionConfig, CompressionWay, DEFAULT_DELTA_MEMORY, WhenBusy,
};
use vmferry::config::{BandwidthCap, ChannelCount, RoundLimit, WorkerCount};
use vmferry::source::{Change, SourceOutcome};
use vmferry::stats::{FrameReasons, PageCounts, SourceStats};
use vmferry::{MigrateError, chain};
use vmferry_codec::{CompressError, Compressors, EncodeError, Method};

const WAYS: [&str; 7] = ["none", "delta", "zlib:1", "lz4", "zstd:1", "zstd:3", "auto"];

struct Case {
    way: &'static str,
    workers: u8,
    channels: u8,
    delta_memory: u64,
}

/// All cases, or a subset with each encoding and each parameter value.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, way) in WAYS.into_iter().enumerate() {
        for bits in 0..8 {
            let pick = |bit: usize| bits >> bit & 1;
            let (workers, channels) = ([1, 3][pick(0)], [1, 3][pick(1)]);
            let delta_memory = [DEFAULT_DELTA_MEMORY, 0][pick(2)];
            // Each encoding with deltas by default, and some without.
            if test_all() || bits == index % 4 || bits == index + 2 {
                cases.push(Case { way, workers, channels, delta_memory });
            }
        }
    }
    cases
}

#[test]
fn guest_arrives_intact_with_every_encoding() {
    for (number, case) in cases().into_iter().enumerate() {
        let scenario = Scenario::new();
        let mut scenario = if number % 2 == 0 { scenario } else { scenario.over_tcp() };
        scenario.source.channels = ChannelCount::new(case.channels).unwrap();
        let workers = Some(WorkerCount::new(case.workers).unwrap());
        scenario.source.compression = CompressionConfig {
            way: case.way.parse().unwrap(),
            workers,
            delta_memory: case.delta_memory,
            ..CompressionConfig::default()
        };
        scenario.destination.workers = workers;
        // Two rounds with the guest running and one with it paused: a page is kept when it is sent
        // for the second time, and is sent as a delta after that.
        scenario.source.downtime_limit = Duration::ZERO;
        let vm = mixed_guest(600);
        let guest = vm.guest.clone();
        let (outcome, received) = scenario.run(vm, DestinationGuest::default(), |report| {
            let_work_between_rounds(&guest, report);
        });
        let (_, stats) = given(outcome);
        assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
        check_statistics(&case, &stats);
        let there = owned(received).vm.guest.unwrap();
        there.wait_for_work();
        there.pause();
    }
}

/// The pages were encoded as configured, and all of them are counted.
fn check_statistics(case: &Case, stats: &SourceStats) {
    let (mut pages, mut frames) = (PageCounts::default(), FrameReasons::default());
    for round in &stats.rounds {
        assert_eq!(round.encoded.zero + round.encoded.content(), round.pages, "{round:?}");
        assert_eq!(round.encoded.zero, round.zero_pages);
        pages.add(&round.encoded);
        frames.add(&round.frames);
    }
    let name = format!("{} {} {} {}", case.way, case.workers, case.channels, case.delta_memory);
    assert_eq!(stats.encoded, pages, "{name}");
    assert_eq!(stats.compression, case.way);
    assert!(stats.rounds.len() >= 3 && pages.zero > 0, "{name}: {stats:?}");
    let FrameReasons { fixed, best, waiting, trial } = frames;
    let of_algorithms = [pages.zlib, pages.lz4, pages.zstd];
    let deltas = case.delta_memory > 0;
    match case.way.parse().unwrap() {
        CompressionWay::Off => {
            assert_eq!((pages.raw, pages.delta), (pages.content(), 0), "{name}");
            assert_eq!((pages.random, pages.grown), (0, 0), "{name}: none was tried");
        }
        CompressionWay::Delta => {
            assert_eq!((of_algorithms, pages.delta > 0), ([0; 3], deltas), "{name}");
            assert!(pages.raw > 0);
        }
        CompressionWay::Fixed(method) => {
            let mut own = [false; 3];
            own[usize::from(method.algorithm().number()) - 1] = true;
            // In the order of the algorithms' numbers.
            let by_number = [pages.zlib, pages.zstd, pages.lz4];
            assert_eq!(by_number.map(|pages| pages > 0), own, "{name}: {pages:?}");
            assert_eq!(pages.delta > 0, deltas, "{name}: {pages:?}");
            assert!(pages.random > 0, "{name}: {pages:?}");
        }
        CompressionWay::Auto => {
            // On a link without a cap deltas may not be worthwhile.
            assert!(deltas || pages.delta == 0, "{name}: {pages:?}");
            assert!(fixed == 0 && best + waiting + trial > 0, "{name}: {frames:?}");
            return;
        }
    }
    assert!(fixed > 0 && best + trial == 0, "{name}: {frames:?}");
    let may_wait = matches!(case.way.parse(), Ok(CompressionWay::Fixed(_)));
    assert!(may_wait || waiting == 0, "{name}: {frames:?}");
}

#[test]
fn compressor_failure_leaves_the_guest_running_and_is_named() {
    let none = Compressors::new(|method| {
        let reason = "no card in this host".to_owned();
        Err(CompressError::Unavailable { method, reason })
    });
    for (compressors, says) in [
        (breaking(1), "the card is on fire"),
        (breaking(7), "the card is on fire"),
        (none, "no card in this host"),
    ] {
        let mut scenario = Scenario::new();
        scenario.source.compression.way = CompressionWay::Fixed(Method::zstd(1));
        // Otherwise the later calls might never happen.
        scenario.source.compression.when_busy = WhenBusy::Wait;
        scenario.source.compression.compressors = compressors;
        let (outcome, received) =
            scenario.run(text_guest(1000, 300), DestinationGuest::default(), |_| {});
        let (vm, error) = kept(outcome);
        vm.guest.wait_for_work();
        assert_eq!(error.class(), ErrorClass::Internal);
        let MigrateError::Compression { source, .. } = &error else { panic!("{error}") };
        let source = source.downcast_ref::<EncodeError>().unwrap();
        let said = chain(&error);
        for part in ["lane ", "slot 0", &format!("page {} of", source.page), "zstd:1", says] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(source.page < 1000, "{said}");
        let ended = nothing(received);
        assert_eq!(ended.class(), ErrorClass::Internal);
        assert!(chain(&ended).contains("compression failed on lane"), "{}", chain(&ended));
        // The same guest can be migrated later.
        let mut scenario = Scenario::new();
        scenario.source.compression.way = CompressionWay::Fixed(Method::zstd(1));
        let (outcome, received) = scenario.run(vm, DestinationGuest::default(), |_| {});
        assert_eq!(given(outcome).1.verify_match, Some(true));
        owned(received).vm.guest.unwrap().pause();
    }
}

#[test]
fn wait_policy_sends_nothing_before_the_compressors_are_done() {
    let gate = Gate::default();
    let mut scenario = Scenario::new();
    scenario.source.compression = CompressionConfig {
        way: CompressionWay::Fixed(Method::lz4()),
        when_busy: WhenBusy::Wait,
        workers: Some(WorkerCount::new(2).unwrap()),
        compressors: gate.holds_all(),
        ..CompressionConfig::default()
    };
    let orders = scenario.orders.clone();
    let stats = std::thread::scope(|scope| {
        let held = scope.spawn(|| {
            gate.await_waiting(2);
            let sent = orders.progress().sent_content_pages;
            gate.open(usize::MAX);
            sent
        });
        let (outcome, received) =
            scenario.run(text_guest(1000, 300), DestinationGuest::default(), |_| {});
        owned(received).vm.guest.unwrap().pause();
        assert_eq!(held.join().unwrap(), 0, "both workers were held with the first frames");
        given(outcome).1
    });
    assert_eq!(stats.encoded.raw, stats.encoded.grown, "{:?}", stats.encoded);
    assert!(stats.rounds.iter().all(|round| round.frames.waiting == 0));
}

/// One worker is blocked for as long as the other one takes for the rest of the round.
#[test]
fn compressor_that_hangs_delays_only_its_frame() {
    let gate = Gate::default();
    let mut scenario = Scenario::new();
    scenario.source.channels = ChannelCount::new(2).unwrap();
    scenario.source.compression = CompressionConfig {
        way: CompressionWay::Fixed(Method::lz4()),
        when_busy: WhenBusy::Raw,
        workers: Some(WorkerCount::new(2).unwrap()),
        compressors: gate.holds_first(),
        ..CompressionConfig::default()
    };
    let orders = scenario.orders.clone();
    let stats = std::thread::scope(|scope| {
        scope.spawn(|| {
            gate.await_waiting(1);
            // All but one frame of 64 pages, including those of its own lane.
            while orders.progress().sent_content_pages < 1024 - 64 {
                std::thread::yield_now();
            }
            gate.open(usize::MAX);
        });
        let (outcome, received) =
            scenario.run(text_guest(1024, 300), DestinationGuest::default(), |_| {});
        owned(received).vm.guest.unwrap().pause();
        given(outcome).1
    });
    assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
}

#[test]
fn bandwidth_cap_can_be_lifted_during_the_migration() {
    let mut scenario = Scenario::new();
    // Under this cap the migration would take minutes.
    scenario.source.max_bandwidth = Some(BandwidthCap::new(64 << 10).unwrap());
    scenario.source.compression.way = CompressionWay::Off;
    let orders = scenario.orders.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while orders.progress().sent_bytes == 0 {
                std::thread::yield_now();
            }
            orders.change(Change { max_bandwidth: Some(None), ..Change::default() });
        });
        let (outcome, received) =
            scenario.run(mixed_guest(100), DestinationGuest::default(), |_| {});
        assert_eq!(given(outcome).1.verify_match, Some(true));
        owned(received).vm.guest.unwrap().pause();
    });
}

/// The hot pages take over half a second uncompressed, and almost no time as deltas.
#[test]
fn auto_compression_converges_where_raw_does_not() {
    let attempt = |way| {
        let mut scenario = Scenario::new();
        scenario.source.compression.way = way;
        scenario.source.when_stuck = WhenStuck::Refuse;
        scenario.source.max_bandwidth = Some(BandwidthCap::new(1 << 20).unwrap());
        // The rewritten pages take 1170 ms uncompressed.
        scenario.source.downtime_limit = Duration::from_millis(450);
        scenario.source.max_rounds = RoundLimit::new(3).unwrap();
        let vm = random_guest(300);
        let guest = vm.guest.clone();
        scenario.run(vm, DestinationGuest::default(), |report| {
            let_work_between_rounds(&guest, report);
        })
    };
    let (outcome, received) = attempt(CompressionWay::Off);
    let (vm, error) = kept(outcome);
    assert_eq!(error.class(), ErrorClass::NotConverging, "{error}");
    vm.guest.wait_for_work();
    vm.guest.pause();
    nothing(received);

    let (outcome, received) = attempt(CompressionWay::Auto);
    let (_, stats) = given(outcome);
    assert!(stats.encoded.delta > 0 && stats.verify_match == Some(true), "{stats:?}");
    owned(received).vm.guest.unwrap().pause();
}

#[test]
fn lost_page_is_detected_despite_compression_and_deltas() {
    for way in [CompressionWay::Delta, CompressionWay::Fixed(Method::zstd(1))] {
        let mut scenario = Scenario::new();
        scenario.source.compression.way = way;
        scenario.source.downtime_limit = Duration::ZERO;
        let (outcome, received) = scenario.run_forgetful(mixed_guest(500));
        let (vm, error) = match outcome {
            SourceOutcome::Kept { vm, error, stats } => {
                assert!(stats.encoded.delta > 0, "{stats:?}");
                (vm, error)
            }
            SourceOutcome::Given { .. } | SourceOutcome::Lost { .. } => panic!("{way}: not found"),
        };
        assert!(matches!(error, MigrateError::VerifyMismatch { .. }), "{error}");
        vm.guest.wait_for_work();
        vm.guest.pause();
        assert_eq!(nothing(received).class(), ErrorClass::Corrupt);
    }
}
