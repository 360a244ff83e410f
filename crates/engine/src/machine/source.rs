//! The source's side of a migration, sans-IO.
//!
//! Inputs are events (a message arrived, a round was sent, the VMM is paused), outputs are actions,
//! and time is passed in. The driver in `driver::source` carries the actions out with threads,
//! sockets and a VMM; a simulation needs none of them.
//!
//! ```text
//!  Announced -> Joining -> Sending <-> Harvesting -> Pausing -> LastHarvest
//!                           |  ^ ^                                  |
//!     a carried guest is    |  | |  the link is lost: the guest     |
//!     stopped by its VMM    |  | |  runs on at the source           |
//!                           v  | |                                  |
//!                         LastRound <-------------------------------+
//!                           |    |
//!                           v    |
//!                         AwaitReady -> [Verifying] -> HandingOver -> [Asking] -> Done
//! ```
//! Each phase is a value that owns the data which only that phase needs. A step consumes the phase
//! and returns the next one. What outlives the phases is in `Common`. From `HandingOver` on, the
//! state of `vmferry_handover` decides.
//!
//! With `--verify` both sides hash their memory while the source waits for READY, the destination
//! before it loads the state. `Verifying` follows if this side's hash takes longer than that, or if
//! the destination's release hashes after the load only.
//!
//! Before COMMIT is journaled every failure leads to `Done`: the guest resumes at the source. After
//! it, `Asking` is the phase of a source that gets no answer.

pub mod change;
pub mod io;

mod clock;
pub(crate) mod common;
mod comparison;
mod doubt;
mod events;
#[cfg(test)]
mod fixture;
mod handing_over;
mod holding;
mod links;
mod opening;
mod pace;
mod passes;
mod phase;
mod pings;
mod post_copy;
mod reconnect;
mod rounds;
mod serving;
mod switchover;

use std::time::Duration;

use vmferry_wire::{ControlMessage, Release};

use self::common::Common;
use self::handing_over::Step;
use self::io::{Action, Ending, Input};
use self::phase::{Announced, Phase};
use super::peer::SourceSide;
use crate::config::SourceConfig;
use crate::error::MigrateError;
use crate::stats::SourceStats;
use crate::vmm::{GuestDescription, StateEstimate};
use vmferry_handover::journal::{Record, kind_of_source, recover_source};
use vmferry_handover::{SessionKind, SourceState};

/// The source's state machine.
#[derive(Debug)]
pub struct Source {
    phase: Phase,
    common: Common,
}

impl Source {
    /// A source that will announce its guest on a greeted control channel.
    #[must_use]
    pub fn new(
        config: SourceConfig,
        guest: GuestDescription,
        our_side: SourceSide,
        now: Duration,
    ) -> Self {
        let release = Some(Release::of_this(&our_side.vmm));
        let (streams, used_bytes) = (our_side.streams, our_side.used_bytes.clone());
        let reconnect = config.timeouts.reconnect.as_millis();
        let mut machine = Self::at_rest(config, &guest, our_side, now);
        let common = &mut machine.common;
        let fetch_lanes = common.post_copy.announced;
        let witness = common.our_side.witness.clone();
        common.act(Action::Send(ControlMessage::Begin {
            session: common.config.session,
            guest: guest.identity,
            vmm: guest.vmm,
            config: guest.config,
            layout: guest.layout,
            lanes: common.config.channels.get(),
            verify: common.config.verify,
            reconnect_ms: reconnect.try_into().unwrap_or(u32::MAX),
            release,
            streams,
            used_bytes,
            fetch_lanes,
            witness,
        }));
        // The log starts while the destination prepares and data channels are opened, so that the
        // guest can hint its free pages meanwhile.
        common.act(Action::StartLog);
        machine
    }

    /// A source that was restarted after its process died while the guest lived on. It continues
    /// from the state in the journal: it resumes the guest, gives it up, or asks the destination.
    /// It never sends COMMIT. To a destination that lacks pages it offers the fetch lanes that
    /// `our_side` has.
    #[must_use]
    pub fn recovered(
        config: SourceConfig,
        guest: &GuestDescription,
        our_side: SourceSide,
        records: &[Record],
        now: Duration,
    ) -> Self {
        let Self { phase, mut common } = Self::at_rest(config, guest, our_side, now);
        common.kind = kind_of_source(records);
        let (next, effects) = recover_source(records);
        if common.kind == SessionKind::PostCopy && next.is_committed() {
            common.post_copy.lose_all(now, common.our_side.streams);
            common.act(Action::ServePages { round: 1 });
        }
        let phase = phase.follow(&mut common, now, Step { next, effects, by_operator: false });
        Self { phase, common }
    }

    /// Whether the destination accepts that the guest runs before all its pages have arrived.
    pub(crate) fn has_post_copy(&self) -> bool {
        self.common.post_copy.accepted
    }

    fn at_rest(
        config: SourceConfig,
        guest: &GuestDescription,
        our_side: SourceSide,
        now: Duration,
    ) -> Self {
        Self {
            phase: Phase::Announced(Announced::default()),
            common: Common::new(config, guest, our_side, now),
        }
    }

    /// Sets the VMM's estimate of its state, for the prediction of the downtime.
    pub fn expect_state(&mut self, state: StateEstimate) {
        self.common.pace.predictor.expect_state(state);
    }

    /// Processes an event at time `now`.
    pub fn handle(&mut self, now: Duration, input: Input) {
        if self.phase.is_done() {
            return;
        }
        let phase = std::mem::replace(&mut self.phase, Phase::Done);
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

    /// How the migration ended, once it has. Takes the error out.
    pub fn ending(&mut self) -> Option<Ending> {
        match self.common.handover {
            SourceState::Given => Some(match self.common.lost.take() {
                Some(error) => Ending::Lost(error),
                None => Ending::Given,
            }),
            SourceState::Kept => {
                let during = self.phase.name();
                let failure = self.common.failure.take();
                Some(Ending::Kept(failure.unwrap_or(MigrateError::Cancelled { during })))
            }
            _ => None,
        }
    }

    /// The state of the handover.
    #[must_use]
    pub fn handover(&self) -> SourceState {
        self.common.handover
    }

    /// The statistics so far.
    #[must_use]
    pub fn stats(&self) -> &SourceStats {
        &self.common.stats
    }

    /// The shortest round trip on the control channel so far; 0 if none was measured.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        self.common.pings.round_trip.unwrap_or_default()
    }

    /// The negotiated protocol version.
    #[must_use]
    pub fn protocol(&self) -> u16 {
        self.common.our_side.protocol
    }

    /// The phase in words.
    #[must_use]
    pub fn phase_name(&self) -> &'static str {
        self.phase.name()
    }
}
