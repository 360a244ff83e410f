//! Whole migrations of a guest that writes its memory continuously.

use std::sync::Arc;
use std::time::Duration;

use crate::hostile::by_hand::Pki;
use crate::support::{
    DestinationGuest, Scenario, SourceGuest, given, journals, kept, nothing, owned, running_guest,
};
use vmferry::ErrorClass;
use vmferry::MigrateError;
use vmferry::config::compression::CompressionWay;
use vmferry::config::{BandwidthCap, ChannelCount, ProtocolVersions, RoundLimit, WhenStuck};
use vmferry::source::{Report, SourceOutcome};
use vmferry_handover::journal::{Record, Side, Verdict};
use vmferry_net_lab::{DESTINATION_ADDRESS, Direction, Namespaces};
use vmferry_transport::Address;

#[test]
fn writing_guest_arrives_intact_and_runs_on() {
    for (channels, hot) in [(1, 300), (2, 4096), (4, 1000), (16, 3000)] {
        let mut scenario = Scenario::new();
        scenario.source.channels = ChannelCount::new(channels).unwrap();
        let vm = running_guest(hot);
        vm.guest.wait_for_work();
        let guest = vm.guest.clone();
        let (outcome, received) = scenario.run(vm, DestinationGuest::default(), |_| {});
        let (_, stats) = given(outcome);
        assert!(!guest.is_running(), "the source's guest is paused");
        assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
        assert!(stats.rounds.len() >= 2, "{stats:?}");
        assert!(stats.rounds.last().is_some_and(|round| round.paused));
        assert!(stats.downtime_ms > 0.0 && stats.total_ms >= stats.downtime_ms, "{stats:?}");
        let received = owned(received);
        let there = received.vm.guest.as_ref().unwrap();
        there.wait_for_work();
        there.pause();
        let sessions = journals(scenario.directory.path());
        let verdicts: Vec<Verdict> = sessions.iter().map(|session| session.verdict).collect();
        assert_eq!(verdicts, [Verdict::There, Verdict::Here], "the destination has it");
        assert!(received.stats.content_pages + received.stats.zero_pages > 0);
    }
}

/// A destination that is in its VMM for longer than the silence timeout sends keepalives, and
/// afterwards reads those of the source.
#[test]
fn slow_prepare_and_load_do_not_count_as_silence() {
    in_both_ways(|mut scenario| {
        for timeouts in [&mut scenario.source.timeouts, &mut scenario.destination.timeouts] {
            timeouts.silence = Duration::from_secs(6);
        }
        let destination =
            DestinationGuest { slow: Duration::from_secs(9), ..DestinationGuest::default() };
        let (outcome, received) = scenario.run(running_guest(100), destination, |_| {});
        let (_, stats) = given(outcome);
        assert_eq!((stats.reconnections, stats.recalls), (0, 0), "the link was taken for lost");
        owned(received).vm.guest.unwrap().pause();
    });
}

/// Over a channel that buffers messages ahead of their reader, and over one whose peer must have
/// read each message before the next is sent.
fn in_both_ways(run: impl Fn(Scenario) + Sync) {
    std::thread::scope(|scope| {
        scope.spawn(|| run(Scenario::new()));
        scope.spawn(|| {
            let (mut scenario, pki) = (Scenario::new(), Pki::new());
            scenario.identities = Some(["source", "destination"].map(|name| pki.identity(name)));
            scenario.listen_at = "grpc-ack:127.0.0.1:0".parse().unwrap();
            run(scenario);
        });
    });
}

/// The other direction: neither side treats the other as silent.
#[test]
fn slow_pause_and_save_do_not_count_as_silence() {
    in_both_ways(|mut scenario| {
        for timeouts in [&mut scenario.source.timeouts, &mut scenario.destination.timeouts] {
            timeouts.silence = Duration::from_secs(6);
        }
        let guest = SourceGuest { slow: Duration::from_secs(9), ..running_guest(100) };
        let (outcome, received) = scenario.run(guest, DestinationGuest::default(), |_| {});
        let (_, stats) = given(outcome);
        assert_eq!((stats.reconnections, stats.recalls), (0, 0), "the link was taken for lost");
        owned(received).vm.guest.unwrap().pause();
    });
}

