//! The destination's machine from FINAL to READY: the last pages are placed, the digests are
//! compared, and the state is loaded.

use std::time::Duration;

use super::common::{Common, protocol};
use super::io::{Action, LinkId, Loaded};
use super::phase::{
    Deciding, Final, Lacking, Loading, Phase, Placing, Session, Summing, Verification,
};
use crate::error::MigrateError;
use vmferry_handover::{DestinationEvent, SessionKind};

impl Session {
    pub(super) fn on_final(
        self,
        common: &mut Common,
        now: Duration,
        lane_sequences: Vec<u64>,
        last: Final,
    ) -> Phase {
        if lane_sequences.len() != self.lane_ends.len() {
            let reason = format!(
                "the last message names {} lanes of {}",
                lane_sequences.len(),
                self.lane_ends.len()
            );
            return Phase::Receiving(self).fail(common, now, protocol(reason));
        }
        if last.kind == SessionKind::PostCopy && self.lacking.is_none() {
            let reason = "FINAL with post-copy, which this side has not accepted".into();
            return Phase::Receiving(self).fail(common, now, protocol(reason));
        }
        common.kind = last.kind;
        Placing { session: self, lane_sequences, last, since: now }.check_placed(common)
    }
}

impl Phase {
    /// A lane has placed everything up to the end of a round.
    pub(super) fn on_lane_ended(mut self, common: &mut Common, lane: u8, sequence: u64) -> Self {
        let end =
            self.session_mut().and_then(|session| session.lane_ends.get_mut(usize::from(lane)));
        if let Some(end) = end {
            // Of the threads that place frames, the one that completed a round may report it after
            // the next round has ended.
            *end = sequence.max(*end);
        }
        match self {
            Self::Placing(placing) => placing.check_placed(common),
            phase => phase,
        }
    }

    pub(super) fn on_loaded(
        self,
        common: &mut Common,
        now: Duration,
        result: Result<Loaded, MigrateError>,
    ) -> Self {
        match (result, self) {
            (Ok(loaded), Self::Loading(loading)) => loading.on_loaded(common, now, loaded),
            (Ok(_), phase) => phase,
            (Err(error), phase) => phase.fail(common, now, error),
        }
    }
}

impl Placing {
    /// The VMM of a carried guest knows the missing pages itself: the state is their number.
    fn carried_pages(&self) -> Option<u64> {
        Some(u64::from_le_bytes((*self.last.state).try_into().ok()?))
    }

    fn check_placed(mut self, common: &mut Common) -> Phase {
        // A disconnected source may have resumed its guest, and sends FINAL again after it has
        // reconnected.
        if common.is_waiting_for_source() || self.session.lane_ends != self.lane_sequences {
            return Phase::Placing(self);
        }
        if self.last.kind == SessionKind::PostCopy
            && let Some(Lacking { named: missing, .. }) = self.session.lacking.take()
        {
            common.missing_pages = match self.carried_pages() {
                Some(pages) if missing.count() == 0 => pages,
                _ => missing.count(),
            };
            // The sum comes first: a page that the VMM touches from then on is hashed when it
            // arrives.
            common.act(Action::SumDigest);
            common.act(Action::FetchMissing { missing });
        } else {
            common.act(Action::SumDigest);
        }
        Phase::Summing(Summing { session: self.session, last: self.last })
    }
}

impl Summing {
    pub(super) fn on_digest(self, common: &mut Common, now: Duration, placed: u64) -> Phase {
        if common.failure.is_some() {
            // The session is being aborted: its pages could not be fetched, for example.
            return Phase::Summing(self);
        }
        let sent = self.last.digest;
        if placed != sent {
            let error = MigrateError::DigestMismatch { sent, placed };
            return Phase::Summing(self).fail(common, now, error);
        }
        let Self { session, last } = self;
        if session.verification == Verification::Asked {
            session.hash_placed(common, last)
        } else {
            session.load(common, last)
        }
    }
}

impl Session {
    /// Lets the VMM load the state. From here on nothing can be withdrawn.
    pub(super) fn load(self, common: &mut Common, last: Final) -> Phase {
        let Final { digest, state, paused, kind: _, storage_sample } = last;
        common.act(Action::Load { state, paused, storage_sample });
        Phase::Loading(Loading { session: self, digest, paused })
    }
}

impl Loading {
    fn on_loaded(self, common: &mut Common, now: Duration, loaded: Loaded) -> Phase {
        let Loaded { took, compared } = loaded;
        common.stats.load_ms = took.as_secs_f64() * 1e3;
        common.stats.storage_ms = compared.as_secs_f64() * 1e3;
        let Self { session, digest, paused } = self;
        let (since, committed_at) = (now, None);
        Phase::Deciding(Deciding { session, digest, paused, load: took, since, committed_at })
            .hand_over(common, now, LinkId::CONTROL, DestinationEvent::Loaded)
    }
}

#[cfg(test)]
mod tests {
    use vmferry_memory::GuestBytes;
    use vmferry_wire::ControlMessage;

    use super::super::fixture::{assert_phase, heard, receiving};
    use super::*;
    use crate::machine::destination::io::Input;

    /// Several threads place a lane's frames, and each reports its progress when it is scheduled.
    #[test]
    fn lane_end_of_an_older_round_may_be_reported_last() {
        let mut machine = receiving(false);
        for sequence in [9, 7] {
            machine.handle(Duration::ZERO, Input::LaneEnded { lane: 0, sequence });
        }
        let (lane_sequences, state) = (vec![9], GuestBytes::new());
        let kind = SessionKind::PreCopy;
        let last = ControlMessage::Final {
            lane_sequences,
            digest: 0,
            state,
            paused: false,
            kind,
            storage_sample: Vec::new(),
        };
        heard(&mut machine, last);
        assert_phase!(machine, Summing);
    }
}
