//! Carried guests: every byte arrives as it was written, whatever happens to the link.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::cutter::{Channels, Cut, Cutter};
use crate::support::streamer::{Plan, Streamer};
use crate::support::taker::Taker;
use crate::support::{Scenario, given, kept, nothing, owned};
use vmferry::config::WhenStuck;
use vmferry::config::compression::CompressionWay;
use vmferry::config::{BandwidthCap, ConfigError, RoundLimit};
use vmferry::destination::Received;
use vmferry::source::{Report, SourceOutcome};
use vmferry::stats::SourceStats;
use vmferry::{ErrorClass, MigrateError};
use vmferry_codec::Method;

fn scenario() -> Scenario {
    let mut scenario = Scenario::new();
    scenario.source.verify = false;
    scenario
}

/// Checks that both ends have the same bytes, and the guest runs at one of them.
fn assert_arrived((outcome, received): (SourceOutcome<Streamer>, Received<Taker>)) -> SourceStats {
    let (vm, stats) = given(outcome);
    let taker = owned(received).vm;
    let (written, taken) = (vm.written.lock().unwrap(), taker.taken.lock().unwrap());
    assert_eq!(written.len(), taken.len());
    for (stream, (written, taken)) in written.iter().zip(taken.iter()).enumerate() {
        assert!(written.len() > 1 << 20, "there is something to compare");
        assert!(written == taken, "stream {stream} differs from what was written");
    }
    assert!(!vm.runs.load(Ordering::SeqCst) && taker.runs.load(Ordering::SeqCst));
    assert_eq!(stats.digest_match, Some(true));
    stats
}

/// Checks that the guest runs at the source and never ran at the destination.
fn assert_kept((outcome, received): (SourceOutcome<Streamer>, Received<Taker>)) -> MigrateError {
    let (vm, error) = kept(outcome);
    assert!(vm.runs.load(Ordering::SeqCst), "{error}");
    nothing(received);
    error
}

#[test]
fn streams_arrive_byte_for_byte() {
    let ways = [
        CompressionWay::Off,
        CompressionWay::Delta,
        CompressionWay::Fixed(Method::lz4()),
        CompressionWay::Fixed(Method::zstd(1)),
        CompressionWay::Auto,
    ];
    for way in ways {
        for streams in [1, 3] {
            let mut scenario = scenario();
            scenario.source.compression.way = way;
            let plan = Plan { streams, ..Plan::default() };
            let (pages, hot) = (plan.pages, plan.hot);
            let vm = Streamer::new(plan);
            let stats = assert_arrived(scenario.run_streamed(vm, Taker::default(), |_| {}));
            let sent = u64::from(streams) * (pages + 3 * hot + hot / 2);
            let counted = stats.encoded.content() + stats.encoded.zero;
            assert_eq!(counted, sent, "{way}: every page was recognised");
            assert!(stats.rounds.len() >= 4 && stats.rounds.last().unwrap().paused, "{way}");
            assert!(stats.downtime_ms > 0.0 && stats.predicted_downtime_ms == 7.0);
            match way {
                CompressionWay::Off => assert_eq!(stats.encoded.raw, stats.encoded.content()),
                CompressionWay::Delta => assert!(stats.encoded.delta > hot / 2, "{stats:?}"),
                CompressionWay::Fixed(_) => assert!(stats.compression_ratio > 1.2, "{stats:?}"),
                CompressionWay::Auto => {}
            }
        }
    }
}

#[test]
fn streams_without_recognized_pages_arrive_as_bytes() {
    for recognised in [0, 1 << 20] {
        let plan = Plan { streams: 2, recognised, ..Plan::default() };
        let pages = 2 * plan.pages;
        let vm = Streamer::new(plan);
        let stats = assert_arrived(scenario().run_streamed(vm, Taker::default(), |_| {}));
        let counted = stats.encoded.content() + stats.encoded.zero;
        assert_eq!(counted > 0, recognised > 0, "{stats:?}");
        assert!(counted < pages, "{stats:?}");
    }
}

