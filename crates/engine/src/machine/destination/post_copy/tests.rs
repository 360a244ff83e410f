//! Tests of a destination whose guest runs before all its pages have arrived.

use vmferry_faults::FaultError;
use vmferry_handover::SessionKind;
use vmferry_handover::journal::Record;
use vmferry_wire::{ControlMessage, FetchLanes, LaneOffer, SessionId, SessionWord};

use super::super::fixture::{DIGEST, assert_phase, heard, receiving};
use super::*;
use crate::config::Timeouts;
use crate::machine::destination::io::{Ending, Input, Loaded};
use crate::machine::destination::{Destination, Left};
use crate::machine::peer::DestinationSide;

fn lacking(first: u64, bits: &[u8]) -> ControlMessage {
    ControlMessage::Lacking { slot: SlotId(0), first, bits: bits.to_vec() }
}

fn final_of(kind: SessionKind) -> ControlMessage {
    ControlMessage::Final {
        lane_sequences: vec![1],
        digest: DIGEST,
        state: [5].into(),
        paused: false,
        kind,
        storage_sample: Vec::new(),
    }
}

fn failure(destination: &Destination) -> String {
    destination.common.failure.as_ref().map(ToString::to_string).unwrap_or_default()
}

/// The actions so far, without messages and reports.
fn did(destination: &mut Destination) -> Vec<Action> {
    let counts = |action: &Action| {
        !matches!(action, Action::Report(_) | Action::Send { .. } | Action::Broadcast(_))
    };
    std::iter::from_fn(|| destination.next_action()).filter(counts).collect()
}

/// A destination whose guest was committed with post-copy, and has just been started.
fn fetching() -> Destination {
    let now = Duration::ZERO;
    let mut destination = receiving(false);
    destination.handle(now, Input::LaneEnded { lane: 0, sequence: 1 });
    heard(&mut destination, lacking(0, &[0b101]));
    heard(&mut destination, lacking(8, &[0b10]));
    heard(&mut destination, final_of(SessionKind::PostCopy));
    let [
        Action::FreeOutdated { runs },
        Action::FreeOutdated { .. },
        Action::SumDigest,
        Action::FetchMissing { missing },
    ] = &did(&mut destination)[..]
    else {
        panic!("{destination:?}")
    };
    let freed: Vec<u64> = runs.iter().map(|run| run.first).collect();
    assert_eq!(freed, [0, 2]);
    let pages: Vec<u64> = missing.runs().map(|run| run.first).collect();
    assert_eq!(pages, [0, 2, 9]);
    destination.handle(now, Input::Digest(DIGEST));
    destination.handle(now, Input::Loaded(Ok(Loaded::default())));
    let session = destination.session().unwrap();
    heard(&mut destination, ControlMessage::Commit { session });
    assert!(matches!(
        did(&mut destination)[..],
        [Action::Load { .. }, Action::WriteIntent(SessionKind::PostCopy)]
    ));
    destination
}

#[test]
fn session_ends_once_every_page_has_arrived() {
    let mut destination = fetching();
    destination.handle(Duration::ZERO, Input::IntentWritten(Ok(())));
    assert!(matches!(did(&mut destination)[..], [Action::Run, Action::FetchAll]));
    assert_eq!(destination.handover(), DestinationState::Fetching);
    assert!(destination.ending().is_none());
    destination.handle(Duration::ZERO, Input::Fetched);
    assert!(matches!(did(&mut destination)[..], [Action::WriteFetched]));
    destination.handle(Duration::ZERO, Input::FetchedWritten(Ok(())));
    assert_eq!(destination.handover(), DestinationState::Owns);
}

#[test]
fn failed_write_of_fetched_is_repeated() {
    let mut destination = fetching();
    destination.handle(Duration::ZERO, Input::IntentWritten(Ok(())));
    destination.handle(Duration::ZERO, Input::Fetched);
    did(&mut destination);
    let mut now = Duration::ZERO;
    for attempt in 0..3 {
        let full = std::io::ErrorKind::StorageFull.into();
        let error = MigrateError::Local { action: "write the journal", source: full };
        destination.handle(now, Input::FetchedWritten(Err(error)));
        let reports = std::iter::from_fn(|| destination.next_action()).filter(|action| {
            matches!(action, Action::Report(Report::FetchingFailed { reason })
                if reason.contains("write the journal"))
        });
        assert_eq!(reports.count(), usize::from(attempt == 0), "it is reported once");
        assert_eq!(destination.handover(), DestinationState::Fetching);
        assert!(destination.ending().is_none() && destination.common.failure.is_none());
        destination.handle(now, Input::Tick);
        assert!(did(&mut destination).is_empty(), "it waits");
        now = destination.next_tick().unwrap();
        destination.handle(now, Input::Tick);
        assert!(matches!(did(&mut destination)[..], [Action::WriteFetched]));
        destination.handle(now + FETCHED_RETRY, Input::Tick);
        assert!(did(&mut destination).is_empty(), "one attempt at a time");
    }
    destination.handle(now, Input::FetchedWritten(Ok(())));
    assert_eq!(destination.handover(), DestinationState::Owns);
}

