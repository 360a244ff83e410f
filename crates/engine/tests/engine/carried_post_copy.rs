//! Carried guests whose VMM uses its own post-copy: its streams go on through tunnels.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::support::cutter::{Channels, Cutter};
use crate::support::streamer::{Plan, Streamer};
use crate::support::taker::Taker;
use crate::support::{Scenario, given, kept, nothing, owned};
use vmferry::config::{BandwidthCap, PostCopy};
use vmferry::destination::Received;
use vmferry::source::{Report, SourceOutcome};
use vmferry::{ErrorClass, MigrateError};

/// Requests that the guest makes while it runs at the destination.
const REQUESTS: u64 = 300;

/// A guest that never stops by itself, and a destination for it.
fn never_stops() -> (Scenario, Streamer, Taker) {
    let mut scenario = Scenario::new();
    scenario.source.verify = false;
    scenario.source.post_copy = PostCopy::Now;
    scenario.source.downtime_limit = Duration::from_millis(1);
    scenario.source.max_bandwidth = Some(BandwidthCap::new(16 << 20).unwrap());
    let until = Arc::new(AtomicBool::new(false));
    let plan = Plan { until, passes: 1, post_copy: Some(4321), ..Plan::default() };
    (scenario, Streamer::new(plan), Taker { requests: Some(REQUESTS), ..Taker::default() })
}

/// Checks that every byte has arrived and that the guest runs at the destination.
fn assert_arrived((outcome, received): (SourceOutcome<Streamer>, Received<Taker>)) {
    let (mut vm, stats) = given(outcome);
    assert_eq!((stats.missing_pages, stats.digest_match), (4321, Some(true)), "{stats:?}");
    let mut taker = owned(received).vm;
    assert!(!vm.runs.load(Ordering::SeqCst) && taker.runs.load(Ordering::SeqCst));
    vm.end();
    taker.readers.drain(..).for_each(|reader| reader.join().unwrap());
    let (written, taken) = (vm.written.lock().unwrap(), taker.taken.lock().unwrap());
    // What is on its way when the destination needs nothing more need not arrive.
    let (written, taken) = (&written[0], &taken[0]);
    assert!(taken.len() > 1 << 20 && *taken == written[..taken.len()], "{} bytes", taken.len());
}

#[test]
fn requests_are_answered_while_the_guest_runs_at_the_destination() {
    let (scenario, vm, taker) = never_stops();
    let mut seen = Vec::new();
    let ended = scenario.run_streamed(vm, taker, |report| match report {
        Report::PostCopy { pages, .. } | Report::Serving { pages } => seen.push(*pages),
        _ => {}
    });
    assert_arrived(ended);
    assert_eq!(seen, [4321, 4321]);
}

#[test]
fn broken_links_delay_the_requests() {
    for channels in [Channels::All, Channels::Control, Channels::Lane(1), Channels::Lane(2)] {
        let (mut scenario, vm, taker) = never_stops();
        let path = scenario.directory.path().join("link.sock");
        let cutter = Cutter::start(path, &scenario.listen_at, Vec::new()).with_tunnels_from(1);
        scenario.dial = Some(cutter.address());
        let mut losses = 0;
        let ended = scenario.run_streamed(vm, taker, |report| match report {
            Report::Serving { .. } => {
                cutter.cut_now(channels, Duration::from_millis(300));
            }
            Report::LinkLost { .. } => losses += 1,
            _ => {}
        });
        assert_arrived(ended);
        assert!(losses > 0, "{channels:?}: nothing was lost");
    }
}

