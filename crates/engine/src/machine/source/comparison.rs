//! The source's machine: hashing and comparing both paused memories for `--verify`.
//!
//! The destination hashes its memory as it was placed, before it loads the state, because a VMM
//! that loads the state of its devices may write guest memory. FREE and VERIFY are then sent before
//! FINAL, and VERIFIED arrives before READY. A destination of an earlier release accepts VERIFY
//! after READY only.

use std::time::Duration;

use vmferry_memory::WholeHash;
use vmferry_wire::ControlMessage;

use super::io::Action;
use super::{Phase, Source, ms};
use crate::error::{Compared, MigrateError};

/// The state of both hashes.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    /// The destination accepts VERIFY before FINAL.
    before_load: bool,
    /// VERIFY was sent, and was not withdrawn since.
    asked: bool,
    /// The number of hashes that this side has begun.
    attempt: u32,
    /// Since when the guest has been waiting for nothing but the comparison.
    since: Option<Duration>,
    ours: Option<WholeHash>,
    theirs: Option<WholeHash>,
}

impl Comparison {
    /// Records what the destination announces.
    pub(super) fn expect(&mut self, before_load: bool) {
        self.before_load = before_load;
    }

    /// Whether the destination hashes before it loads the state.
    pub(super) fn is_before_load(&self) -> bool {
        self.before_load
    }

    /// Whether the destination was asked for its hash.
    pub(super) fn is_asked(&self) -> bool {
        self.asked
    }

    /// Whether the destination's hash is outstanding.
    pub(super) fn awaits_verified(&self) -> bool {
        self.asked && self.theirs.is_none()
    }

    /// The guest runs on, so earlier hashes are void.
    pub(super) fn withdraw(&mut self) {
        (self.asked, self.since, self.ours, self.theirs) = (false, None, None, None);
    }
}

impl Source {
    /// Starts hashing on both sides.
    pub(super) fn ask_to_verify(&mut self, now: Duration) {
        self.comparison.asked = true;
        self.comparison.attempt += 1;
        if !self.comparison.before_load {
            self.comparison.since = Some(now);
        }
        self.act(Action::TellFree);
        self.act(Action::Send(ControlMessage::Verify {}));
        self.act(Action::Hash { attempt: self.comparison.attempt });
    }

    /// The destination has hashed its memory in this time.
    pub(super) fn on_verified(&mut self, now: Duration, hash: WholeHash, took: Duration) {
        // A second hash would restart the wait, and would count as time for the requested
        // comparison.
        if !self.comparison.awaits_verified() {
            return;
        }
        self.comparison.theirs = Some(hash);
        if self.phase == Phase::AwaitReady {
            // The time that the destination reports counts only as far as it is within this wait.
            self.stats.verify_ms = ms(took.min(now.saturating_sub(self.last_sent)));
            self.waiting_since = now;
        }
        self.compare(now);
    }

    /// This side has hashed its memory.
    pub(super) fn on_hashed(&mut self, now: Duration, attempt: u32, hash: WholeHash) {
        if self.comparison.asked && attempt == self.comparison.attempt {
            self.comparison.ours = Some(hash);
            self.compare(now);
        }
    }

    /// READY has arrived, and the digests agree.
    pub(super) fn compare_at_ready(&mut self, now: Duration) {
        if !self.comparison.asked {
            self.enter(now, Phase::Verifying);
            return self.ask_to_verify(now);
        }
        if self.comparison.theirs.is_none() {
            let reason = "READY came before VERIFIED, which was asked for".into();
            let channel = "control".into();
            return self.fail(now, MigrateError::Protocol { channel, offset: 0, reason });
        }
        self.comparison.since = Some(now);
        self.enter(now, Phase::Verifying);
        self.compare(now);
    }

