use vmferry_handover::SourceState;
use vmferry_wire::{ControlMessage, ReasonCode, SessionWord};

use super::super::fixture::{DIGEST, after_one_round, assert_phase, harvested};
use super::*;
use crate::config::{RoundLimit, SourceConfig};
use crate::machine::source::Source;
use crate::machine::source::io::{Ending, Input, Saved};
use vmferry_handover::journal::Record;

mod recovery;

const NOW: Duration = Duration::ZERO;

fn config(policy: PostCopy) -> SourceConfig {
    let mut config = SourceConfig::new("unused".into());
    config.post_copy = policy;
    config.downtime_limit = Duration::from_millis(20);
    config
}

/// More pages than fit the downtime limit.
fn many() -> Input {
    harvested(1 << 20)
}

fn did(source: &mut Source) -> Vec<Action> {
    let counts = |action: &Action| {
        let ping = matches!(action, Action::Send(ControlMessage::Ping { .. }));
        !matches!(action, Action::Report(_) | Action::FitWindows { .. }) && !ping
    };
    std::iter::from_fn(|| source.next_action()).filter(counts).collect()
}

fn reports(source: &mut Source) -> Vec<Report> {
    let report = |action| if let Action::Report(report) = action { Some(report) } else { None };
    std::iter::from_fn(|| source.next_action()).filter_map(report).collect()
}

fn lost() -> MigrateError {
    MigrateError::Cancelled { during: "a test" }
}

/// The answer to the last ping.
fn answered(source: &Source) -> Input {
    Input::Control(ControlMessage::Pong { nonce: source.common.pings.sent })
}

/// The number of the first fetch lane: there is one data lane.
const FETCH: u8 = 1;

fn lane_lost(lane: u8, attempt: u64) -> Input {
    Input::LaneLost { lane, attempt, error: lost() }
}

/// A source whose guest is paused, and which has named the pages that the destination lacks.
fn paused() -> Source {
    let mut source = after_one_round(config(PostCopy::Now));
    let _ = did(&mut source);
    source.handle(NOW, many());
    let opens = did(&mut source);
    assert!(matches!(opens[..], [Action::TellLacking, Action::OpenFetchLanes { .. }]), "{opens:?}");
    source.handle(NOW, Input::FetchLanesJoined);
    assert_phase!(source, OpeningFetch, "the guest still runs");
    source.handle(NOW, answered(&source));
    assert!(matches!(did(&mut source)[..], [Action::Pause]));
    source.handle(NOW, Input::Paused { stood_still: NOW });
    source.handle(NOW, Input::LastHarvest { pages: 9, took: NOW });
    assert!(matches!(
        did(&mut source)[..],
        [Action::HarvestLast, Action::TellLacking, Action::SumDigest, Action::Save]
    ));
    source
}

/// A source that has sent FINAL.
fn final_sent() -> Source {
    let mut source = paused();
    source.handle(NOW, Input::Digest(DIGEST));
    source.handle(NOW, Input::Saved(Saved { took: NOW, ..Saved::default() }));
    let kind = SessionKind::PostCopy;
    match &did(&mut source)[..] {
        [
            Action::ServePages { round: 2 },
            Action::Send(ControlMessage::Final { lane_sequences, kind: sent, .. }),
        ] => assert_eq!((&lane_sequences[..], *sent), (&[1][..], kind)),
        other => panic!("{other:?}"),
    }
    source
}

fn serving() -> Source {
    let mut source = final_sent();
    let ready = ControlMessage::Ready { digest: DIGEST, load_us: 0 };
    source.handle(NOW, Input::Control(ready));
    let written = did(&mut source);
    assert!(matches!(written[..], [Action::WriteCommit(SessionKind::PostCopy)]), "{written:?}");
    source.handle(NOW, Input::CommitWritten(Ok(())));
    source.handle(NOW, answer(&source, SessionWord::Fetching));
    assert_phase!(source, Serving);
    let done = did(&mut source);
    assert!(
        matches!(
            done[..],
            [Action::Send(ControlMessage::Commit { .. }), Action::WriteOutcome(Record::Serving)]
        ),
        "{done:?}"
    );
    source
}

