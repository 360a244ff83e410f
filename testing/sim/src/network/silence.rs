//! A network that carries nothing for a while, without a channel's end.

use std::time::Duration;

use crate::host::Host;
use crate::plan::Ways;

/// A shorter silence may end before the source notices it.
const UNNOTICED: Duration = Duration::from_secs(12);

/// A silence, or several without a pause between them.
#[derive(Debug)]
pub(super) struct Silence {
    since: Duration,
    pub(super) until: Duration,
    ways: Ways,
    pub(super) lost: bool,
}

impl Silence {
    /// A silence from `now` on. It does not shorten the one before it.
    pub(super) fn begin(
        now: Duration,
        lasts: Duration,
        (ways, lost): (Ways, bool),
        before: Option<Self>,
    ) -> Self {
        let before = before.filter(|silence| silence.until > now);
        let since = before.as_ref().map_or(now, |silence| silence.since);
        let until = before.map_or(now + lasts, |silence| silence.until.max(now + lasts));
        Self { since, until, ways, lost }
    }

    /// Whether it affects messages to a host.
    pub(super) fn covers(&self, to: Host, now: Duration) -> bool {
        self.until > now && self.ways.cover(to)
    }

    /// Whether a message is lost. TCP sends lost bytes again, and if that succeeds before the
    /// source has noticed the silence, nobody knows of it. On a fetch lane no timeout waits for
    /// progress, so what it carries is lost only in a longer silence.
    pub(super) fn loses(&self, is_of_fetch_lane: bool) -> bool {
        self.lost && !(is_of_fetch_lane && self.until - self.since < UNNOTICED)
    }
}