/// Each frame takes a second, and four of each lane are acknowledged at once.
#[test]
fn slow_data_over_many_channels_does_not_count_as_a_stall() {
    let mut scenario = Scenario::new();
    scenario.source.channels = ChannelCount::new(16).unwrap();
    scenario.source.max_bandwidth = Some(BandwidthCap::new(256 << 10).unwrap());
    scenario.source.compression.way = CompressionWay::Off;
    scenario.source.max_rounds = RoundLimit::new(1).unwrap();
    for timeouts in [&mut scenario.source.timeouts, &mut scenario.destination.timeouts] {
        timeouts.stall = Duration::from_secs(6);
    }
    let (outcome, received) = scenario.run(running_guest(4), DestinationGuest::default(), |_| {});
    let (_, stats) = given(outcome);
    assert!(stats.sent_bytes > 4 << 20, "{stats:?}");
    owned(received).vm.guest.unwrap().pause();
}

/// Real network namespaces, and a link whose bandwidth becomes tiny as soon as the guest is paused.
#[test]
fn pause_is_given_up_when_the_link_slows_down_at_the_switchover() {
    let namespaces = Arc::new(Namespaces::make().expect("root, and `ip`"));
    let mut scenario = Scenario::new();
    scenario.listen_at = Address::Tcp { host: DESTINATION_ADDRESS.to_string(), port: 0 };
    scenario.namespaces = Some(Arc::clone(&namespaces));
    scenario.source.compression.way = CompressionWay::Off;
    scenario.source.downtime_limit = Duration::from_secs(2);
    scenario.source.when_stuck = WhenStuck::Refuse;
    scenario.source.max_rounds = RoundLimit::new(1000).unwrap();
    scenario.source.verify = false;
    scenario.source.downtime_abort = Some(Duration::from_secs(3));
    let (outcome, received) =
        scenario.run(running_guest(2000), DestinationGuest::default(), |report| {
            if matches!(report, Report::Paused { .. }) {
                // 8 MB take a minute.
                namespaces.slow_down(Direction::ToDestination, 1000).unwrap();
            }
        });
    let SourceOutcome::Kept { vm, error, stats } = outcome else {
        panic!("the guest was handed over")
    };
    let MigrateError::PauseTooLong { paused, bound, .. } = &error else { panic!("{error}") };
    assert!(paused >= bound && stats.downtime_ms >= 3000.0, "{error}, {stats:?}");
    assert_eq!(error.class(), ErrorClass::NotConverging);
    vm.guest.wait_for_work();
    assert_ne!(nothing(received).class(), ErrorClass::Internal);
    vm.guest.pause();
}

#[test]
fn verify_detects_a_page_lost_by_the_log_and_the_guest_runs_on() {
    let scenario = Scenario::new();
    let (outcome, received) = scenario.run_forgetful(running_guest(500));
    let (vm, error) = kept(outcome);
    assert!(matches!(error, MigrateError::VerifyMismatch { log: "userfaultfd", .. }), "{error}");
    assert_eq!(error.class(), ErrorClass::Corrupt);
    vm.guest.wait_for_work();
    assert_eq!(nothing(received).class(), ErrorClass::Corrupt);
    vm.guest.pause();
}

#[test]
fn guest_canceled_in_any_phase_stays_and_can_be_migrated_again() {
    let moments: [fn(&Report) -> bool; 6] = [
        |report| matches!(report, Report::Connected { .. }),
        |report| matches!(report, Report::RoundStarted { round: 1, .. }),
        |report| matches!(report, Report::RoundDone(round) if round.round == 2),
        |report| matches!(report, Report::Paused { .. }),
        |report| matches!(report, Report::RoundStarted { paused: true, .. }),
        |report| matches!(report, Report::Ready),
    ];
    let mut vm = running_guest(2000);
    for (number, moment) in moments.into_iter().enumerate() {
        let mut scenario = Scenario::new();
        if number == moments.len() - 1 {
            // In this version memory is compared after READY; in later ones COMMIT follows READY at
            // once.
            scenario.destination.protocol = ProtocolVersions::new(1..=1).unwrap();
        }
        let orders = scenario.orders.clone();
        let (outcome, received) = scenario.run(vm, DestinationGuest::default(), |report| {
            if moment(report) {
                orders.cancel();
            }
        });
        let (kept, error) = kept(outcome);
        assert!(matches!(error, MigrateError::Cancelled { .. }), "{error}");
        kept.guest.wait_for_work();
        assert_eq!(nothing(received).class(), ErrorClass::Cancelled);
        vm = kept;
    }
    let (outcome, received) = Scenario::new().run(vm, DestinationGuest::default(), |_| {});
    assert!(matches!(outcome, SourceOutcome::Given { .. }));
    owned(received).vm.guest.unwrap().pause();
}