fn answer(source: &Source, word: SessionWord) -> Input {
    let session = source.common.config.session;
    Input::Control(ControlMessage::Answer { session, word, token: None })
}

#[test]
fn source_serves_until_the_destination_has_every_page() {
    let mut source = serving();
    let hour = Duration::from_secs(3600);
    let session = source.common.config.session;
    source.handle(hour, Input::Control(ControlMessage::Running { session, start_us: 0 }));
    assert!(matches!(source.ending(), Some(Ending::Given)));
    let stats = source.stats();
    assert_eq!((stats.missing_pages, stats.serving_ms, stats.downtime_ms), (9, 3.6e6, 0.0));
}

/// The destination has freed outdated pages by then.
#[test]
fn lost_link_before_commit_resumes_the_guest() {
    for input in [lane_lost(FETCH, 0), Input::LinkLost(lost())] {
        let mut source = final_sent();
        source.handle(NOW, input);
        assert!(matches!(source.ending(), Some(Ending::Kept(_))), "{source:?}");
    }
    let mut source = paused();
    source.handle(NOW, lane_lost(FETCH, 0));
    assert!(matches!(source.ending(), Some(Ending::Kept(_))), "{source:?}");
}

/// The data lanes have carried everything.
#[test]
fn lost_data_lane_after_final_is_not_missed() {
    let mut source = final_sent();
    source.handle(NOW, lane_lost(0, 0));
    assert_phase!(source, AwaitReady);
}

#[test]
fn guest_is_not_paused_while_a_link_is_lost() {
    let mut source = after_one_round(config(PostCopy::Now));
    source.handle(NOW, many());
    let _ = did(&mut source);
    source.handle(NOW, lane_lost(0, 0));
    source.handle(NOW, Input::FetchLanesJoined);
    assert_phase!(source, OpeningFetch, "the destination may still be freeing pages");
    source.handle(NOW, answered(&source));
    assert_phase!(source, Sending, "the round is sent as in pre-copy");
    assert_eq!(source.common.kind, SessionKind::PreCopy);
    let withdraws = |action: &Action| matches!(action, Action::Send(ControlMessage::Withdraw {}));
    assert!(did(&mut source).iter().any(withdraws), "no page is missing any more");
}

/// A destination that resumes a session has withdrawn LACKING itself.
#[test]
fn round_is_sent_once_the_control_channel_is_reestablished() {
    let mut source = after_one_round(config(PostCopy::Now));
    source.handle(NOW, many());
    source.handle(NOW, Input::LinkLost(lost()));
    source.handle(NOW, Input::FetchLanesJoined);
    assert_phase!(source, OpeningFetch);
    source.handle(NOW, Input::Resumed);
    assert_phase!(source, Sending);
}

#[test]
fn guest_is_resumed_if_a_link_is_lost_while_it_is_paused() {
    let mut source = after_one_round(config(PostCopy::Now));
    source.handle(NOW, many());
    source.handle(NOW, Input::FetchLanesJoined);
    source.handle(NOW, answered(&source));
    source.handle(NOW, lane_lost(0, 0));
    source.handle(NOW, Input::Paused { stood_still: NOW });
    source.handle(NOW, Input::LastHarvest { pages: 9, took: NOW });
    assert_phase!(source, Sending);
    assert_eq!((source.common.kind, source.common.stats.recalls), (SessionKind::PreCopy, 1));
}

/// Freeing pages takes the destination a while, in which the guest writes others.
#[test]
fn pages_written_meanwhile_are_named_too_while_that_shortens_the_pause() {
    let mut source = after_one_round(config(PostCopy::Now));
    source.handle(NOW, harvested(40_000));
    source.handle(NOW, Input::FetchLanesJoined);
    let mut now = NOW;
    for (total, takes) in [(75_000, 200), (79_000, 175), (79_100, 20)] {
        let _ = did(&mut source);
        now += Duration::from_millis(takes);
        source.handle(now, answered(&source));
        let done = did(&mut source);
        assert!(matches!(done[..], [Action::HarvestMore]), "{total}: {done:?}");
        source.handle(now, harvested(total));
    }
    let done = did(&mut source);
    assert!(matches!(done[..], [Action::Pause]), "100 pages take half a millisecond: {done:?}");
    assert_eq!(source.common.pace.last_harvest, now);
}

