//! The destination's side of a migration, sans-IO.
//!
//! ```text
//!  AwaitBegin -> Preparing -> Opening -> Receiving -> Placing -> Summing
//!      |             |           |        ^  ^  ^        |          | the digests agree
//!      +-------------+-----------+        |  |  +--------+          v
//!                    v                    |  +-------------- [Hashing] -> Loading -> Deciding
//!                 Refused                 |                                  |
//!                                         +------------- [PutOff] <----------+
//!
//!  back to Receiving: WITHDRAW, or another control channel
//! ```
//! Each phase is a value that owns the data which only that phase needs. A step consumes the phase
//! and returns the next one. What outlives the phases is in `Common`. In `Deciding` the state of
//! `vmferry_handover` decides. A failure from `Receiving` on does not leave the phase: the state of
//! the handover says that the session is being aborted.
//!
//! `Hashing` occurs if the source requested `--verify` before FINAL: the memory is hashed as it was
//! placed. `PutOff` follows if the control channel is lost before the load begins. A guest that is
//! refused while preparing leaves no trace. From `Opening` on the session is in the journal, so
//! that this host can always answer for it.

pub mod io;

mod announcement;
mod claim;
mod clock;
mod common;
mod events;
#[cfg(test)]
mod fixture;
mod handing_over;
mod hashing;
mod loading;
mod losses;
mod phase;
mod post_copy;
mod reconnect;

use std::time::Duration;

use vmferry_wire::{SessionId, Token};

use self::common::Common;
use self::io::{Action, Ending, Input, LinkId};
use self::phase::{AwaitBegin, Deciding, Loading, Phase};
use super::peer::DestinationSide;
use crate::config::Timeouts;
use crate::error::MigrateError;
use crate::stats::DestinationStats;
use vmferry_handover::journal::{Record, recover_destination};
use vmferry_handover::{DestinationState, SessionKind};

/// A guest that was left without all its pages by a process that has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// The session by which it came.
    pub session: SessionId,
    /// Number of pages that may be missing.
    pub missing_pages: u64,
    /// It was paused at the source, and stays paused.
    pub paused: bool,
}

/// The destination's state machine.
#[derive(Debug)]
pub struct Destination {
    phase: Phase,
    common: Common,
}

impl Destination {
    /// A destination with a greeted control channel on which nothing was received yet. `token` is
    /// what the data channels must present.
    #[must_use]
    pub fn new(timeouts: Timeouts, token: Token, our_side: DestinationSide, now: Duration) -> Self {
        Self {
            phase: Phase::AwaitBegin(AwaitBegin { since: now }),
            common: Common::new(timeouts, token, our_side, now),
        }
    }

    /// A destination that was started again after its process died while the guest lived on and
    /// lacked pages. `None` if the journal's records say otherwise. It starts the guest if it has
    /// never run, and fetches the pages once the source has asked.
    #[must_use]
    pub fn recovered(
        timeouts: Timeouts,
        our_side: DestinationSide,
        left: Left,
        records: &[Record],
        now: Duration,
    ) -> Option<Self> {
        let recovered = recover_destination(records);
        let (next, effects) = recovered.filter(|(next, _)| next.is_fetching())?;
        let Left { session, missing_pages, paused } = left;
        // The source learns its token from an answer.
        let mut common = Common::new(timeouts, Token([0; 16]), our_side, now);
        common.links.is_up = false;
        common.kind = SessionKind::PostCopy;
        common.missing_pages = missing_pages;
        let phase = Phase::Deciding(Deciding::recovered(session, paused, now));
        let phase = phase.follow(&mut common, now, LinkId::CONTROL, (next, effects));
        Some(Self { phase, common })
    }

    /// Processes an event at time `now`.
    pub fn handle(&mut self, now: Duration, input: Input) {
        if self.phase.is_refused() {
            return;
        }
        let phase = std::mem::replace(&mut self.phase, Phase::Refused(None));
        let phase = phase.on_input(&mut self.common, now, input);
        self.phase = phase.watch_the_clock(&mut self.common, now);
    }

    /// The next action.
    pub fn next_action(&mut self) -> Option<Action> {
        self.common.actions.pop_front()
    }

    /// When [`Input::Tick`] is due if nothing happens before.
    #[must_use]
    pub fn next_tick(&self) -> Option<Duration> {
        self.phase.next_tick(&self.common)
    }

    /// How the session ended, once it has ended and all its actions were taken.
    pub fn ending(&mut self) -> Option<Ending> {
        if !self.common.actions.is_empty() {
            return None;
        }
        let during = self.phase.name();
        let failure = &mut self.common.failure;
        let mut take = || failure.take().unwrap_or(MigrateError::Cancelled { during });
        if self.phase.is_refused() {
            return Some(Ending::Refused(take()));
        }
        match self.common.handover {
            DestinationState::Owns => Some(Ending::Owns(self.common.failure.take())),
            DestinationState::Ended => Some(Ending::Owns(Some(MigrateError::CrashedLacking))),
            DestinationState::Aborted => Some(Ending::Aborted(take())),
            DestinationState::Stuck => Some(Ending::Stuck(take())),
            _ => None,
        }
    }

    /// The state of the handover.
    #[must_use]
    pub fn handover(&self) -> DestinationState {
        self.common.handover
    }

    /// Whether the guest stays paused because it was paused at the source before the migration.
    #[must_use]
    pub fn stays_paused(&self) -> bool {
        match self.phase {
            Phase::Loading(Loading { paused, .. }) | Phase::Deciding(Deciding { paused, .. }) => {
                paused
            }
            _ => false,
        }
    }

    /// The session, once it was announced.
    #[must_use]
    pub fn session(&self) -> Option<SessionId> {
        self.phase.session_id()
    }

    /// The statistics that this machine keeps. The lanes keep the others.
    #[must_use]
    pub fn stats(&self) -> &DestinationStats {
        &self.common.stats
    }

    /// Whether FINAL may arrive: the guest is accepted and nothing is decided. A FINAL that was
    /// received may be withdrawn.
    #[must_use]
    pub fn wants_final(&self) -> bool {
        matches!(self.phase, Phase::Receiving(_) | Phase::Placing(_))
            && self.common.handover == DestinationState::Receiving
    }

    /// Whether a source that has lost its control channel may continue this session on another one.
    #[must_use]
    pub fn may_resume(&self) -> bool {
        self.phase.may_resume(&self.common)
    }

    /// Whether the source is disconnected. An authorized source may then start a new session.
    #[must_use]
    pub fn is_waiting_for_source(&self) -> bool {
        self.common.is_waiting_for_source()
    }

    /// The phase in words.
    #[must_use]
    pub fn phase_name(&self) -> &'static str {
        self.phase.name()
    }
}
