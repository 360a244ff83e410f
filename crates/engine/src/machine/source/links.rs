//! The source's channels: which of them are lost, and how often each was dialed.

use std::time::Duration;

use vmferry_wire::Token;

use crate::error::MigrateError;
use crate::link::Loss;

/// All channels of the session.
#[derive(Debug)]
pub(super) struct Links {
    /// The session's token, which data channels and a resumed control channel must present. The
    /// destination sends it when it accepts the guest.
    pub(super) token: Option<Token>,
    control: Link,
    lanes: Vec<Link>,
    /// Since when at least one is missing.
    pub(super) down_since: Option<Duration>,
}

/// One channel.
#[derive(Debug, Default)]
pub(super) struct Link {
    /// Attempts to redial so far.
    pub(super) attempts: u64,
    pub(super) loss: Option<Loss>,
    /// The cause of the loss, for a lane on which nothing is sent at present. It counts if the
    /// guest runs on here.
    pub(super) idle_loss: Option<MigrateError>,
}

impl Links {
    pub(super) fn new(lanes: u8) -> Self {
        let lanes = (0..lanes).map(|_| Link::default()).collect();
        Self { token: None, control: Link::default(), lanes, down_since: None }
    }

    pub(super) fn is_control_up(&self) -> bool {
        self.control.loss.is_none()
    }

    pub(super) fn are_up(&self) -> bool {
        self.all().all(|link| link.loss.is_none())
    }

    fn all(&self) -> impl Iterator<Item = &Link> {
        std::iter::once(&self.control).chain(&self.lanes)
    }

    /// The channel of a lane, or the control channel.
    pub(super) fn of(&mut self, lane: Option<u8>) -> Option<&mut Link> {
        match lane {
            Some(lane) => self.lanes.get_mut(usize::from(lane)),
            None => Some(&mut self.control),
        }
    }

    /// No channel of these is needed any more, or others have replaced them.
    pub(super) fn forget_losses(&mut self) {
        self.control.loss = None;
        self.lanes.iter_mut().for_each(|link| link.loss = None);
    }

    /// When the timeout of the first lost channel expires.
    pub(super) fn deadline(&self, patience: Duration) -> Option<Duration> {
        self.all().filter_map(|link| link.loss.as_ref()).map(|loss| loss.since + patience).min()
    }

    /// Events were not processed for this long, so a reestablished channel could not be reported.
    pub(super) fn were_unheard(&mut self, now: Duration, took: Duration) {
        for link in std::iter::once(&mut self.control).chain(&mut self.lanes) {
            if let Some(loss) = &mut link.loss {
                loss.since = now.min(loss.since + took);
            }
        }
    }

    /// The loss of a lane does not count if everything that was sent on it has arrived.
    pub(super) fn excuse_lanes(&mut self, is_done: impl Fn(u8) -> bool) {
        for (lane, link) in (0..).zip(&mut self.lanes) {
            if let Some(loss) = link.loss.take_if(|_| is_done(lane)) {
                link.idle_loss = Some(loss.error);
            }
        }
    }

    /// The error that ends the migration, if the timeout of a lost channel has expired.
    pub(super) fn take_overdue(
        &mut self,
        now: Duration,
        patience: Duration,
    ) -> Option<MigrateError> {
        let overdue = |link: &mut Link| link.loss.take_if(|loss| now >= loss.since + patience);
        let loss = overdue(&mut self.control).or_else(|| self.lanes.iter_mut().find_map(overdue));
        loss.map(|loss| loss.error)
    }
}