/// It writes to memory that it has never written to, or less and less for a long time.
#[test]
fn guest_that_goes_on_writing_new_pages_is_paused() {
    for (share, namings) in [(0.95, 1), (0.85, 16)] {
        let mut source = after_one_round(config(PostCopy::Now));
        let (mut now, mut new, mut total, mut named) = (NOW, 100_000.0, 100_000, 0);
        source.handle(now, harvested(total));
        source.handle(now, Input::FetchLanesJoined);
        while did(&mut source).iter().any(|action| matches!(action, Action::TellLacking)) {
            named += 1;
            now += Duration::from_micros((new * 5.0) as u64);
            source.handle(now, answered(&source));
            new *= share;
            total += new as u64;
            source.handle(now, harvested(total));
        }
        assert_eq!(named, namings, "{share}");
        assert_phase!(source, Pausing);
    }
}

/// Opening channels takes a while too, on a link with a long round trip.
#[test]
fn guest_that_ran_on_while_lanes_were_opened_is_harvested_again() {
    let mut source = after_one_round(config(PostCopy::Now));
    source.handle(NOW, many());
    source.handle(NOW, answered(&source));
    let _ = did(&mut source);
    source.handle(Duration::from_millis(300), Input::FetchLanesJoined);
    assert!(matches!(did(&mut source)[..], [Action::HarvestMore]));
}

#[test]
fn lost_link_during_that_harvest_leads_to_another_round() {
    for (resumed, lane) in [(true, false), (false, true)] {
        let mut source = after_one_round(config(PostCopy::Now));
        source.handle(NOW, harvested(10_000));
        source.handle(NOW, Input::FetchLanesJoined);
        source.handle(Duration::from_millis(50), answered(&source));
        assert!(matches!(did(&mut source).last(), Some(Action::HarvestMore)));
        let now = Duration::from_millis(51);
        if resumed {
            source.handle(now, Input::LinkLost(lost()));
            source.handle(now, Input::Resumed);
            assert_phase!(source, OpeningFetch, "the log is being harvested");
        }
        if lane {
            source.handle(now, lane_lost(0, 0));
        }
        let _ = did(&mut source);
        source.handle(now, harvested(11_000));
        assert_phase!(source, Sending);
        let done = did(&mut source);
        let withdraws =
            |action: &Action| matches!(action, Action::Send(ControlMessage::Withdraw {}));
        assert_eq!(done.iter().any(withdraws), lane, "{done:?}");
        assert!(matches!(done.last(), Some(Action::SendRound { .. })), "{done:?}");
    }
}

#[test]
fn fetch_lane_is_redialed_however_often_that_fails() {
    let mut source = serving();
    source.handle(NOW, lane_lost(FETCH, 0));
    source.handle(NOW, lane_lost(FETCH, 0));
    let dialed = |source: &mut Source| match &did(source)[..] {
        [Action::RejoinLane { lane: FETCH, attempt, .. }] => *attempt,
        other => panic!("{other:?}"),
    };
    let first = dialed(&mut source);
    for failures in 1..100 {
        source.handle(NOW, Input::LaneNotRejoined { lane: FETCH, error: lost() });
        assert_eq!(dialed(&mut source), first + failures);
    }
    source.handle(NOW, Input::LaneRejoined { lane: FETCH, placed: 0 });
    assert!(did(&mut source).is_empty());
    assert_phase!(source, Serving);
}

/// A destination could otherwise keep both hosts busy with handshakes.
#[test]
fn fetch_lane_that_is_lost_at_once_again_is_redialed_after_a_pause() {
    let mut source = serving();
    let delays = [0, 10, 5_000].map(|ms| {
        let now = Duration::from_millis(ms);
        let attempt = source.common.post_copy.lanes[0].attempts;
        source.handle(now, lane_lost(FETCH, attempt));
        let dialed = did(&mut source);
        let [Action::RejoinLane { lane: FETCH, delay, .. }] = dialed[..] else {
            panic!("{dialed:?}")
        };
        source.handle(now, Input::LaneRejoined { lane: FETCH, placed: 0 });
        let _ = did(&mut source);
        delay
    });
    assert_eq!(delays, [Duration::ZERO, super::super::reconnect::RETRY, Duration::ZERO]);
}

