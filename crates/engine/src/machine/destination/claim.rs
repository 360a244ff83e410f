//! The destination's machine: the claim at the witness, between COMMIT and RUN-INTENT.

use std::time::Duration;

use super::common::Common;
use super::io::{Action, LinkId};
use super::phase::Phase;
use crate::error::MigrateError;
use vmferry_handover::{DestinationEvent, DestinationState, Register, VmError, WitnessId};

/// From a claim that was not answered to the next one. The guest is paused meanwhile.
const CLAIM_RETRY: Duration = Duration::from_millis(100);

impl Phase {
    /// The witness has answered, or has not.
    pub(super) fn on_claimed(
        self,
        common: &mut Common,
        now: Duration,
        answer: Result<Register, VmError>,
    ) -> Self {
        if common.handover != DestinationState::Claiming {
            return self;
        }
        let decided = match answer {
            Ok(register) => register.destination_event().map(|event| (register, event)),
            Err(error) => {
                common.claim_failure = Some(error);
                None
            }
        };
        let Some((register, event)) = decided else {
            common.claim_retry = Some(now + CLAIM_RETRY);
            return self;
        };
        if event == DestinationEvent::ClaimRefused {
            let witness = common.witness();
            common.failure = Some(MigrateError::ClaimRefused { witness, register });
        }
        self.hand_over(common, now, LinkId::CONTROL, event)
    }
}

impl Common {
    /// Claims the guest again if that is due.
    pub(super) fn retry_claim(&mut self, now: Duration) {
        if self.handover == DestinationState::Claiming
            && self.claim_retry.take_if(|at| now >= *at).is_some()
        {
            self.act(Action::Claim);
        }
    }

    pub(super) fn unanswered_claim(&mut self, after: Duration) -> MigrateError {
        let (witness, source) = (self.witness(), self.claim_failure.take());
        MigrateError::ClaimUnanswered { witness, after, source }
    }

    fn witness(&self) -> WitnessId {
        self.our_side.witness.clone().expect("only a session with a witness claims")
    }
}

#[cfg(test)]
mod tests {
    use vmferry_handover::DestinationState;
    use vmferry_wire::{ControlMessage, ReasonCode, SessionId};

    use super::*;
    use crate::machine::destination::Destination;
    use crate::machine::destination::fixture::{
        DIGEST, begin, finish, greeted, heard, receiving_with,
    };
    use crate::machine::destination::io::{Ending, Input, Loaded};

    fn name(text: &str) -> WitnessId {
        WitnessId::new(text).unwrap()
    }

    /// A machine that has COMMIT, at time 0, and whose actions so far were taken but for the claim.
    fn claiming() -> Destination {
        let mut destination = receiving_with(false, Some(name("w")));
        destination.handle(Duration::ZERO, Input::LaneEnded { lane: 0, sequence: 1 });
        finish(&mut destination);
        destination.handle(Duration::ZERO, Input::Digest(DIGEST));
        destination.handle(Duration::ZERO, Input::Loaded(Ok(Loaded::default())));
        while destination.next_action().is_some() {}
        heard(&mut destination, ControlMessage::Commit { session: SessionId([1; 16]) });
        assert_eq!(destination.handover(), DestinationState::Claiming);
        destination
    }

    fn did(destination: &mut Destination) -> Vec<Action> {
        std::iter::from_fn(|| destination.next_action()).collect()
    }

    #[test]
    fn run_intent_is_written_once_the_claim_is_granted() {
        let mut destination = claiming();
        assert!(matches!(did(&mut destination)[..], [Action::Claim]));
        destination.handle(Duration::ZERO, Input::Claimed(Ok(Register::Claimed)));
        assert!(matches!(did(&mut destination)[..], [Action::WriteIntent(_)]));
    }

