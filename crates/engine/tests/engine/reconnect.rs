//! A migration survives its link: lost channels are reestablished, and nothing sent on them is
//! lost.

use std::sync::Arc;
use std::time::Duration;

use crate::support::cutter::{Channels, Cut, Cutter};
use crate::support::logs::LateLog;
use crate::support::{
    DestinationGuest, PAGES, Scenario, SourceGuest, given, kept, nothing, owned, running_guest,
    test_all,
};
use vmferry::destination::Received;
use vmferry::source::{Report, SourceOutcome};
use vmferry::stats::SourceStats;
use vmferry::{ErrorClass, SourceVm};
use vmferry_memory::whole_hash;
use vmferry_net_lab::{DESTINATION_ADDRESS, Namespaces};
use vmferry_transport::Address;

/// Rounds that always occur with the guest running, before the paused one.
const ROUNDS: u32 = 2;

fn lasts() -> Duration {
    if test_all() { Duration::from_secs(5) } else { Duration::from_millis(300) }
}

struct Run {
    outcome: SourceOutcome<SourceGuest>,
    received: Received<DestinationGuest>,
    reports: Vec<Report>,
    cuts_left: usize,
}

/// Migrates a guest that writes continuously over a link that is cut.
fn run(scenario: &mut Scenario, cuts: Vec<Cut>, cut_when_paused: Option<Channels>) -> Run {
    run_guest(running_guest(PAGES / 16), scenario, cuts, cut_when_paused)
}

fn run_guest(
    vm: SourceGuest,
    scenario: &mut Scenario,
    cuts: Vec<Cut>,
    cut_when_paused: Option<Channels>,
) -> Run {
    let path = scenario.directory.path().join("link.sock");
    let cutter = Cutter::start(path, &scenario.listen_at, cuts);
    scenario.dial = Some(cutter.address());
    // As many rounds as the limit allows.
    scenario.source.downtime_limit = Duration::ZERO;
    let mut reports = Vec::new();
    let mut to_come = cut_when_paused;
    let (outcome, received) = scenario.run(vm, DestinationGuest::default(), |report| {
        if let Report::RoundStarted { round, paused: true, .. } = report
            && let Some(channels) = to_come.take()
        {
            cutter.cut(Cut { channels, round: *round, lasts: lasts() });
        }
        eprintln!("source: {report:?}");
        reports.push(report.clone());
    });
    Run { outcome, received, reports, cuts_left: cutter.left() }
}

/// Checks that both memories are equal, the guest runs on, and resent data is reported.
fn assert_whole(run: Run) -> SourceStats {
    assert_eq!(run.cuts_left, 0, "the link was cut");
    let (vm, stats) = given(run.outcome);
    let owned = owned(run.received);
    assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
    assert!(stats.reconnections > 0 && stats.link_down_ms > 0.0);
    let resent: u64 = run
        .reports
        .iter()
        .map(|report| match report {
            Report::Resent { bytes, .. } => *bytes,
            _ => 0,
        })
        .sum();
    assert_eq!(resent, stats.resent_bytes);
    let lost = |report: &&Report| matches!(report, Report::LinkLost { .. });
    let restored = |report: &&Report| matches!(report, Report::LinkRestored { .. });
    assert_eq!(
        run.reports.iter().filter(lost).count(),
        run.reports.iter().filter(restored).count()
    );
    let guest = owned.vm.guest.as_ref().unwrap();
    guest.wait_for_work();
    guest.pause();
    drop(vm);
    stats
}

#[test]
fn link_cut_in_any_round_loses_nothing() {
    for channels in [Channels::All, Channels::Lane(1), Channels::Control] {
        for round in 1..=ROUNDS {
            let cut = Cut { channels, round, lasts: lasts() };
            let stats = assert_whole(run(&mut Scenario::new(), vec![cut], None));
            assert_eq!(stats.recalls, 0, "{cut:?}");
            if channels != Channels::Control {
                assert!(stats.resent_bytes > 0, "{cut:?}: half of a frame had arrived");
            }
        }
    }
}

#[test]
fn paused_guest_runs_on_when_the_link_is_cut() {
    for channels in [Channels::All, Channels::Lane(0), Channels::Control] {
        let stats = assert_whole(run(&mut Scenario::new(), Vec::new(), Some(channels)));
        assert_eq!(stats.recalls, 1, "{channels:?}");
        assert!(stats.rounds.iter().filter(|round| round.paused).count() == 1, "{channels:?}");
    }
}

