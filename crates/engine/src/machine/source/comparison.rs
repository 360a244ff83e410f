//! The source's machine: hashing and comparing both paused memories for `--verify`.
//!
//! The destination hashes its memory as it was placed, before it loads the state, because a VMM
//! that loads the state of its devices may write guest memory. FREE and VERIFY are then sent before
//! FINAL, and VERIFIED arrives before READY. A destination of an earlier release accepts VERIFY
//! after READY only.

use std::time::Duration;

use vmferry_memory::WholeHash;
use vmferry_wire::ControlMessage;

use super::common::{Common, ms};
use super::io::Action;
use super::phase::{AwaitReady, Comparison, Phase, Verifying};
use crate::error::{Compared, MigrateError};

impl Common {
    /// Starts hashing on both sides.
    pub(super) fn request_comparison(&mut self) -> Comparison {
        self.verification.attempts += 1;
        let attempt = self.verification.attempts;
        self.act(Action::TellFree);
        self.act(Action::Send(ControlMessage::Verify {}));
        self.act(Action::Hash { attempt });
        Comparison { attempt, ours: None, theirs: None }
    }

    /// Compares two hashes.
    fn compare(&mut self, ours: WholeHash, theirs: WholeHash) -> Result<(), MigrateError> {
        self.stats.verify_match = Some(ours == theirs);
        if ours == theirs {
            return Ok(());
        }
        let compared =
            if self.verification.before_load { Compared::BeforeLoad } else { Compared::AfterLoad };
        Err(MigrateError::VerifyMismatch {
            source_pages: ours.pages,
            source_hash: ours.hash,
            destination_pages: theirs.pages,
            destination_hash: theirs.hash,
            log: self.our_side.log,
            compared,
        })
    }
}

impl Comparison {
    /// Records this side's hash. Returns false for the hash of a pause that was withdrawn.
    fn takes_ours(&mut self, attempt: u32, hash: WholeHash) -> bool {
        let is_present = attempt == self.attempt;
        if is_present {
            self.ours = Some(hash);
        }
        is_present
    }

    /// Records the destination's hash. Returns false for a second one, which would restart the
    /// wait, and would count as time for the requested comparison.
    fn takes_theirs(&mut self, hash: WholeHash) -> bool {
        let is_first = self.theirs.is_none();
        if is_first {
            self.theirs = Some(hash);
        }
        is_first
    }

    /// Both hashes, once they are complete.
    fn both(&self) -> Option<(WholeHash, WholeHash)> {
        self.ours.zip(self.theirs)
    }
}

impl AwaitReady {
    /// The destination has hashed its memory in this time.
    pub(super) fn on_verified(
        mut self,
        common: &mut Common,
        now: Duration,
        hash: WholeHash,
        took: Duration,
    ) -> Phase {
        if !self.comparison.as_mut().is_some_and(|comparison| comparison.takes_theirs(hash)) {
            return Phase::AwaitReady(self);
        }
        // The time that the destination reports counts only as far as it is within this wait.
        common.stats.verify_ms = ms(took.min(now.saturating_sub(self.sent_at)));
        common.wait.since = now;
        self.compare(common, now)
    }

    /// This side has hashed its memory.
    pub(super) fn on_hashed(
        mut self,
        common: &mut Common,
        now: Duration,
        attempt: u32,
        hash: WholeHash,
    ) -> Phase {
        if !self.comparison.as_mut().is_some_and(|comparison| comparison.takes_ours(attempt, hash))
        {
            return Phase::AwaitReady(self);
        }
        self.compare(common, now)
    }

    /// Compares complete hashes. If they agree, the state still has to be loaded.
    fn compare(self, common: &mut Common, now: Duration) -> Phase {
        let both = self.comparison.and_then(|comparison| comparison.both());
        let phase = Phase::AwaitReady(self);
        match both.map(|(ours, theirs)| common.compare(ours, theirs)) {
            Some(Err(error)) => phase.fail(common, now, error),
            _ => phase,
        }
    }

    /// READY has arrived, and the digests agree.
    pub(super) fn compare_at_ready(self, common: &mut Common, now: Duration) -> Phase {
        let Some(comparison) = self.comparison else {
            common.begin_wait(now);
            let comparison = common.request_comparison();
            return Phase::Verifying(Verifying { pause: self.pause, comparison, since: now });
        };
        if comparison.theirs.is_none() {
            let reason = "READY came before VERIFIED, which was asked for";
            let error = MigrateError::protocol("control", 0, reason);
            return Phase::AwaitReady(self).fail(common, now, error);
        }
        common.begin_wait(now);
        Verifying { pause: self.pause, comparison, since: now }.compare(common, now)
    }
}

impl Verifying {
    /// The destination has hashed its memory.
    pub(super) fn on_verified(
        mut self,
        common: &mut Common,
        now: Duration,
        hash: WholeHash,
    ) -> Phase {
        if !self.comparison.takes_theirs(hash) {
            return Phase::Verifying(self);
        }
        self.compare(common, now)
    }

    /// This side has hashed its memory.
    pub(super) fn on_hashed(
        mut self,
        common: &mut Common,
        now: Duration,
        attempt: u32,
        hash: WholeHash,
    ) -> Phase {
        if !self.comparison.takes_ours(attempt, hash) {
            return Phase::Verifying(self);
        }
        self.compare(common, now)
    }

