//! The source's machine against the clock: every wait is bounded, and a silent peer is pinged.

use std::time::Duration;

use vmferry_wire::ControlMessage;

use super::{Phase, Source, ms};
use crate::error::MigrateError;
use crate::handover::{SourceEvent, SourceState};
use crate::source::io::{Action, Report};

/// How often a silent peer is asked for a sign of life.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(1);

/// Pings in a row once the channels are open. The first one wakes threads and fills caches, and the
/// shortest round trip is the link's.
const PINGS_AT_START: u64 = 4;

impl Source {
    /// Whether a peer is expected to be heard on the control channel.
    pub(super) fn listens(&self) -> bool {
        !matches!(self.handover, SourceState::InDoubt { .. })
            && self.phase != Phase::Done
            && self.links.is_control_up()
    }

    /// The bound of the present wait, what is awaited, and its length.
    pub(super) fn deadline(&self) -> Option<(Duration, &'static str, Duration)> {
        let timeouts = self.timeouts();
        let (what, after) = match self.phase {
            Phase::Announced => {
                ("the destination's answer to the announced guest", timeouts.accept)
            }
            Phase::Joining => ("the data channels", timeouts.accept),
            // What was lost has a bound of its own.
            Phase::Sending | Phase::LastRound if !self.links.are_up() => return None,
            Phase::Sending | Phase::LastRound => {
                ("the destination to place frames", timeouts.stall)
            }
            Phase::AwaitReady => ("READY", timeouts.ready),
            Phase::Verifying => ("the hash of the destination's memory", timeouts.verify),
            Phase::HandingOver => ("RUNNING", timeouts.running),
            Phase::Asking => ("the destination's word", timeouts.running),
            // Bounded by the VMM and the kernel, which the engine calls and awaits.
            Phase::Harvesting | Phase::Pausing | Phase::LastHarvest => return None,
            Phase::Done => return None,
        };
        Some((self.waiting_since + after, what, after))
    }

    pub(super) fn watch_the_clock(&mut self, now: Duration) {
        if self.phase == Phase::Done {
            return;
        }
        if let Some((at, what, after)) = self.deadline()
            && now >= at
        {
            self.waiting_since = now;
            self.fail_by(now, SourceEvent::LinkLost, MigrateError::TimedOut { what, after });
            return;
        }
        if self.rests_until().is_some_and(|until| now >= until) {
            self.go_on(now);
        }
        if let Some(error) = self.links.take_overdue(now, self.patience()) {
            self.fail_by(now, SourceEvent::LinkLost, error);
            return;
        }
        if !self.listens() {
            return;
        }
        let silence = self.timeouts().silence;
        if now >= self.last_heard + silence {
            self.last_heard = now;
            let what = "any sign of life on the control channel";
            self.on_control_lost(now, MigrateError::TimedOut { what, after: silence });
        } else if now >= self.next_ping {
            self.send_ping(now);
        }
    }

    pub(super) fn send_ping(&mut self, now: Duration) {
        self.pings += 1;
        let nonce = self.pings;
        self.ping = Some((nonce, now));
        self.next_ping = now + PING_INTERVAL;
        self.act(Action::Send(ControlMessage::Ping { nonce }));
    }

    pub(super) fn on_pong(&mut self, now: Duration, nonce: u64) {
        if self.withdrawn.take_if(|ping| nonce >= *ping).is_some() {
            self.go_on(now);
        }
        // An answer is worth one measurement, however often it is repeated.
        let Some((_, at)) = self.ping.take_if(|(sent, _)| *sent == nonce) else { return };
        let round_trip = now.saturating_sub(at);
        let best = self.round_trip.map_or(round_trip, |known| known.min(round_trip));
        if self.round_trip != Some(best) {
            self.act(Action::FitWindows { round_trip: best });
        }
        self.round_trip = Some(best);
        self.stats.round_trip_ms = ms(best);
        self.predictor.measured_round_trip(best);
        if nonce < PINGS_AT_START {
            self.send_ping(now);
        } else if nonce == PINGS_AT_START {
            let (protocol, destination) = (self.protocol(), self.stats.destination.clone());
            let round_trip_ms = ms(best);
            let connected = Report::Connected { round_trip_ms, protocol, destination };
            self.act(Action::Report(connected));
        }
    }
}