#[test]
fn fetch_lane_that_was_lost_during_the_handover_is_redialed() {
    let mut source = final_sent();
    let ready = ControlMessage::Ready { digest: DIGEST, load_us: 0 };
    source.handle(NOW, Input::Control(ready));
    source.handle(NOW, lane_lost(FETCH, 0));
    source.handle(NOW, Input::CommitWritten(Ok(())));
    source.handle(NOW, answer(&source, SessionWord::Fetching));
    let redials = did(&mut source);
    let redialed = |action: &Action| matches!(action, Action::RejoinLane { lane: FETCH, .. });
    assert!(redials.iter().any(redialed), "{redials:?}");
}

/// The destination fetches pages as soon as it runs the guest, and its word may come later.
#[test]
fn loss_of_a_fetch_lane_is_reported_once_whenever_it_is_noticed() {
    let lost = |source: &mut Source| {
        let is_lost = |report: &Report| matches!(report, Report::LinkLost { .. });
        reports(source).into_iter().filter(is_lost).count()
    };
    let ready = || Input::Control(ControlMessage::Ready { digest: DIGEST, load_us: 0 });
    for lost_before in 1..=3 {
        let mut source = final_sent();
        let mut counted = 0;
        for step in 0..=3 {
            if step == lost_before {
                source.handle(NOW, lane_lost(FETCH, 0));
                source.handle(NOW, lane_lost(FETCH, 0));
            }
            let input = match step {
                0 => ready(),
                1 => Input::CommitWritten(Ok(())),
                2 => answer(&source, SessionWord::Fetching),
                _ => Input::LaneRejoined { lane: FETCH, placed: 0 },
            };
            source.handle(NOW, input);
            counted += lost(&mut source);
        }
        assert_eq!(counted, 1, "before step {lost_before}: {source:?}");
    }
}

/// The control channel is lost, and then silent. Only words of the destination count.
#[test]
fn serving_source_asks_whenever_it_does_not_hear_the_destination() {
    let mut source = serving();
    let asks = |source: &mut Source| matches!(did(source)[..], [Action::Ask { .. }]);
    source.handle(NOW, Input::LinkLost(lost()));
    assert!(asks(&mut source));
    let timeouts = source.common.config.timeouts;
    let mut now = timeouts.ask + timeouts.running;
    assert!(source.next_tick().is_some_and(|tick| tick <= now));
    source.handle(now, Input::Tick);
    assert!(asks(&mut source), "no answer came");
    source.handle(now, answer(&source, SessionWord::Unknown));
    assert!(asks(&mut source));
    source.handle(now, answer(&source, SessionWord::Fetching));
    assert!(!did(&mut source).iter().any(|action| matches!(action, Action::Ask { .. })));
    now += timeouts.silence;
    source.handle(now, Input::Tick);
    assert!(asks(&mut source), "the channel on which it has answered is silent");
    source.handle(now, answer(&source, SessionWord::Owns));
    assert!(matches!(source.ending(), Some(Ending::Given)));
}

/// The fetch lanes that are redialed.
fn redialed(source: &mut Source) -> Vec<u8> {
    let lane =
        |action| if let Action::RejoinLane { lane, .. } = action { Some(lane) } else { None };
    did(source).into_iter().filter_map(lane).collect()
}

/// Requests may have been lost with a channel whose end no packet has reported.
#[test]
fn fetch_lanes_are_redialed_when_the_destination_is_heard_again() {
    let fetching = SessionWord::Fetching;
    let mut source = serving();
    source.handle(NOW, answer(&source, fetching));
    assert!(redialed(&mut source).is_empty(), "it was never away");
    source.handle(NOW, lane_lost(FETCH + 1, 0));
    assert_eq!(redialed(&mut source), [FETCH + 1]);
    source.handle(NOW, Input::LinkLost(lost()));
    source.handle(NOW, answer(&source, SessionWord::Unknown));
    assert!(redialed(&mut source).is_empty(), "another host has answered");
    source.handle(NOW, answer(&source, fetching));
    assert_eq!(redialed(&mut source), [FETCH, FETCH + 2], "the third is being redialed");
    source.handle(NOW, answer(&source, fetching));
    assert!(redialed(&mut source).is_empty());
}

