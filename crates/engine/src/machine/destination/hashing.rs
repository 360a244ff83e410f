//! The destination's machine: hashing memory for `--verify`.
//!
//! A source of this release requests the hash before FINAL, and the memory is hashed as it was
//! placed, because a VMM that loads the state may write guest memory. A source of an earlier
//! release requests it after READY.

use std::time::Duration;

use vmferry_memory::{PageSet, SlotId, WholeHash};
use vmferry_wire::ControlMessage;

use super::common::{Common, micros, protocol};
use super::io::Action;
use super::phase::{Final, HashRun, Hashing, Loading, Phase, Session, Verification};
use vmferry_handover::DestinationState;

impl Phase {
    /// Whether VERIFY is valid now, and FREE, which precedes it: once for each FINAL, if BEGIN has
    /// announced it.
    pub(super) fn takes_verify(&self, common: &Common) -> bool {
        let belongs = match self {
            Self::Receiving(_) => common.handover == DestinationState::Receiving,
            Self::Deciding(_) => common.handover == DestinationState::Ready,
            _ => false,
        };
        let verification = self.session().map(|session| session.verification);
        belongs && verification == Some(Verification::Announced)
    }

    /// The source requests the hash. Before FINAL it is for when everything is placed.
    pub(super) fn on_verify(mut self, common: &mut Common) -> Self {
        let is_loaded = matches!(self, Self::Deciding(_));
        if let Some(session) = self.session_mut() {
            session.verification = Verification::Asked;
            if is_loaded {
                session.hash(common);
            }
        }
        self
    }

    /// The source names pages whose content need not match.
    pub(super) fn on_free(
        mut self,
        common: &mut Common,
        now: Duration,
        slot: SlotId,
        runs: &[(u64, u64)],
    ) -> Self {
        match self.session_mut().map(|session| session.leave_out(slot, runs)) {
            Some(Err(reason)) => self.fail(common, now, protocol(reason)),
            _ => self,
        }
    }

    pub(super) fn on_hashed(
        mut self,
        common: &mut Common,
        hash: WholeHash,
        took: Duration,
    ) -> Self {
        let ended =
            self.session_mut().map(|session| std::mem::replace(&mut session.hash, HashRun::Idle));
        let is_stale = ended == Some(HashRun::Stale);
        match self {
            // A disconnected source has resumed its guest, or will.
            Self::Hashing(_) | Self::PutOff(_) if common.is_waiting_for_source() => self,
            Self::Hashing(Hashing { ref mut session, .. }) | Self::PutOff(ref mut session)
                if is_stale =>
            {
                session.hash(common);
                self
            }
            Self::Hashing(Hashing { session, last }) => {
                common.send_verified(hash, took);
                session.load(common, last)
            }
            Self::PutOff(_) | Self::Deciding(_) => {
                common.send_verified(hash, took);
                self
            }
            phase => phase,
        }
    }

    /// The control channel was lost. If VERIFIED was to be sent on it, the load that follows is
    /// canceled, since it has not begun. The state is lost with it, and the source sends another
    /// FINAL if it reconnects.
    pub(super) fn put_off_load(self, common: &mut Common) -> Self {
        let before = common.actions.len();
        common.actions.retain(|action| !matches!(action, Action::Load { .. }));
        match self {
            Self::Loading(Loading { session, .. }) if common.actions.len() < before => {
                Self::PutOff(session)
            }
            phase => phase,
        }
    }
}

impl Session {
    /// All pages are placed, and the digests agree.
    pub(super) fn hash_placed(mut self, common: &mut Common, last: Final) -> Phase {
        if self.hash == HashRun::Idle {
            self.hash(common);
        }
        Phase::Hashing(Hashing { session: self, last })
    }

    fn hash(&mut self, common: &mut Common) {
        if self.hash == HashRun::Idle {
            self.hash = HashRun::Running;
        }
        let except = self.free.take().unwrap_or_else(|| PageSet::for_layout(&self.layout));
        common.act(Action::Hash { except });
    }

    /// The guest runs on at the source, which will request the hash again.
    pub(super) fn withdraw_verify(&mut self) {
        self.free = None;
        if self.hash == HashRun::Running {
            self.hash = HashRun::Stale;
        }
        if self.verification == Verification::Asked {
            self.verification = Verification::Announced;
        }
    }

    /// Records pages whose content need not match the source's.
    fn leave_out(&mut self, slot: SlotId, runs: &[(u64, u64)]) -> Result<(), String> {
        let layout = &self.layout;
        let Some(in_slot) = layout.get(usize::from(slot.0)) else {
            return Err(format!("FREE names {slot}, and the guest has {} slots", layout.len()));
        };
        let free = self.free.get_or_insert_with(|| PageSet::for_layout(layout)).bitmap_mut(slot);
        for &(first, pages) in runs {
            if first.checked_add(pages).is_none_or(|end| end > in_slot.pages) {
                let all = in_slot.pages;
                return Err(format!("FREE names pages {first}+{pages} of {slot}, which has {all}"));
            }
            free.set_run(first, pages);
        }
        Ok(())
    }
}