/// Loading the state may touch the only missing page.
#[test]
fn last_page_may_arrive_before_the_guest_runs() {
    let mut destination = fetching();
    destination.handle(Duration::ZERO, Input::Fetched);
    assert!(did(&mut destination).is_empty());
    destination.handle(Duration::ZERO, Input::IntentWritten(Ok(())));
    assert!(matches!(
        did(&mut destination)[..],
        [Action::Run, Action::FetchAll, Action::WriteFetched]
    ));
}

#[test]
fn guest_that_was_ended_needs_no_pages() {
    let mut destination = fetching();
    destination.handle(Duration::ZERO, Input::IntentWritten(Ok(())));
    let _ = did(&mut destination);
    destination.handle(Duration::ZERO, Input::GuestEnded { in_order: true });
    destination.handle(Duration::ZERO, Input::GuestEnded { in_order: true });
    assert!(matches!(did(&mut destination)[..], [Action::WriteFetched]));
    destination.handle(Duration::ZERO, Input::FetchedWritten(Ok(())));
    let _ = did(&mut destination);
    assert!(matches!(destination.ending(), Some(Ending::Owns(None))));
}

/// The source keeps what the guest lacked. A write of ENDED that fails is repeated.
#[test]
fn source_is_told_that_the_guest_has_crashed() {
    let mut destination = fetching();
    destination.handle(Duration::ZERO, Input::IntentWritten(Ok(())));
    let _ = did(&mut destination);
    let gone = || Input::Failed(FaultError::ProcessGone { at: 0x1000 }.into());
    destination.handle(Duration::ZERO, gone());
    destination.handle(Duration::ZERO, gone());
    assert!(matches!(did(&mut destination)[..], [Action::WriteEnded]));
    let error = MigrateError::Cancelled { during: "a test" };
    destination.handle(Duration::ZERO, Input::EndedWritten(Err(error)));
    let _ = did(&mut destination);
    assert!(destination.ending().is_none());
    let later = destination.next_tick().unwrap();
    destination.handle(later, Input::Tick);
    assert!(matches!(did(&mut destination)[..], [Action::WriteEnded]));
    destination.handle(later, Input::EndedWritten(Ok(())));
    let told = std::iter::from_fn(|| destination.next_action()).any(|action| {
        let word = SessionWord::Ended;
        matches!(action, Action::Broadcast(ControlMessage::Answer { word: it, .. }) if it == word)
    });
    assert!(told);
    assert!(matches!(destination.ending(), Some(Ending::Owns(Some(MigrateError::CrashedLacking)))));
}

/// Its last page has arrived, and only FETCHED could not be written yet.
#[test]
fn crash_of_a_guest_with_all_pages_frees_the_source() {
    let mut destination = fetching();
    destination.handle(Duration::ZERO, Input::IntentWritten(Ok(())));
    destination.handle(Duration::ZERO, Input::Fetched);
    let error = MigrateError::Cancelled { during: "a test" };
    destination.handle(Duration::ZERO, Input::FetchedWritten(Err(error)));
    let _ = did(&mut destination);
    destination.handle(Duration::ZERO, Input::GuestEnded { in_order: false });
    assert!(matches!(did(&mut destination)[..], [Action::WriteFetched]));
}

/// The source may have been restarted, or this side, or only the channels are new.
#[test]
fn offered_lanes_replace_all_others() {
    let mut destination = fetching();
    destination.handle(Duration::ZERO, Input::IntentWritten(Ok(())));
    let error = MigrateError::Cancelled { during: "a test" };
    destination.handle(Duration::ZERO, Input::LaneLost { lane: 1, attempt: 0, error });
    let _ = did(&mut destination);
    let session = destination.session().unwrap();
    let lanes = FetchLanes { faults: 1, background: 2 };
    let offer = Some(LaneOffer { first: 4, lanes, streams: None });
    let message = ControlMessage::Query { session, offer };
    destination.handle(Duration::ZERO, Input::Control { link: LinkId(7), message });
    let [Action::UseOffer { link: LinkId(7), offer }] = did(&mut destination)[..] else {
        panic!("{destination:?}")
    };
    assert_eq!((offer.first, offer.lanes), (4, lanes));
    assert!(!destination.common.links.is_lane_lost(1), "there is no such lane any more");
}

