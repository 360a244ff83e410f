//! The destination's machine with post-copy: LACKING names the pages that only the source has, and
//! the guest fetches them while it runs here.
//!
//! From RUN-INTENT on no failure ends the session. Lost channels are waited for: the source redials
//! them, and asks on a query channel if it has lost the control channel.

use std::time::Duration;

use vmferry_memory::{PageRun, SlotId};

use super::common::{Common, protocol};
use super::io::{Action, LinkId, Report};
use super::phase::{Lacking, Phase, Session};
use crate::causes::chain;
use crate::error::MigrateError;
use crate::link::Loss;
use vmferry_handover::{DestinationEvent, DestinationState};

/// The pause before another attempt to write FETCHED.
const FETCHED_RETRY: Duration = Duration::from_secs(1);

impl Session {
    /// The source names pages that it has not sent.
    pub(super) fn on_lacking(
        mut self,
        common: &mut Common,
        now: Duration,
        (slot, first): (SlotId, u64),
        bits: &[u8],
    ) -> Phase {
        match self.add_lacking(slot, first, bits) {
            Ok(runs) => {
                // Those that were named before are free already.
                if !runs.is_empty() {
                    common.act(Action::FreeOutdated { runs });
                }
                Phase::Receiving(self)
            }
            Err(reason) => Phase::Receiving(self).fail(common, now, protocol(reason)),
        }
    }

    /// Returns the pages that were not named before, or not since the last withdrawal.
    fn add_lacking(
        &mut self,
        slot: SlotId,
        first: u64,
        bits: &[u8],
    ) -> Result<Vec<PageRun>, String> {
        let Some(lacking) = &mut self.lacking else {
            return Err("LACKING without post-copy, which this side has not accepted".into());
        };
        let Some(in_slot) = self.layout.get(usize::from(slot.0)) else {
            let slots = self.layout.len();
            return Err(format!("LACKING names {slot}, and the guest has {slots} slots"));
        };
        let Lacking { named, freed } = lacking;
        let (named, freed) = (named.bitmap_mut(slot), freed.bitmap_mut(slot));
        let mut runs: Vec<PageRun> = Vec::new();
        for (byte, at) in bits.iter().zip((0..).step_by(8)) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
                let page = first.checked_add(at + bit).filter(|page| *page < in_slot.pages);
                let Some(page) = page else {
                    let all = in_slot.pages;
                    return Err(format!(
                        "LACKING names page {first}+{} of {slot}, which has {all}",
                        at + bit
                    ));
                };
                named.set(page);
                if freed.is_set(page) {
                    continue;
                }
                freed.set(page);
                match runs.last_mut() {
                    Some(run) if run.first + run.pages == page => run.pages += 1,
                    _ => runs.push(PageRun { slot, first: page, pages: 1 }),
                }
            }
        }
        Ok(runs)
    }
}

impl Phase {
    /// Ends the session if the guest runs and has all its pages.
    pub(super) fn go_on_fetching(self, common: &mut Common, now: Duration) -> Self {
        if common.handover != DestinationState::Fetching || !common.has_fetched {
            return self;
        }
        common.report(Report::Fetched);
        self.hand_over(common, now, LinkId::CONTROL, DestinationEvent::Fetched)
    }

    /// FETCHED could not be written. The guest runs on, the source keeps its memory, and the write
    /// is tried again for as long as it takes.
    pub(super) fn on_fetched_failed(
        self,
        common: &mut Common,
        now: Duration,
        error: &MigrateError,
    ) -> Self {
        if common.fetched_retry.replace(now + FETCHED_RETRY).is_none() {
            common.report(Report::FetchingFailed { reason: chain(error) });
        }
        self.hand_over(common, now, LinkId::CONTROL, DestinationEvent::JournalFailed)
    }

    /// Tries again to write FETCHED, if it is time.
    pub(super) fn retry_fetched(self, common: &mut Common, now: Duration) -> Self {
        if common.handover == DestinationState::Fetching
            && common.fetched_retry.is_some_and(|at| now >= at)
        {
            return self.hand_over(common, now, LinkId::CONTROL, DestinationEvent::Fetched);
        }
        self
    }

    /// Whether this is the number of a fetch lane, and not of a data lane.
    pub(super) fn is_fetch_lane(&self, lane: u8) -> bool {
        self.session().is_some_and(|session| usize::from(lane) >= session.lane_ends.len())
    }

    /// A fetch lane has lost its channel. Before the guest runs, the source ends the session if it
    /// needs the lane.
    pub(super) fn on_fetch_lane_lost(
        self,
        common: &mut Common,
        now: Duration,
        lane: u8,
        error: &MigrateError,
    ) -> Self {
        if common.handover == DestinationState::Fetching && !common.links.is_lane_lost(lane) {
            common.report_loss(Some(lane), error);
            let error = MigrateError::Cancelled { during: self.name() };
            common.links.lose_fetch_lane(lane, Loss { since: now, error });
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use vmferry_handover::SessionKind;
    use vmferry_wire::ControlMessage;

    use super::super::fixture::{DIGEST, assert_phase, heard, receiving};
    use super::*;
    use crate::machine::destination::Destination;
    use crate::machine::destination::io::Input;

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
            Action::FetchMissing { missing },
            Action::SumDigest,
        ] = &did(&mut destination)[..]
        else {
            panic!("{destination:?}")
        };
        let freed: Vec<u64> = runs.iter().map(|run| run.first).collect();
        assert_eq!(freed, [0, 2]);
        let pages: Vec<u64> = missing.runs().map(|run| run.first).collect();
        assert_eq!(pages, [0, 2, 9]);
        destination.handle(now, Input::Digest(DIGEST));
        destination.handle(now, Input::Loaded(Ok(now)));
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
        let [Action::FreeOutdated { .. }, Action::FreeOutdated { runs }, fetch, ..] =
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
}