impl Common {
    fn send_verified(&mut self, hash: WholeHash, took: Duration) {
        let WholeHash { hash, pages } = hash;
        self.send(ControlMessage::Verified { hash, pages, elapsed_us: micros(took) });
    }
}

#[cfg(test)]
mod tests {
    use vmferry_wire::ControlMessage;

    use super::super::fixture::{DIGEST, assert_phase, finish, heard, receiving};
    use super::*;
    use crate::error::MigrateError;
    use crate::machine::destination::Destination;
    use crate::machine::destination::io::{Input, Loaded};

    const HASH: WholeHash = WholeHash { hash: 3, pages: 1 };

    /// Sends VERIFY and FINAL for the frame that is placed, with its digest.
    fn finish_verified(destination: &mut Destination) {
        heard(destination, ControlMessage::Verify {});
        finish(destination);
        destination.handle(Duration::ZERO, Input::Digest(DIGEST));
    }

    fn hashing() -> Destination {
        let mut destination = receiving(true);
        destination.handle(Duration::ZERO, Input::LaneEnded { lane: 0, sequence: 1 });
        finish_verified(&mut destination);
        assert_eq!(did(&mut destination), ["digest", "hash"]);
        destination
    }

    fn did(destination: &mut Destination) -> Vec<&'static str> {
        let name = |action| match action {
            Action::SumDigest => Some("digest"),
            Action::Hash { .. } => Some("hash"),
            Action::Load { .. } => Some("load"),
            Action::Send { message, .. } => Some(message.name()),
            _ => None,
        };
        std::iter::from_fn(|| destination.next_action()).filter_map(name).collect()
    }

    fn lost() -> Input {
        Input::LinkLost(MigrateError::Cancelled { during: "a test" })
    }

    #[test]
    fn hash_is_of_the_memory_as_placed_before_the_load() {
        let mut destination = hashing();
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert_eq!(did(&mut destination), ["VERIFIED", "load"]);
        destination.handle(Duration::ZERO, Input::Loaded(Ok(Loaded::default())));
        assert_eq!(did(&mut destination), ["READY"]);
        // The source may still be hashing.
        let timeouts = destination.common.timeouts;
        let deadline = destination.phase.deadline(&destination.common).map(|deadline| deadline.at);
        assert_eq!(deadline, Some(timeouts.verify + timeouts.commit));
    }

    #[test]
    fn hash_of_withdrawn_memory_is_not_sent_and_one_runs_at_a_time() {
        let mut destination = hashing();
        heard(&mut destination, ControlMessage::Withdraw {});
        finish_verified(&mut destination);
        assert_eq!(did(&mut destination), ["digest"], "the first one still runs");
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert_eq!(did(&mut destination), ["hash"]);
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert_eq!(did(&mut destination), ["VERIFIED", "load"]);
    }

    #[test]
    fn state_is_not_loaded_after_the_hash_while_the_source_is_disconnected() {
        let mut destination = hashing();
        destination.handle(Duration::ZERO, lost());
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert_eq!(did(&mut destination), [""; 0]);
        destination.handle(Duration::ZERO, Input::Resumed);
        assert_phase!(destination, Receiving);
        finish_verified(&mut destination);
        assert_eq!(did(&mut destination), ["digest", "hash"]);
    }

    /// The driver notices the loss of the channel when it sends VERIFIED on it.
    #[test]
    fn load_is_put_off_if_verified_cannot_be_sent() {
        let mut destination = hashing();
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert!(matches!(destination.next_action(), Some(Action::Send { .. })));
        destination.handle(Duration::ZERO, lost());
        assert_eq!(did(&mut destination), [""; 0]);
        assert!(destination.may_resume());
    }

    #[test]
    fn verify_that_was_not_announced_is_a_protocol_error() {
        let mut destination = receiving(false);
        heard(&mut destination, ControlMessage::Verify {});
        assert_eq!(failure(&destination), protocol_error("VERIFY does not belong in pre-copy"));
    }

    #[test]
    fn free_that_was_not_announced_is_a_protocol_error() {
        let mut destination = receiving(false);
        heard(&mut destination, ControlMessage::Free { slot: SlotId(0), runs: vec![(0, 1)] });
        assert_eq!(failure(&destination), protocol_error("FREE does not belong in pre-copy"));
    }

    #[test]
    fn free_pages_must_be_the_guests() {
        let mut destination = receiving(true);
        let session = destination.phase.session_mut().unwrap();
        session.leave_out(SlotId(0), &[(0, 2), (9, 1)]).unwrap();
        for (slot, run) in [(1, (0, 1)), (0, (9, 2)), (0, (u64::MAX, 2)), (0, (11, 0))] {
            let reason = session.leave_out(SlotId(slot), &[run]).unwrap_err();
            assert!(reason.starts_with("FREE names"), "{reason}");
        }
        let left_out: Vec<_> = session.free.as_ref().unwrap().runs().collect();
        assert_eq!(left_out.len(), 2, "{left_out:?}");
    }

    fn failure(destination: &Destination) -> String {
        destination.common.failure.as_ref().map(ToString::to_string).unwrap_or_default()
    }

    fn protocol_error(reason: &str) -> String {
        protocol(reason.to_owned()).to_string()
    }
}
