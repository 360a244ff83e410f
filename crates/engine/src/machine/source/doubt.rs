//! The source's machine: what it asks the witness while the destination does not answer.

use std::time::Duration;

use super::common::Common;
use super::io::{Action, Report};
use super::phase::Phase;
use vmferry_handover::{Register, SessionWord, SourceEvent, SourceState, VmError, WitnessRequest};
use vmferry_wire::{Reason, ReasonCode};

use crate::error::MigrateError;

/// When the witness is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WitnessPoll {
    /// The session has no witness.
    Never,
    /// The destination is heard, or nothing is promised to it.
    Idle,
    /// At this time.
    At(Duration),
    /// Its answer is awaited.
    Asked,
}

impl Phase {
    /// What the witness is asked in this phase; `None` if it is not asked.
    fn asks_witness(&self, common: &Common) -> Option<Option<WitnessRequest>> {
        match (self, common.handover) {
            (_, SourceState::InDoubt { .. }) => Some(Some(WitnessRequest::TakeBack)),
            (Self::Serving(serving), SourceState::Serving) if !serving.is_heard => Some(None),
            _ => None,
        }
    }

    /// Asks the witness if that is due.
    pub(super) fn poll_witness(&self, common: &mut Common, now: Duration) {
        common.witness_poll = match (common.witness_poll, self.asks_witness(common)) {
            (WitnessPoll::Never, _) => WitnessPoll::Never,
            // The answer to an earlier question is awaited in any case.
            (WitnessPoll::Asked, _) => WitnessPoll::Asked,
            (_, None) => WitnessPoll::Idle,
            (WitnessPoll::Idle, Some(Some(_))) => {
                WitnessPoll::At(now + common.timeouts().take_back)
            }
            (WitnessPoll::Idle, Some(None)) => WitnessPoll::At(now + common.timeouts().ask),
            (WitnessPoll::At(at), Some(request)) if now >= at => {
                common.act(Action::AskWitness(request));
                WitnessPoll::Asked
            }
            (later @ WitnessPoll::At(_), Some(_)) => later,
        };
    }

    /// The witness has answered, or has not.
    pub(super) fn on_register(
        self,
        common: &mut Common,
        now: Duration,
        answer: Result<Register, VmError>,
    ) -> Self {
        common.witness_poll = WitnessPoll::At(now + common.timeouts().ask);
        if self.asks_witness(common).is_none() {
            return self;
        }
        let Some((register, event)) =
            answer.ok().and_then(|register| register.source_event().map(|event| (register, event)))
        else {
            return self;
        };
        if matches!(common.handover, SourceState::InDoubt { .. }) {
            common.report(Report::WitnessDecided { register });
        }
        match event {
            SourceEvent::Word(SessionWord::Aborted) => {
                let text = "its host has told the witness that its journal says ABORTED";
                self.on_aborted(common, now, Reason::new(ReasonCode::Internal, text))
            }
            event => {
                common.wait.since = now;
                if event == SourceEvent::TakenBack
                    && let Some(witness) = common.our_side.witness.clone()
                {
                    let source = common.failure.take().map(Box::new);
                    common.failure = Some(MigrateError::TakenBack { witness, source });
                }
                match self.hand_over(common, now, event) {
                    // The destination itself was not heard.
                    Self::Serving(serving) => serving.on_ask(),
                    phase => phase,
                }
            }
        }
    }
}

