//! The destination's machine: hashing memory for `--verify`.
//!
//! A source of this release requests the hash before FINAL, and the memory is hashed as it was
//! placed, because a VMM that loads the state may write guest memory. A source of an earlier
//! release requests it after READY.

use std::time::Duration;

use vmferry_memory::{PageSet, SlotId, WholeHash};
use vmferry_wire::ControlMessage;

use super::io::{Action, LinkId};
use super::{Destination, Phase, Verification, micros};
use vmferry_handover::DestinationState;

/// The requested hash and the hash in progress.
#[derive(Debug, Default)]
pub(super) struct Hashing {
    /// The source requests the hash before the state is loaded.
    asked: bool,
    /// Pages to leave out of the hash.
    free: Option<PageSet>,
    /// A hash is in progress. There is at most one.
    running: bool,
    /// The hash in progress is of memory that was withdrawn since.
    stale: bool,
}

impl Hashing {
    /// Whether to hash the memory before the state is loaded.
    pub(super) fn is_asked(&self) -> bool {
        self.asked
    }

    fn withdraw(&mut self) {
        (self.asked, self.free, self.stale) = (false, None, self.running);
    }

    #[cfg(test)]
    pub(super) fn free(&self) -> &Option<PageSet> {
        &self.free
    }
}

impl Destination {
    /// Whether VERIFY is valid now, and FREE, which precedes it: once for each FINAL, if BEGIN has
    /// announced it.
    pub(super) fn takes_verify(&self) -> bool {
        let belongs = match self.phase {
            Phase::Receiving => self.handover == DestinationState::Receiving,
            Phase::Deciding => self.handover == DestinationState::Ready,
            _ => false,
        };
        belongs && self.verification == Verification::Announced
    }

    pub(super) fn on_verify(&mut self) {
        self.verification = Verification::Asked;
        if self.phase == Phase::Receiving {
            self.hashing.asked = true;
        } else {
            self.hash();
        }
    }

    /// The guest runs on at the source, which will request the hash again.
    pub(super) fn withdraw_verify(&mut self) {
        self.hashing.withdraw();
        if self.verification == Verification::Asked {
            self.verification = Verification::Announced;
        }
    }

    /// All pages are placed, and the digests agree.
    pub(super) fn hash_placed(&mut self) {
        self.phase = Phase::Hashing;
        if !self.hashing.running {
            self.hash();
        }
    }

    fn hash(&mut self) {
        self.hashing.running = true;
        let except = self.hashing.free.take();
        let except = except.unwrap_or_else(|| PageSet::for_layout(self.layout()));
        self.actions.push_back(Action::Hash { except });
    }

    /// The control channel was lost. If VERIFIED was to be sent on it, the load that follows is
    /// canceled, since it has not begun.
    pub(super) fn put_off_load(&mut self) {
        let before = self.actions.len();
        self.actions.retain(|action| !matches!(action, Action::Load { .. }));
        if self.actions.len() < before {
            self.phase = Phase::Hashing;
        }
    }

    pub(super) fn on_hashed(&mut self, now: Duration, hash: WholeHash, took: Duration) {
        self.hashing.running = false;
        let stale = std::mem::take(&mut self.hashing.stale);
        match self.phase {
            // A disconnected source has resumed its guest, or will.
            Phase::Hashing if self.is_waiting_for_source() => return,
            Phase::Hashing if stale => return self.hash(),
            Phase::Hashing | Phase::Deciding => {}
            _ => return,
        }
        self.actions.push_back(Action::Send {
            link: LinkId::CONTROL,
            message: ControlMessage::Verified {
                hash: hash.hash,
                pages: hash.pages,
                elapsed_us: micros(took),
            },
        });
        if self.phase == Phase::Hashing {
            self.waiting_since = now;
            self.load();
        }
    }

