//! The destination's channels: which of them are lost, and how long it waits for them.

use std::time::Duration;

use vmferry_wire::LaneOffer;

use crate::error::MigrateError;
use crate::link::{EXPLANATION, Loss};

/// All channels of the session.
#[derive(Debug)]
pub(super) struct Links {
    /// Whether messages arrive on the control channel.
    pub(super) is_up: bool,
    /// How long the source may be disconnected. Zero before the source has announced it.
    pub(super) reconnect: Duration,
    /// The loss of a control channel that the source may reestablish.
    pub(super) control: Option<Loss>,
    lanes: Vec<LostLane>,
    /// Fetch lanes, for which a running guest waits however long it takes.
    fetch_lanes: Vec<LostLane>,
}

/// The loss of a data channel that the source may reestablish.
#[derive(Debug)]
struct LostLane {
    lane: u8,
    loss: Loss,
}

impl Default for Links {
    fn default() -> Self {
        Self {
            is_up: true,
            reconnect: Duration::ZERO,
            control: None,
            lanes: Vec::new(),
            fetch_lanes: Vec::new(),
        }
    }
}

impl Links {
    /// Whether no loss is waited for.
    pub(super) fn are_complete(&self) -> bool {
        self.control.is_none() && self.lanes.is_empty()
    }

    /// Stops waiting for lost channels: the control channel is lost for good. Returns whether it
    /// was up.
    pub(super) fn give_up(&mut self) -> bool {
        self.control = None;
        self.lanes.clear();
        std::mem::replace(&mut self.is_up, false)
    }

    /// Whether the loss of a lane is already known.
    pub(super) fn is_lane_lost(&self, lane: u8) -> bool {
        self.lanes.iter().chain(&self.fetch_lanes).any(|lost| lost.lane == lane)
    }

    pub(super) fn lose_lane(&mut self, lane: u8, loss: Loss) {
        self.lanes.push(LostLane { lane, loss });
    }

    pub(super) fn lose_fetch_lane(&mut self, lane: u8, loss: Loss) {
        self.fetch_lanes.push(LostLane { lane, loss });
    }

    /// The source has offered these fetch lanes, and there are no others from now on.
    pub(super) fn keep_fetch_lanes(&mut self, LaneOffer { first, lanes, .. }: LaneOffer) {
        let all = first..first.saturating_add(lanes.count());
        self.fetch_lanes.retain(|lost| all.contains(&lost.lane));
    }

    /// A lane has a channel. Returns its loss, if there was one.
    pub(super) fn restore_lane(&mut self, lane: u8) -> Option<Loss> {
        [&mut self.lanes, &mut self.fetch_lanes].into_iter().find_map(|lanes| {
            let index = lanes.iter().position(|lost| lost.lane == lane)?;
            Some(lanes.swap_remove(index).loss)
        })
    }

    /// Inputs were not processed for this long, so a reestablished channel could not be reported.
    pub(super) fn were_unheard(&mut self, now: Duration, took: Duration) {
        for loss in self.control.iter_mut().chain(self.lanes.iter_mut().map(|lost| &mut lost.loss))
        {
            loss.since = now.min(loss.since + took);
        }
    }

    /// How long to wait for a lost channel. After the loss of a data channel, the control channel
    /// may still report the reason.
    fn patience(&self) -> Duration {
        self.reconnect.max(EXPLANATION)
    }

    /// When the timeout of the first lost channel expires.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let all = self.control.iter().chain(self.lanes.iter().map(|lost| &lost.loss));
        all.map(|loss| loss.since + self.patience()).min()
    }

    /// The error that ends the session, if the timeout of a lost channel has expired.
    pub(super) fn take_overdue(&mut self, now: Duration) -> Option<MigrateError> {
        let patience = self.patience();
        if let Some(loss) = self.control.take_if(|loss| now >= loss.since + patience) {
            return Some(loss.error);
        }
        let index = self.lanes.iter().position(|lost| now >= lost.loss.since + patience)?;
        Some(self.lanes.remove(index).loss.error)
    }
}