    /// Compares complete hashes, and continues with the handover if they agree.
    fn compare(self, common: &mut Common, now: Duration) -> Phase {
        let Some((ours, theirs)) = self.comparison.both() else { return Phase::Verifying(self) };
        common.stats.verify_ms += ms(now.saturating_sub(self.since));
        match common.compare(ours, theirs) {
            Ok(()) => self.pause.commit(common, now),
            Err(error) => Phase::Verifying(self).fail(common, now, error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{assert_phase, awaiting_ready};
    use super::*;
    use crate::config::SourceConfig;
    use crate::machine::source::Source;
    use crate::machine::source::io::Input;

    const HASH: WholeHash = WholeHash { hash: 7, pages: 1 };

    fn verifying() -> SourceConfig {
        SourceConfig { verify: true, ..SourceConfig::new("unused".into()) }
    }

    fn names(source: &mut Source) -> Vec<String> {
        let name = |action| match action {
            Action::Send(ControlMessage::Ping { .. }) => None,
            Action::Send(message) => Some(message.name().to_owned()),
            Action::Hash { attempt } => Some(format!("hash {attempt}")),
            Action::WriteCommit(_) => Some("commit".into()),
            _ => None,
        };
        std::iter::from_fn(|| source.next_action()).filter_map(name).collect()
    }

    fn verified(hash: WholeHash) -> Input {
        let WholeHash { hash, pages } = hash;
        Input::Control(ControlMessage::Verified { hash, pages, elapsed_us: 5_000_000 })
    }

    fn ready() -> Input {
        let digest = super::super::fixture::DIGEST;
        Input::Control(ControlMessage::Ready { digest, load_us: 0 })
    }

    #[test]
    fn comparison_is_requested_before_final_and_does_not_delay_it() {
        let mut source = awaiting_ready(verifying(), true);
        let sent = names(&mut source);
        assert!(sent.ends_with(&["VERIFY".into(), "hash 1".into(), "FINAL".into()]), "{sent:?}");
        let later = Duration::from_secs(9);
        source.handle(Duration::from_secs(8), verified(HASH));
        source.handle(later, Input::Hashed { attempt: 1, hash: HASH });
        assert_eq!(names(&mut source), [""; 0], "the state is not loaded yet");
        source.handle(later, ready());
        assert_eq!(names(&mut source), ["commit"]);
        assert_eq!(
            (source.common.stats.verify_ms, source.common.stats.downtime.ready_ms),
            (5000.0, 4000.0)
        );
    }

    #[test]
    fn mismatch_before_the_load_keeps_the_guest() {
        let mut source = awaiting_ready(verifying(), true);
        source.handle(Duration::ZERO, Input::Hashed { attempt: 1, hash: HASH });
        source.handle(Duration::ZERO, verified(WholeHash { hash: 8, ..HASH }));
        let Some(crate::machine::source::io::Ending::Kept(error)) = source.ending() else {
            panic!("{source:?}")
        };
        let compared = Compared::BeforeLoad;
        assert!(matches!(
            error,
            MigrateError::VerifyMismatch { compared: found, .. } if found == compared
        ));
    }

    #[test]
    fn ready_waits_for_this_sides_hash_and_must_not_precede_verified() {
        let mut source = awaiting_ready(verifying(), true);
        source.handle(Duration::ZERO, verified(HASH));
        source.handle(Duration::ZERO, ready());
        let _ = names(&mut source);
        assert_phase!(source, Verifying);
        source.handle(Duration::ZERO, Input::Hashed { attempt: 1, hash: HASH });
        assert_eq!(names(&mut source), ["commit"]);

        let mut source = awaiting_ready(verifying(), true);
        source.handle(Duration::ZERO, Input::Hashed { attempt: 1, hash: HASH });
        source.handle(Duration::ZERO, ready());
        assert_eq!(source.handover(), vmferry_handover::SourceState::Kept);
    }

    /// A release that hashes after the load is asked after READY.
    #[test]
    fn comparison_with_an_earlier_release_is_requested_after_ready() {
        let mut source = awaiting_ready(verifying(), false);
        assert_eq!(names(&mut source).last().map(String::as_str), Some("FINAL"));
        source.handle(Duration::ZERO, ready());
        assert_eq!(names(&mut source), ["VERIFY", "hash 1"]);
        source.handle(Duration::ZERO, Input::Hashed { attempt: 1, hash: HASH });
        source.handle(Duration::ZERO, verified(HASH));
        assert_eq!(names(&mut source), ["commit"]);
    }

    #[test]
    fn hash_of_a_withdrawn_pause_is_ignored() {
        let mut source = awaiting_ready(verifying(), true);
        source.handle(Duration::ZERO, verified(HASH));
        let error = MigrateError::Cancelled { during: "a test" };
        source.handle(Duration::ZERO, Input::LaneLost { lane: 0, attempt: 0, error });
        assert_phase!(source, Sending, "the guest runs on");
        // VERIFIED may have crossed WITHDRAW.
        source.handle(Duration::ZERO, verified(HASH));
        source.handle(Duration::ZERO, Input::Hashed { attempt: 1, hash: HASH });
        assert_phase!(source, Sending);
        assert_eq!((source.common.stats.verify_match, source.common.stats.verify_ms), (None, 0.0));
    }
}