    fn compare(&mut self, now: Duration) {
        let Comparison { ours: Some(ours), theirs: Some(theirs), .. } = self.comparison else {
            return;
        };
        if let Some(since) = self.comparison.since {
            self.stats.verify_ms += ms(now.saturating_sub(since));
        }
        self.stats.verify_match = Some(ours == theirs);
        if ours != theirs {
            let compared = if self.comparison.before_load {
                Compared::BeforeLoad
            } else {
                Compared::AfterLoad
            };
            let error = MigrateError::VerifyMismatch {
                source_pages: ours.pages,
                source_hash: ours.hash,
                destination_pages: theirs.pages,
                destination_hash: theirs.hash,
                log: self.our_side.log,
                compared,
            };
            return self.fail(now, error);
        }
        // Before READY the state still has to be loaded.
        if self.phase == Phase::Verifying {
            self.commit(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::awaiting_ready;
    use super::*;
    use crate::config::SourceConfig;
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
            Action::WriteCommit => Some("commit".into()),
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
    fn comparison_is_asked_for_ahead_of_final_and_does_not_wait_for_it() {
        let mut source = awaiting_ready(verifying(), true);
        let sent = names(&mut source);
        assert!(sent.ends_with(&["VERIFY".into(), "hash 1".into(), "FINAL".into()]), "{sent:?}");
        let later = Duration::from_secs(9);
        source.handle(Duration::from_secs(8), verified(HASH));
        source.handle(later, Input::Hashed { attempt: 1, hash: HASH });
        assert_eq!(names(&mut source), [""; 0], "the state is not loaded yet");
        source.handle(later, ready());
        assert_eq!(names(&mut source), ["commit"]);
        assert_eq!((source.stats.verify_ms, source.stats.downtime.ready_ms), (5000.0, 4000.0));
    }

    #[test]
    fn comparison_that_fails_before_the_load_keeps_the_guest() {
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
    fn ready_waits_for_this_sides_hash_and_must_not_precede_the_others() {
        let mut source = awaiting_ready(verifying(), true);
        source.handle(Duration::ZERO, verified(HASH));
        source.handle(Duration::ZERO, ready());
        let _ = names(&mut source);
        assert_eq!(source.phase, Phase::Verifying);
        source.handle(Duration::ZERO, Input::Hashed { attempt: 1, hash: HASH });
        assert_eq!(names(&mut source), ["commit"]);

        let mut source = awaiting_ready(verifying(), true);
        source.handle(Duration::ZERO, Input::Hashed { attempt: 1, hash: HASH });
        source.handle(Duration::ZERO, ready());
        assert_eq!(source.handover(), vmferry_handover::SourceState::Kept);
    }

    /// A release that hashes after the load is asked after READY.
    #[test]
    fn destination_of_the_release_before_is_asked_after_ready() {
        let mut source = awaiting_ready(verifying(), false);
        assert_eq!(names(&mut source).last().map(String::as_str), Some("FINAL"));
        source.handle(Duration::ZERO, ready());
        assert_eq!(names(&mut source), ["VERIFY", "hash 1"]);
        source.handle(Duration::ZERO, Input::Hashed { attempt: 1, hash: HASH });
        source.handle(Duration::ZERO, verified(HASH));
        assert_eq!(names(&mut source), ["commit"]);
    }

    #[test]
    fn hash_of_a_pause_that_was_withdrawn_counts_for_nothing() {
        let mut source = awaiting_ready(verifying(), true);
        source.handle(Duration::ZERO, verified(HASH));
        let error = MigrateError::Cancelled { during: "a test" };
        source.handle(Duration::ZERO, Input::LaneLost { lane: 0, attempt: 0, error });
        assert_eq!(source.phase, Phase::Sending, "the guest runs on");
        // VERIFIED may have crossed WITHDRAW.
        source.handle(Duration::ZERO, verified(HASH));
        source.handle(Duration::ZERO, Input::Hashed { attempt: 1, hash: HASH });
        assert_eq!((source.phase, source.comparison.ours), (Phase::Sending, None));
        assert_eq!((source.stats.verify_match, source.stats.verify_ms), (None, 0.0));
    }
}