    /// Records pages whose content need not match the source's.
    pub(super) fn leave_out(&mut self, slot: SlotId, runs: &[(u64, u64)]) -> Result<(), String> {
        let Some(layout) = self.announced.as_ref().map(|announced| &announced.layout) else {
            return Err("FREE before the guest was announced".into());
        };
        let Some(in_slot) = layout.get(usize::from(slot.0)) else {
            return Err(format!("FREE names {slot}, and the guest has {} slots", layout.len()));
        };
        let free =
            self.hashing.free.get_or_insert_with(|| PageSet::for_layout(layout)).bitmap_mut(slot);
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

#[cfg(test)]
mod tests {
    use vmferry_wire::Token;

    use super::super::Announced;
    use super::*;
    use crate::config::Timeouts;
    use crate::error::MigrateError;
    use crate::machine::destination::io::Input;
    use crate::machine::peer::DestinationSide;

    const DIGEST: u64 = 7;
    const HASH: WholeHash = WholeHash { hash: 3, pages: 1 };

    fn heard(destination: &mut Destination, message: ControlMessage) {
        let link = LinkId::CONTROL;
        destination.handle(Duration::ZERO, Input::Control { link, message });
    }

    /// Sends FINAL for the frame that is placed, with its digest.
    fn finish(destination: &mut Destination) {
        heard(destination, ControlMessage::Verify {});
        let (lane_sequences, state) = (vec![1], [5].into());
        heard(
            destination,
            ControlMessage::Final { lane_sequences, digest: DIGEST, state, paused: false },
        );
        destination.handle(Duration::ZERO, Input::Digest(DIGEST));
    }

    fn hashing() -> Destination {
        let (now, side) = (Duration::ZERO, DestinationSide::default());
        let mut destination = Destination::new(Timeouts::default(), Token([1; 16]), side, now);
        destination.announced = Some(Announced {
            session: vmferry_wire::SessionId([1; 16]),
            name: "web".into(),
            lanes: 1,
            layout: vec![vmferry_memory::SlotLayout { slot: SlotId(0), gpa: 0, pages: 1 }],
        });
        destination.verification = Verification::Announced;
        (destination.phase, destination.lane_ends) = (Phase::Receiving, vec![1]);
        destination.reconnect = Duration::from_secs(30);
        finish(&mut destination);
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

    #[test]
    fn memory_is_hashed_as_placed_and_the_state_loaded_after_it() {
        let mut destination = hashing();
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert_eq!(did(&mut destination), ["VERIFIED", "load"]);
        destination.handle(Duration::ZERO, Input::Loaded(Ok(Duration::ZERO)));
        assert_eq!(did(&mut destination), ["READY"]);
        // The source may still be hashing.
        let timeouts = destination.timeouts;
        let deadline = destination.deadline().map(|(at, ..)| at);
        assert_eq!(deadline, Some(timeouts.verify + timeouts.commit));
    }

    #[test]
    fn hash_of_what_was_withdrawn_is_not_told_and_one_runs_at_a_time() {
        let mut destination = hashing();
        heard(&mut destination, ControlMessage::Withdraw {});
        finish(&mut destination);
        assert_eq!(did(&mut destination), ["digest"], "the first one still runs");
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert_eq!(did(&mut destination), ["hash"]);
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert_eq!(did(&mut destination), ["VERIFIED", "load"]);
    }

    #[test]
    fn nothing_is_loaded_after_the_hash_while_the_source_is_away() {
        let mut destination = hashing();
        let error = MigrateError::Cancelled { during: "a test" };
        destination.handle(Duration::ZERO, Input::LinkLost(error));
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert_eq!(did(&mut destination), [""; 0]);
        destination.handle(Duration::ZERO, Input::Resumed);
        assert_eq!(destination.phase, Phase::Receiving);
        finish(&mut destination);
        assert_eq!(did(&mut destination), ["digest", "hash"]);
    }

    /// The driver notices the loss of the channel when it sends VERIFIED on it.
    #[test]
    fn load_is_put_off_if_verified_can_not_be_sent() {
        let mut destination = hashing();
        destination.handle(Duration::ZERO, Input::Hashed(HASH, Duration::ZERO));
        assert!(matches!(destination.next_action(), Some(Action::Send { .. })));
        let error = MigrateError::Cancelled { during: "a test" };
        destination.handle(Duration::ZERO, Input::LinkLost(error));
        assert_eq!(did(&mut destination), [""; 0]);
        assert!(destination.may_resume());
    }

    #[test]
    fn verify_that_was_not_announced_does_not_belong_before_final() {
        let mut destination = hashing();
        heard(&mut destination, ControlMessage::Withdraw {});
        destination.verification = Verification::None;
        heard(&mut destination, ControlMessage::Verify {});
        let failure = destination.failure.as_ref().map(ToString::to_string).unwrap_or_default();
        assert!(failure.contains("VERIFY does not belong in pre-copy"), "{failure}");
    }
}