#[test]
fn guest_whose_vmm_has_no_post_copy_stays_or_moves_without() {
    for (policy, here, there) in [
        (PostCopy::Now, None, Some(1)),
        (PostCopy::Now, Some(1), None),
        (PostCopy::Auto, None, Some(1)),
        (PostCopy::Auto, Some(1), None),
    ] {
        let (mut scenario, _, _) = never_stops();
        scenario.source.post_copy = policy;
        scenario.source.downtime_limit = Duration::from_secs(60);
        let vm = Streamer::new(Plan { post_copy: here, ..Plan::default() });
        let taker = Taker { requests: there, ..Taker::default() };
        let mut unavailable = None;
        let (outcome, received) = scenario.run_streamed(vm, taker, |report| {
            if let Report::PostCopyUnavailable { why } = report {
                unavailable = Some(why.clone());
            }
        });
        let why = match policy {
            PostCopy::Now => {
                let (vm, error) = kept(outcome);
                nothing(received);
                assert!(vm.runs.load(Ordering::SeqCst));
                assert!(matches!(error, MigrateError::NoPostCopy { .. }), "{error}");
                assert_eq!(error.class(), ErrorClass::Incompatible);
                error.to_string()
            }
            _ => {
                let (_, stats) = given(outcome);
                assert_eq!(stats.missing_pages, 0);
                owned(received);
                unavailable.unwrap_or_default()
            }
        };
        assert!(why.contains("it has no post-copy"), "{why}");
    }
}

#[test]
fn guest_that_fits_the_limit_moves_without() {
    let (mut scenario, _, taker) = never_stops();
    scenario.source.post_copy = PostCopy::Auto;
    scenario.source.downtime_limit = Duration::from_secs(60);
    let vm = Streamer::new(Plan { post_copy: Some(7), ..Plan::default() });
    let (outcome, received) = scenario.run_streamed(vm, taker, |_| {});
    let (vm, stats) = given(outcome);
    assert_eq!((stats.missing_pages, stats.digest_match), (0, Some(true)));
    let taker = owned(received).vm;
    assert_eq!(*vm.written.lock().unwrap(), *taker.taken.lock().unwrap());
}

/// The VMM comes to the end of its pre-copy just when it is told to begin post-copy.
#[test]
fn guest_that_its_vmm_has_stopped_first_moves_without() {
    let (scenario, _, taker) = never_stops();
    let until = Arc::new(AtomicBool::new(false));
    let plan = Plan { until, passes: 1, post_copy: Some(7), stops_first: true, ..Plan::default() };
    let (outcome, received) = scenario.run_streamed(Streamer::new(plan), taker, |_| {});
    let (vm, stats) = given(outcome);
    assert_eq!((stats.missing_pages, stats.digest_match), (0, Some(true)));
    let taker = owned(received).vm;
    assert_eq!(*vm.written.lock().unwrap(), *taker.taken.lock().unwrap());
}

/// When a link is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// The source has stopped the guest.
    Stopped,
    /// The destination loads the guest.
    Loading,
}

/// Until COMMIT every failure lets the guest run on at the source. The destination is not ready
/// before the source has noticed the loss, or has ended because of it: otherwise the guest may
/// already be given by then.
#[test]
fn guest_stays_if_the_link_is_lost_before_it_is_given() {
    let channels = [Channels::All, Channels::Control, Channels::Lane(1), Channels::Lane(2)];
    let at = |moment| channels.map(|channels| (moment, channels));
    for (moment, channels) in at(Moment::Stopped).into_iter().chain(at(Moment::Loading)) {
        let (mut scenario, vm, mut taker) = never_stops();
        let path = scenario.directory.path().join("link.sock");
        let cutter = Cutter::start(path, &scenario.listen_at, Vec::new()).with_tunnels_from(1);
        scenario.dial = Some(cutter.address());
        scenario.source.timeouts.reconnect = Duration::from_millis(100);
        // A destination that is ready can't be told any more.
        scenario.destination.timeouts.commit = Duration::from_millis(100);
        let cutter = Arc::new(cutter);
        let cut_at = move |now| {
            if now == moment {
                cutter.cut_now(channels, Duration::from_secs(600));
            }
        };
        let (noticed, is_noticed) = channel();
        taker.on_load = Some(Box::new({
            let cut_at = cut_at.clone();
            move || {
                cut_at(Moment::Loading);
                // A source that ends sends nothing, and drops the sender.
                let _ = is_noticed.recv();
            }
        }));
        let (outcome, received) = scenario.run_streamed(vm, taker, move |report| match report {
            Report::PostCopy { .. } => cut_at(Moment::Stopped),
            Report::LinkLost { .. } => drop(noticed.send(())),
            _ => {}
        });
        let (vm, error) = kept(outcome);
        assert!(vm.runs.load(Ordering::SeqCst), "{moment:?}, {channels:?}: {error}");
        nothing(received);
    }
}