#[test]
fn recovered_destination_runs_the_guest_and_fetches() {
    let session = SessionId([7; 16]);
    let left = Left { session, missing_pages: 9, paused: false };
    let recovered = |records: &[Record]| {
        let (timeouts, side) = (Timeouts::default(), DestinationSide::default());
        Destination::recovered(timeouts, side, left, records, Duration::ZERO)
    };
    let intent = Record::run_intent(SessionKind::PostCopy);
    assert!(recovered(&[intent.clone(), Record::Fetched]).is_none());
    assert!(recovered(&[Record::run_intent(SessionKind::PreCopy)]).is_none());
    let mut destination = recovered(&[intent]).unwrap();
    assert!(matches!(did(&mut destination)[..], [Action::Run, Action::FetchAll]));
    assert_eq!(destination.session(), Some(session));
    let hour = Duration::from_secs(3600);
    destination.handle(hour, Input::Tick);
    assert!(destination.ending().is_none(), "it waits for its source without end");
    destination.handle(hour, Input::Fetched);
    assert!(matches!(did(&mut destination)[..], [Action::WriteFetched]));
}

#[test]
fn no_loss_ends_a_session_whose_guest_runs() {
    let later = Duration::from_secs(3600);
    let mut destination = fetching();
    destination.handle(Duration::ZERO, Input::IntentWritten(Ok(())));
    let lost = || MigrateError::Cancelled { during: "a test" };
    destination.handle(Duration::ZERO, Input::LaneLost { lane: 1, attempt: 0, error: lost() });
    destination.handle(Duration::ZERO, Input::LinkLost(lost()));
    destination.handle(Duration::ZERO, Input::Cancel);
    destination.handle(Duration::ZERO, Input::Failed(lost()));
    destination.handle(later, Input::Tick);
    assert_eq!(destination.handover(), DestinationState::Fetching);
    assert_eq!(failure(&destination), "", "the guest has not crashed");
    let _ = did(&mut destination);
    destination.handle(later, Input::LaneJoined { lane: 1 });
    let restored = destination.next_action();
    let Some(Action::Report(Report::LinkRestored { channel, after_ms })) = restored else {
        panic!("{restored:?}")
    };
    assert_eq!((channel.as_str(), after_ms), ("lane 1", 3.6e6));
}

#[test]
fn outdated_pages_are_freed_once() {
    let mut destination = receiving(false);
    heard(&mut destination, lacking(0, &[0b0110]));
    heard(&mut destination, lacking(0, &[0b1110]));
    let freed: Vec<_> = did(&mut destination)
        .into_iter()
        .map(|action| match action {
            Action::FreeOutdated { runs } => {
                runs.iter().map(|run| (run.first, run.pages)).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(freed, [vec![(1, 2)], vec![(3, 1)]]);
}

/// The source may send a page that it has named, and name it again when that is outdated. A
/// page that it forgets must not be taken for zero.
#[test]
fn withdrawal_frees_pages_again_and_forgets_none() {
    let mut destination = receiving(false);
    destination.handle(Duration::ZERO, Input::LaneEnded { lane: 0, sequence: 1 });
    heard(&mut destination, lacking(0, &[0b11]));
    heard(&mut destination, ControlMessage::Withdraw {});
    assert_phase!(destination, Receiving);
    heard(&mut destination, lacking(0, &[0b101]));
    heard(&mut destination, final_of(SessionKind::PostCopy));
    let [Action::FreeOutdated { .. }, Action::FreeOutdated { runs }, _, fetch] =
        &did(&mut destination)[..]
    else {
        panic!("{destination:?}")
    };
    let freed: Vec<u64> = runs.iter().map(|run| run.first).collect();
    assert_eq!(freed, [0, 2]);
    let Action::FetchMissing { missing } = fetch else { panic!("{fetch:?}") };
    let pages: Vec<(u64, u64)> = missing.runs().map(|run| (run.first, run.pages)).collect();
    assert_eq!(pages, [(0, 3)]);
}

#[test]
fn lacking_pages_must_be_the_guests() {
    for (message, says) in [
        (lacking(2, &[0, 1]), "LACKING names page 2+8 of slot 0, which has 10"),
        (lacking(u64::MAX, &[2]), "names page 18446744073709551615+1 of slot 0"),
        (
            ControlMessage::Lacking { slot: SlotId(1), first: 0, bits: vec![1] },
            "LACKING names slot 1, and the guest has 1 slots",
        ),
    ] {
        let mut destination = receiving(false);
        heard(&mut destination, message);
        assert!(failure(&destination).contains(says), "{}", failure(&destination));
    }
}

#[test]
fn post_copy_that_was_not_accepted_is_a_protocol_error() {
    for message in [lacking(0, &[1]), final_of(SessionKind::PostCopy)] {
        let mut destination = receiving(false);
        destination.phase.session_mut().unwrap().lacking = None;
        heard(&mut destination, message);
        let failure = failure(&destination);
        assert!(failure.contains("post-copy, which this side has not accepted"), "{failure}");
    }
}
