//! What the source reports about its channels.

use std::collections::BTreeSet;
use std::time::Duration;

use vmferry::machine::source::io::{Action, Report};

/// What the source knows about its channels, by its own reports.
#[derive(Clone, Debug, Default)]
pub struct LinkRecord {
    /// How often the source has reported that it is connected.
    pub connected: u64,
    /// Whether it was ready before it had reported that.
    pub ready_unconnected: bool,
    /// Since when a lost channel can be reconnected.
    pub begun: Option<Duration>,
    /// Channels that are lost and being reconnected.
    pub away: BTreeSet<String>,
    /// Since when all channels are open again, after the last loss.
    pub whole_since: Duration,
    /// How often a channel was reconnected.
    pub restored: u64,
    /// How often a paused guest was resumed because of a lost link.
    pub recalls: u64,
    /// Frames that were sent again.
    pub resent: u64,
}

impl LinkRecord {
    /// Follows the source's reports.
    pub(super) fn note(&mut self, action: &Action, now: Duration) {
        match action {
            Action::SendRound { round: 1, .. } => self.begun = Some(now),
            Action::Report(Report::Connected { .. }) => self.connected += 1,
            Action::Report(Report::Ready) => self.ready_unconnected |= self.connected == 0,
            Action::Report(Report::LinkLost { channel, .. }) => {
                self.away.insert(channel.clone());
            }
            Action::Report(Report::LinkRestored { channel, .. }) => {
                self.away.remove(channel);
                self.whole_since = now;
                self.restored += 1;
            }
            Action::Report(Report::Recalled) => self.recalls += 1,
            Action::Report(Report::Resent { frames, .. }) => self.resent += frames,
            _ => {}
        }
    }
}