#[test]
fn streams_survive_a_broken_link() {
    for channels in [Channels::All, Channels::Control, Channels::Lane(0)] {
        let mut scenario = scenario();
        scenario.source.max_bandwidth = Some(BandwidthCap::new(8 << 20).unwrap());
        scenario.source.compression.way = CompressionWay::Delta;
        let path = scenario.directory.path().join("link.sock");
        let cutter = Cutter::start(path, &scenario.listen_at, Vec::new());
        scenario.dial = Some(cutter.address());
        let vm = Streamer::new(Plan { streams: 2, ..Plan::default() });
        let cut = |report: &Report| {
            if let Report::RoundStarted { round: 2, .. } = report {
                cutter.cut(Cut { channels, round: 2, lasts: Duration::from_millis(300) });
            }
        };
        let stats = assert_arrived(scenario.run_streamed(vm, Taker::default(), cut));
        assert!(stats.reconnections > 0 && stats.link_down_ms > 0.0, "{stats:?}");
    }
}

#[test]
fn paused_carried_guest_runs_on_when_the_link_is_lost() {
    for channels in [Channels::All, Channels::Control, Channels::Lane(0)] {
        let mut scenario = scenario();
        // The remaining data takes a while.
        scenario.source.max_bandwidth = Some(BandwidthCap::new(4 << 20).unwrap());
        scenario.source.compression.way = CompressionWay::Off;
        let path = scenario.directory.path().join("link.sock");
        let cutter = Cutter::start(path, &scenario.listen_at, Vec::new());
        scenario.dial = Some(cutter.address());
        scenario.destination.timeouts.reconnect = Duration::from_millis(100);
        let vm = Streamer::new(Plan { hot: 1000, pages: 1000, ..Plan::default() });
        let cut = |report: &Report| {
            if let Report::RoundStarted { round, paused: true, .. } = report {
                cutter.cut(Cut { channels, round: *round, lasts: Duration::from_secs(60) });
            }
        };
        let error = assert_kept(scenario.run_streamed(vm, Taker::default(), cut));
        assert_eq!(error.class(), ErrorClass::LinkLost, "{channels:?}: {error}");
    }
}

#[test]
fn carried_guest_canceled_in_any_phase_stays() {
    let moments: [fn(&Report) -> bool; 3] = [
        |report| matches!(report, Report::RoundStarted { round: 1, .. }),
        |report| matches!(report, Report::RoundDone(round) if round.round == 2),
        |report| matches!(report, Report::RoundStarted { paused: true, .. }),
    ];
    for moment in moments {
        let scenario = scenario();
        let orders = scenario.orders.clone();
        let vm = Streamer::new(Plan { streams: 2, ..Plan::default() });
        let cancel = |report: &Report| {
            if moment(report) {
                orders.cancel();
            }
        };
        let error = assert_kept(scenario.run_streamed(vm, Taker::default(), cancel));
        assert_eq!(error.class(), ErrorClass::Cancelled, "{error}");
    }
}

/// A VMM that must end its migration discards what it still writes, while the engine reads too.
/// What reaches the destination must be a prefix of the stream without gaps, which the VMM there
/// could not handle.
#[test]
fn canceled_stream_is_a_prefix_without_gaps() {
    let scenario = scenario();
    let orders = scenario.orders.clone();
    let vm = Streamer::new(Plan { streams: 2, hot: 1500, drains: true, ..Plan::default() });
    let taker = Taker::default();
    let (written, taken) = (Arc::clone(&vm.written), Arc::clone(&taker.taken));
    let cancel = |report: &Report| {
        if matches!(report, Report::RoundStarted { paused: true, .. }) {
            orders.cancel();
        }
    };
    let error = assert_kept(scenario.run_streamed(vm, taker, cancel));
    assert_eq!(error.class(), ErrorClass::Cancelled, "{error}");
    let (written, taken) = (written.lock().unwrap(), taken.lock().unwrap());
    for (written, taken) in written.iter().zip(&*taken) {
        assert!(!taken.is_empty() && taken.len() < written.len());
        let hole = written.iter().zip(taken).position(|(written, taken)| written != taken);
        assert_eq!(hole, None, "of {} bytes", taken.len());
    }
}

#[test]
fn refused_stream_is_reported_with_the_vmms_reason() {
    let scenario = scenario();
    let taker = Taker { refuses_after: Some(1 << 20), ..Taker::default() };
    let vm = Streamer::new(Plan::default());
    let (outcome, received) = scenario.run_streamed(vm, taker, |_| {});
    let (vm, error) = kept(outcome);
    assert!(vm.runs.load(Ordering::SeqCst));
    assert!(error.to_string().contains("load the guest's state"), "{error}");
    let why = vmferry::chain(&nothing(received));
    assert!(why.contains("section `cpu` is damaged"), "{why}");
}

