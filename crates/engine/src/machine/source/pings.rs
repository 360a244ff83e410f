//! Signs of life from the destination: pings on the control channel, and progress that is waited
//! for.

use std::time::Duration;

/// Interval of pings to a silent peer.
pub(super) const PING_INTERVAL: Duration = Duration::from_secs(1);

/// The control channel's traffic and round trip.
#[derive(Debug)]
pub(super) struct Pings {
    /// When the last message arrived.
    pub(super) heard: Duration,
    /// Number of pings sent so far, which is the number of the last one.
    pub(super) sent: u64,
    /// The pings that measure the round trip of a new session.
    pub(super) first: FirstPings,
    /// The oldest ping that is not answered yet.
    pub(super) unanswered: Option<Ping>,
    /// When the next ping is due.
    pub(super) next: Duration,
    /// The shortest round trip so far.
    pub(super) round_trip: Option<Duration>,
}

/// Consecutive pings once all channels are open. The first one wakes threads and fills caches; the
/// shortest round trip is the link's.
pub(super) const FIRST_PINGS: u32 = 4;

/// How far the first measurement of the round trip is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstPings {
    /// Not all channels are open yet.
    NotSent,
    /// The number of answers that are awaited, counting the present ping's.
    Awaited(u32),
    /// The connection was reported.
    Reported,
}

/// A ping and when it was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ping {
    pub(super) nonce: u64,
    pub(super) at: Duration,
}

impl Pings {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            heard: now,
            sent: 0,
            first: FirstPings::NotSent,
            unanswered: None,
            next: now + PING_INTERVAL,
            round_trip: None,
        }
    }

    /// Numbers a ping that is sent now. If an earlier one is not answered yet, that one is
    /// measured: on a link whose round trip takes longer than the interval, no other ever would be.
    pub(super) fn begin(&mut self, now: Duration) -> u64 {
        self.sent += 1;
        self.unanswered.get_or_insert(Ping { nonce: self.sent, at: now });
        self.next = now + PING_INTERVAL;
        self.sent
    }

    /// The round trip of the ping that this answers. Each ping gives one measurement, even if its
    /// answer is repeated.
    pub(super) fn answered(&mut self, now: Duration, nonce: u64) -> Option<Duration> {
        let ping = self.unanswered.take_if(|ping| ping.nonce == nonce)?;
        Some(now.saturating_sub(ping.at))
    }

    /// Another control channel has replaced the one on which the last ping was sent.
    pub(super) fn on_new_channel(&mut self, now: Duration) {
        self.heard = now;
        self.unanswered = None;
        self.next = now;
    }
}

/// Multiple of the stall timeout for which a destination may report arriving frames without placing
/// one. A lane of 4 KB/s, which is one of 16 lanes under the lowest cap, takes a minute for a
/// frame.
const STALLS_WITHOUT_NEWS: u32 = 10;

/// The wait for the destination in the present phase.
#[derive(Debug)]
pub(super) struct Wait {
    /// When the wait began.
    pub(super) since: Duration,
    /// When the phase began or the destination last placed a frame, whichever is later.
    last_news: Duration,
}

impl Wait {
    pub(super) fn new(now: Duration) -> Self {
        Self { since: now, last_news: now }
    }

    /// The destination has placed a frame that was not reported before.
    pub(super) fn on_news(&mut self, now: Duration) {
        self.last_news = now;
    }

    /// Whether an acknowledgement extends the wait. Without progress it only says that frames are
    /// arriving, if slowly. A peer that only does that must not keep the guest waiting forever.
    pub(super) fn is_extended(&self, now: Duration, stall: Duration) -> bool {
        now < self.last_news + stall * STALLS_WITHOUT_NEWS
    }

    /// This side did not process messages for this long.
    pub(super) fn was_unheard(&mut self, now: Duration, took: Duration) {
        self.since = now.max(self.since).min(self.since + took);
    }
}