    #[test]
    fn refused_claim_aborts() {
        for (register, why) in [
            (Register::TakenBack, "has taken the guest back"),
            (Register::Freed, "was fenced"),
            (Register::Aborted, "decided before"),
        ] {
            let mut destination = claiming();
            let _ = did(&mut destination);
            destination.handle(Duration::ZERO, Input::Claimed(Ok(register)));
            assert!(matches!(did(&mut destination)[..], [Action::WriteAborted { .. }]));
            destination.handle(Duration::ZERO, Input::Claimed(Ok(Register::Claimed)));
            destination.handle(Duration::ZERO, Input::AbortWritten(Ok(())));
            let _ = did(&mut destination);
            let Some(Ending::Aborted(error)) = destination.ending() else { panic!("{register:?}") };
            assert!(matches!(error, MigrateError::ClaimRefused { .. }), "{error}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    /// The claim is repeated, also without a link, and a repeated COMMIT does not extend the wait.
    #[test]
    fn unanswered_claim_is_repeated_and_then_aborts() {
        let mut destination = claiming();
        let _ = did(&mut destination);
        let wait = destination.common.timeouts.claim;
        let no_answer = || Input::Claimed(Err("no answer".into()));
        destination.handle(Duration::ZERO, no_answer());
        let mut claims = 0;
        let mut now = Duration::ZERO;
        let mut seen = Vec::new();
        while destination.handover() == DestinationState::Claiming {
            now = destination.next_tick().expect("it waits");
            destination.handle(now, Input::Tick);
            destination.handle(now, no_answer());
            let lost = MigrateError::Cancelled { during: "a test" };
            destination.handle(now, Input::LinkLost(lost));
            let message = ControlMessage::Commit { session: SessionId([1; 16]) };
            destination.handle(now, Input::Control { link: LinkId(7), message });
            seen = did(&mut destination);
            claims += seen.iter().filter(|action| matches!(action, Action::Claim)).count();
        }
        assert!(claims > 10, "{claims} claims");
        assert_eq!(now, wait);
        assert!(matches!(seen[..], [.., Action::WriteAborted { .. }]), "{seen:?}");
        destination.handle(now, Input::AbortWritten(Ok(())));
        let _ = did(&mut destination);
        let Some(Ending::Aborted(error)) = destination.ending() else { panic!("{destination:?}") };
        assert!(crate::chain(&error).contains("the witness w did not answer for 5.0 s"), "{error}");
        assert!(crate::chain(&error).contains("no answer"), "{error}");
    }

    /// The link is lost while the claim is answered: the guest has not crashed.
    #[test]
    fn lost_link_while_claiming_is_no_failure() {
        let mut destination = claiming();
        let _ = did(&mut destination);
        let lost = MigrateError::Cancelled { during: "a test" };
        destination.handle(Duration::ZERO, Input::LinkLost(lost));
        let granted = Input::Claimed(Ok(Register::Claimed));
        for input in [granted, Input::IntentWritten(Ok(())), Input::Started(Ok(()))] {
            destination.handle(Duration::ZERO, input);
            let _ = did(&mut destination);
        }
        assert!(matches!(destination.ending(), Some(Ending::Owns(None))), "{destination:?}");
    }

    #[test]
    fn both_hosts_have_the_same_witness_or_none() {
        let (a, b) = (Some(name("a")), Some(name("b")));
        for (theirs, ours) in [(&a, &b), (&a, &None), (&None, &b)] {
            let mut destination = greeted(ours.clone());
            heard(&mut destination, begin(false, theirs.clone()));
            let [Action::Send { message: ControlMessage::Refuse { reason, .. }, .. }] =
                &did(&mut destination)[..]
            else {
                panic!("{theirs:?} {ours:?}: {destination:?}")
            };
            assert_eq!(reason.code, ReasonCode::Incompatible);
            assert!(reason.text.contains("witness"), "{}", reason.text);
        }
        let mut same = greeted(a.clone());
        heard(&mut same, begin(false, a));
        assert!(matches!(did(&mut same)[..], [Action::Prepare { .. }]));
    }
}