/// The destination may have begun to fetch long ago.
#[test]
fn fetch_lanes_are_redialed_after_a_doubt() {
    let mut source = final_sent();
    let ready = ControlMessage::Ready { digest: DIGEST, load_us: 0 };
    source.handle(NOW, Input::Control(ready));
    source.handle(NOW, Input::CommitWritten(Ok(())));
    source.handle(NOW, Input::LinkLost(lost()));
    assert!(redialed(&mut source).is_empty());
    source.handle(NOW, answer(&source, SessionWord::Fetching));
    assert_phase!(source, Serving);
    assert_eq!(redialed(&mut source), [FETCH, FETCH + 1, FETCH + 2]);
}

#[test]
fn nothing_but_giving_up_ends_serving() {
    let mut source = serving();
    for input in [
        Input::Cancel,
        Input::Failed(lost()),
        Input::Operator(vmferry_handover::OperatorWord::SourceResumes),
        Input::Operator(vmferry_handover::OperatorWord::DestinationOwns),
    ] {
        source.handle(NOW, input);
        assert_phase!(source, Serving);
    }
    source.handle(NOW, Input::GiveUp);
    assert!(matches!(source.ending(), Some(Ending::Lost(MigrateError::GivenUp))));
}

/// What it lacked is of use to nobody but its operator, who alone frees it.
#[test]
fn pages_of_a_crashed_guest_are_kept() {
    let doubting = || {
        let mut source = final_sent();
        let ready = ControlMessage::Ready { digest: DIGEST, load_us: 0 };
        source.handle(NOW, Input::Control(ready));
        source.handle(NOW, Input::CommitWritten(Ok(())));
        source.handle(NOW, Input::LinkLost(lost()));
        source
    };
    for (mut source, records) in [(serving(), 0), (doubting(), 1)] {
        let _ = did(&mut source);
        source.handle(NOW, answer(&source, SessionWord::Ended));
        assert_phase!(source, Serving);
        let mut told = Vec::new();
        let mut written = 0;
        while let Some(action) = source.next_action() {
            written += usize::from(matches!(action, Action::WriteOutcome(Record::Serving)));
            if let Action::Report(report) = action {
                told.push(report);
            }
        }
        assert_eq!((&told[..], written), (&[Report::GuestCrashed][..], records));
        let session = source.common.config.session;
        let running = ControlMessage::Running { session, start_us: 0 };
        for input in [
            Input::LinkLost(lost()),
            lane_lost(FETCH, 0),
            Input::Control(running),
            answer(&source, SessionWord::Ended),
            answer(&source, SessionWord::Unknown),
            Input::Cancel,
            Input::Tick,
        ] {
            source.handle(NOW, input);
            assert_eq!(did(&mut source).len(), 0, "nothing is asked, dialed or freed");
        }
        assert_eq!((source.next_tick(), source.handover()), (None, SourceState::Ended));
        source.handle(NOW, Input::GiveUp);
        assert!(matches!(source.ending(), Some(Ending::Lost(MigrateError::GivenUp))));
    }
}

#[test]
fn failure_while_serving_is_reported_once() {
    let mut source = serving();
    reports(&mut source);
    for failures in [1, 0] {
        source.handle(NOW, Input::Failed(lost()));
        let told = reports(&mut source);
        let told = told.iter().filter(|report| matches!(report, Report::ServingFailed { .. }));
        assert_eq!(told.count(), failures);
    }
}