/// The round in progress when the guest was resumed was read without write protection.
#[test]
fn writes_after_an_interrupted_pause_are_sent() {
    let mut vm = running_guest(PAGES / 16);
    vm.log = Arc::new(LateLog::new(&vm.memory()));
    let stats = assert_whole(run_guest(vm, &mut Scenario::new(), Vec::new(), Some(Channels::All)));
    assert_eq!(stats.recalls, 1);
}

/// The cable is unplugged: nothing arrives, and neither side is notified.
#[test]
fn silent_link_is_reestablished() {
    let Ok(namespaces) = Namespaces::make() else {
        panic!("this test needs root: it makes network namespaces");
    };
    let namespaces = Arc::new(namespaces);
    for when_paused in [false, true] {
        let mut scenario = Scenario::new();
        let host = DESTINATION_ADDRESS.to_string();
        scenario.listen_at = Address::Tcp { host, port: 0 };
        scenario.namespaces = Some(Arc::clone(&namespaces));
        scenario.source.downtime_limit = Duration::ZERO;
        for timeouts in [&mut scenario.source.timeouts, &mut scenario.destination.timeouts] {
            // A ping is sent each second.
            timeouts.silence = Duration::from_secs(3);
        }
        let (mut reports, mut pulled) = (Vec::new(), None);
        let (outcome, received) =
            scenario.run(running_guest(PAGES / 16), DestinationGuest::default(), |report| {
                let due = match report {
                    Report::RoundStarted { round, paused, .. } => {
                        *paused == when_paused && (when_paused || *round == 2)
                    }
                    _ => false,
                };
                if due && pulled.is_none() {
                    namespaces.set_cable(false).unwrap();
                    let namespaces = Arc::clone(&namespaces);
                    pulled = Some(std::thread::spawn(move || {
                        std::thread::sleep(lasts().max(Duration::from_secs(6)));
                        namespaces.set_cable(true).unwrap();
                    }));
                }
                eprintln!("source: {report:?}");
                reports.push(report.clone());
            });
        pulled.expect("there was such a round").join().unwrap();
        let stats = assert_whole(Run { outcome, received, reports, cuts_left: 0 });
        assert_eq!(stats.recalls, u32::from(when_paused), "{stats:?}");
    }
}

#[test]
fn link_cut_in_every_round_of_one_migration_loses_nothing() {
    let cuts = (1..=ROUNDS).map(|round| Cut { channels: Channels::All, round, lasts: lasts() / 3 });
    let stats = assert_whole(run(&mut Scenario::new(), cuts.collect(), Some(Channels::All)));
    // The control channel and both lanes, each time.
    assert!(stats.reconnections >= 3 * (ROUNDS + 1), "{stats:?}");
}

#[test]
fn link_that_stays_down_ends_the_migration_and_the_guest_runs_on() {
    for channels in [Channels::All, Channels::Lane(0)] {
        let mut scenario = Scenario::new();
        scenario.source.timeouts.reconnect = Duration::from_millis(700);
        let cut = Cut { channels, round: 2, lasts: Duration::from_secs(3600) };
        let run = run(&mut scenario, vec![cut], None);
        let (vm, error) = kept(run.outcome);
        assert_eq!(error.class(), ErrorClass::LinkLost, "{error:?}");
        vm.guest.wait_for_work();
        vm.guest.pause();
        let error = nothing(run.received);
        assert_eq!(error.class(), ErrorClass::LinkLost, "{error:?}");
    }
}

#[test]
fn link_cut_without_reconnection_ends_the_migration_at_once() {
    let mut scenario = Scenario::new();
    scenario.source.timeouts.reconnect = Duration::ZERO;
    let cut = Cut { channels: Channels::Lane(1), round: 1, lasts: Duration::from_secs(3600) };
    let run = run(&mut scenario, vec![cut], None);
    let (vm, error) = kept(run.outcome);
    assert_eq!(error.class(), ErrorClass::LinkLost, "{error:?}");
    vm.guest.pause();
    assert!(!run.reports.iter().any(|report| matches!(report, Report::LinkLost { .. })));
    assert!(whole_hash(&vm.memory()).is_ok());
}