impl WitnessPoll {
    /// When the clock must be looked at.
    pub(super) fn next(self) -> Option<Duration> {
        match self {
            Self::At(at) => Some(at),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use vmferry_handover::journal::Record;
    use vmferry_handover::{SessionKind, WitnessId};
    use vmferry_wire::GuestIdentity;

    use super::super::Source;
    use super::super::io::{Ending, Input};
    use super::*;
    use crate::config::SourceConfig;
    use crate::error::MigrateError;
    use crate::machine::peer::SourceSide;
    use crate::vmm::GuestDescription;

    const SECOND: Duration = Duration::from_secs(1);

    /// A source that finds COMMIT in the journal, at time 0.
    fn in_doubt(witness: Option<&str>) -> Source {
        let witness = witness.map(|name| WitnessId::new(name).unwrap());
        let guest = GuestDescription {
            identity: GuestIdentity { uuid: uuid::Uuid::nil(), name: String::new() },
            vmm: String::new(),
            config: Vec::new(),
            layout: Vec::new(),
        };
        let side = SourceSide::recovered(false, witness);
        let records = [Record::commit(SessionKind::PreCopy)];
        let config = SourceConfig::new("unused".into());
        let mut source = Source::recovered(config, &guest, side, &records, Duration::ZERO);
        source.handle(Duration::ZERO, Input::Tick);
        source
    }

    fn questions(source: &mut Source) -> Vec<Option<WitnessRequest>> {
        let asked = |action| match action {
            Action::AskWitness(request) => Some(request),
            _ => None,
        };
        std::iter::from_fn(|| source.next_action()).filter_map(asked).collect()
    }

    #[test]
    fn guest_is_taken_back_once_the_doubt_has_lasted() {
        let mut source = in_doubt(Some("w"));
        let patience = source.common.timeouts().take_back;
        source.handle(patience - SECOND, Input::Tick);
        assert_eq!(questions(&mut source), []);
        source.handle(patience, Input::Tick);
        source.handle(patience + SECOND, Input::Tick);
        assert_eq!(questions(&mut source), [Some(WitnessRequest::TakeBack)], "one at a time");
        source.handle(patience + SECOND, Input::Register(Ok(Register::TakenBack)));
        let Some(Ending::Kept(error)) = source.ending() else { panic!("{source:?}") };
        assert!(error.to_string().contains("the witness w has given the guest back"), "{error}");
    }

    #[test]
    fn question_is_repeated_until_the_register_decides() {
        let mut source = in_doubt(Some("w"));
        let mut now = source.common.timeouts().take_back;
        for answer in [Err("cut off".into()), Ok(Register::Open), Ok(Register::Claimed)] {
            source.handle(now, Input::Tick);
            assert_eq!(questions(&mut source).len(), 1);
            source.handle(now, Input::Register(answer));
            assert!(source.ending().is_none(), "{source:?}");
            now += source.common.timeouts().ask;
        }
        source.handle(now, Input::Tick);
        source.handle(now, Input::Register(Ok(Register::Owns)));
        assert!(matches!(source.ending(), Some(Ending::Given)), "{source:?}");
    }

    #[test]
    fn late_answer_changes_nothing_once_the_destination_has_answered() {
        let mut source = in_doubt(Some("w"));
        let now = source.common.timeouts().take_back;
        source.handle(now, Input::Tick);
        let (session, token) = (source.common.config.session, None);
        let word = SessionWord::Owns;
        let answer = vmferry_wire::ControlMessage::Answer { session, word, token };
        source.handle(now, Input::Control(answer));
        source.handle(now, Input::Register(Ok(Register::TakenBack)));
        assert!(matches!(source.ending(), Some(Ending::Given)), "{source:?}");
    }

    #[test]
    fn aborted_at_the_witness_is_the_reason() {
        let mut source = in_doubt(Some("w"));
        source.handle(source.common.timeouts().take_back, Input::Tick);
        source.handle(SECOND * 4, Input::Register(Ok(Register::Aborted)));
        let Some(Ending::Kept(MigrateError::EndedByPeer { reason, .. })) = source.ending() else {
            panic!("{source:?}")
        };
        assert!(reason.text.contains("its journal says ABORTED"), "{}", reason.text);
    }

    #[test]
    fn session_without_a_witness_asks_none() {
        let mut source = in_doubt(None);
        for second in 0..60 {
            source.handle(SECOND * second, Input::Tick);
        }
        assert_eq!(questions(&mut source), []);
    }
}