/// The memory of a carried guest ends with its VMM.
#[test]
fn guest_loses_its_missing_pages_if_the_vmm_ends() {
    let ended = || Input::VmmEnded("it was killed".into());
    let mut source = serving();
    source.handle(NOW, ended());
    match &did(&mut source)[..] {
        [
            Action::Send(ControlMessage::Abort { reason }),
            Action::WriteOutcome(Record::Given { by_operator: false }),
            Action::Release,
        ] => assert_eq!(reason.code, ReasonCode::PagesLost),
        other => panic!("{other:?}"),
    }
    assert!(matches!(source.ending(), Some(Ending::Lost(MigrateError::PagesLost { .. }))));

    let mut source = final_sent();
    source.handle(NOW, ended());
    assert!(matches!(source.ending(), Some(Ending::Kept(MigrateError::Vm { .. }))));

    // It is noticed while it is not known whether the destination runs the guest.
    let mut source = final_sent();
    let ready = ControlMessage::Ready { digest: DIGEST, load_us: 0 };
    source.handle(NOW, Input::Control(ready));
    source.handle(NOW, Input::CommitWritten(Ok(())));
    source.handle(NOW, ended());
    assert!(source.ending().is_none());
    source.handle(NOW, answer(&source, SessionWord::Fetching));
    assert!(matches!(source.ending(), Some(Ending::Lost(MigrateError::PagesLost { .. }))));
}

#[test]
fn destination_without_post_copy_is_noticed_before_anything_is_sent() {
    let refused = |mut config: SourceConfig| {
        config.max_rounds = RoundLimit::new(2).unwrap();
        let mut source = after_one_round(config);
        source.common.post_copy.accepted = false;
        let error = source.common.agree_on_post_copy(Some(Err("no room".to_owned()))).err();
        (error.map(|error| error.to_string()), reports(&mut source))
    };
    let (error, _) = refused(config(PostCopy::Now));
    let says = "this guest can't be moved with post-copy: the destination: no room";
    assert!(error.is_some_and(|error| error.starts_with(says)));
    let stuck = SourceConfig { when_stuck: WhenStuck::PostCopy, ..config(PostCopy::Never) };
    assert!(refused(stuck).0.is_some());
    let (error, reports) = refused(config(PostCopy::Auto));
    assert_eq!(error, None);
    let told = |report: &Report| matches!(report, Report::PostCopyUnavailable { .. });
    assert!(reports.iter().any(told), "{reports:?}");
    assert_eq!(refused(config(PostCopy::Never)).0, None);
    let verified = SourceConfig { verify: true, ..config(PostCopy::Now) };
    assert!(refused(verified).0.is_some_and(|error| error.contains("compared")));
}

#[test]
fn auto_switches_at_a_local_minimum_of_what_does_not_converge() {
    let harvest = |pages| Harvest {
        rounds: 1,
        elapsed: NOW,
        pending_pages: pages,
        dirtied_in: Duration::from_secs(1),
    };
    let plan = |policy| {
        let announced = Some(FetchLanes { faults: 1, background: 1 });
        PostCopyPlan { accepted: true, ..PostCopyPlan::new(policy, announced) }
    };
    let due = |plan: &mut PostCopyPlan, verdict, pages| {
        plan.is_due(&Decision::AnotherRound, verdict, harvest(pages))
    };
    let mut auto = plan(PostCopy::Auto);
    assert!(!due(&mut auto, Verdict::NotConverging, 100), "nothing to compare with");
    assert!(due(&mut auto, Verdict::NotConverging, 100));
    let mut auto = plan(PostCopy::Auto);
    assert!(!due(&mut auto, Verdict::Converging, 100));
    assert!(!due(&mut auto, Verdict::NotConverging, 200), "it had less to send before");
    assert!(due(&mut auto, Verdict::NotConverging, 300), "and does not get less");
    assert!(!due(&mut plan(PostCopy::Never), Verdict::NotConverging, 100));
    assert!(due(&mut plan(PostCopy::Now), Verdict::Converging, 100));
    let fits = plan(PostCopy::Now).is_due(&Decision::SwitchOver, Verdict::Fits, harvest(1));
    assert!(!fits, "nothing has to be fetched");
    let stuck =
        plan(PostCopy::Never).is_due(&Decision::PostCopy, Verdict::NotConverging, harvest(1));
    assert!(stuck);
}

#[test]
fn user_may_ask_for_post_copy_in_the_middle_of_a_migration() {
    let mut source = after_one_round(config(PostCopy::Never));
    let change = crate::machine::source::change::Change {
        post_copy: Some(PostCopy::Now),
        ..Default::default()
    };
    source.handle(NOW, Input::Change(change));
    source.handle(NOW, many());
    assert_phase!(source, OpeningFetch);
}