/// QEMU closes its channels once it has loaded the guest, whether or not their last bytes, which it
/// does not need, have come.
#[test]
fn streams_may_close_after_the_guest_is_loaded() {
    let taker = Taker { loaded_after: Some(1 << 20), ..Taker::default() };
    let (outcome, received) =
        scenario().run_streamed(Streamer::new(Plan::default()), taker, |_| {});
    let (_, stats) = given(outcome);
    assert_eq!(stats.digest_match, Some(true));
    assert!(owned(received).vm.runs.load(Ordering::SeqCst));
}

#[test]
fn missing_streams_end_the_migration() {
    let scenario = scenario();
    let vm = Streamer::new(Plan { streams: 2, one_less: true, ..Plan::default() });
    let (outcome, received) = scenario.run_streamed(vm, Taker::default(), |_| {});
    let (vm, error) = kept(outcome);
    assert!(vmferry::chain(&error).contains("1 streams instead of 2"), "{error}");
    assert!(vm.is_ended(), "its own migration goes on");
    nothing(received);
}

/// Bytes that one VMM has written and the other has not read: windows, queues and socket buffers.
const MOST_ON_THE_WAY: u64 = 24 << 20;

#[test]
fn destination_vmm_that_reads_nothing_blocks_the_source_vmm() {
    let scenario = scenario();
    let stalls = Arc::new(AtomicBool::new(true));
    let taker = Taker { stalls: Arc::clone(&stalls), ..Taker::default() };
    let vm = Streamer::new(Plan { pages: 20_000, ..Plan::default() });
    let so_far = Arc::clone(&vm.so_far);
    let watching = std::thread::spawn(move || {
        let mut before = 0;
        loop {
            // Only a long time without progress shows that it is blocked.
            std::thread::sleep(Duration::from_millis(500));
            let now = so_far.load(Ordering::SeqCst);
            if now > 0 && now == before {
                break;
            }
            before = now;
        }
        stalls.store(false, Ordering::SeqCst);
        before
    });
    assert_arrived(scenario.run_streamed(vm, taker, |_| {}));
    let stood_at = watching.join().unwrap();
    assert!(stood_at > 0 && stood_at < MOST_ON_THE_WAY, "{stood_at} bytes on their way");
}

#[test]
fn carried_guest_that_does_not_converge_is_ended_or_forced() {
    let plan = || Plan { until: Arc::new(AtomicBool::new(false)), hot: 1000, ..Plan::default() };
    let slow = || {
        let mut scenario = scenario();
        scenario.source.max_bandwidth = Some(BandwidthCap::new(20 << 20).unwrap());
        scenario.source.downtime_limit = Duration::from_millis(20);
        scenario.source.max_rounds = RoundLimit::new(3).unwrap();
        scenario.source.compression.way = CompressionWay::Off;
        scenario
    };
    let mut refusing = slow();
    refusing.source.when_stuck = WhenStuck::Refuse;
    let error = assert_kept(refusing.run_streamed(Streamer::new(plan()), Taker::default(), |_| {}));
    let MigrateError::NotConverging(why) = &error else { panic!("{error}") };
    let why = &why.measures;
    assert!(why.rounds == 3 && why.link_bytes_per_s > 0.0, "{why:?}");
    // On a machine of any speed, the prediction is the remaining data at that rate plus the fixed
    // cost.
    let pending_ms = why.pending_bytes / why.link_bytes_per_s * 1e3;
    let predicted_ms = pending_ms + why.fixed_cost_ms;
    assert!((why.predicted_downtime_ms - predicted_ms).abs() < 1.0, "{predicted_ms}: {why:?}");
    assert!(why.pending_bytes >= 4096.0 * 900.0, "{why:?}");

    let forcing = slow();
    let vm = Streamer::new(plan());
    let downtime = Arc::clone(&vm.downtime);
    assert_arrived(forcing.run_streamed(vm, Taker::default(), |_| {}));
    assert!(*downtime.lock().unwrap() > Duration::from_secs(100));
}

#[test]
fn verify_is_refused_for_a_carried_guest() {
    let scenario = Scenario::new();
    scenario.stop.stop();
    let error = assert_kept(scenario.run_streamed(
        Streamer::new(Plan::default()),
        Taker::default(),
        |_| {},
    ));
    assert!(matches!(error, MigrateError::Config(ConfigError::NothingToVerify)), "{error}");
}