#[test]
fn migration_canceled_before_its_start_does_nothing() {
    let scenario = Scenario::new();
    scenario.orders.cancel();
    scenario.stop.stop();
    let (outcome, _) = scenario.run(running_guest(10), DestinationGuest::default(), |_| {});
    let (vm, error) = kept(outcome);
    assert!(matches!(error, MigrateError::Cancelled { .. }), "{error}");
    vm.guest.pause();
}

#[test]
fn refused_guest_runs_on_and_nothing_is_left_over() {
    let scenario = Scenario::new();
    let destination = DestinationGuest { refuse: Some("db"), ..DestinationGuest::default() };
    let (outcome, received) = scenario.run(running_guest(100), destination, |_| {});
    let (vm, error) = kept(outcome);
    assert_eq!(error.class(), ErrorClass::Incompatible);
    assert!(error.to_string().contains("expects guest db"), "{error}");
    assert_eq!(nothing(received).class(), ErrorClass::Incompatible);
    vm.guest.wait_for_work();
    vm.guest.pause();
    let sessions = journals(scenario.directory.path());
    assert_eq!(sessions.len(), 1, "the destination has no journal of it");
    assert_eq!(sessions[0].verdict, Verdict::Here);
}

/// KEPT is not journaled in this case: the session stays open, so that a recovery tries to resume
/// the guest again.
#[test]
fn guest_that_can_not_be_resumed_keeps_its_session_open() {
    for stuck in [true, false] {
        let scenario = Scenario::new();
        let destination = DestinationGuest { fail_load: true, ..DestinationGuest::default() };
        let mut guest = running_guest(100);
        guest.stuck = stuck;
        let (outcome, received) = scenario.run(guest, destination, |_| {});
        let (vm, error) = kept(outcome);
        let said = matches!(error, MigrateError::Vm { action: "resume the guest", .. });
        assert_eq!(said, stuck, "the error must say that the guest is paused: {error}");
        nothing(received);
        let sessions = journals(scenario.directory.path());
        let ours = sessions.iter().find(|session| session.side == Side::Source).unwrap();
        let written = ours.records.iter().any(|record| matches!(record, Record::Kept { .. }));
        assert_eq!(written, !stuck, "{:?}", ours.records);
        if !stuck {
            vm.guest.wait_for_work();
            vm.guest.pause();
        }
    }
}

#[test]
fn failed_state_load_leaves_the_guest_at_the_source() {
    let scenario = Scenario::new();
    let destination = DestinationGuest { fail_load: true, ..DestinationGuest::default() };
    let (outcome, received) = scenario.run(running_guest(100), destination, |_| {});
    let (vm, error) = kept(outcome);
    assert!(error.to_string().contains("load the guest's state"), "{error}");
    vm.guest.wait_for_work();
    vm.guest.pause();
    assert!(vmferry::chain(&nothing(received)).contains("section `cpu` is damaged"));
}

#[test]
fn guest_that_writes_too_fast_is_given_up_with_advice() {
    let mut scenario = Scenario::new();
    scenario.source.when_stuck = vmferry::config::WhenStuck::Refuse;
    scenario.source.max_bandwidth = Some(BandwidthCap::new(4 << 20).unwrap());
    scenario.source.downtime_limit = std::time::Duration::from_millis(20);
    scenario.source.max_rounds = RoundLimit::new(2).unwrap();
    scenario.source.compression.way = vmferry::config::compression::CompressionWay::Off;
    let (outcome, received) =
        scenario.run(running_guest(2000), DestinationGuest::default(), |_| {});
    let (vm, error) = kept(outcome);
    assert_eq!(error.class(), ErrorClass::NotConverging);
    assert!(error.to_string().contains("allow a downtime of"), "{error}");
    vm.guest.wait_for_work();
    vm.guest.pause();
    nothing(received);
}
