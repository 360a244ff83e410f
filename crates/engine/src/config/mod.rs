//! The user's settings.

pub mod compression;
mod destination;
mod limits;
pub mod policy;
mod source;
mod values;

pub use self::destination::DestinationConfig;
pub use self::limits::{Limits, PostCopy, WhenStuck};
pub use self::source::SourceConfig;
pub use self::values::{
    BandwidthCap, ChannelCount, ConfigError, PROTOCOL_VERSIONS, ProtocolVersions, RoundLimit,
    ThrottleLimit, WorkerCount,
};

use std::time::Duration;

use vmferry_memory::PAGE_SIZE;
use vmferry_wire::SessionId;

use self::compression::FRAME_PAGES;

/// Consecutive pages of one slot that share a lane: 2 MiB, so that a huge page is read, written and
/// populated by one thread.
pub const LANE_STRIPE_PAGES: u64 = 512;

/// Bytes of frames that may be sent and not yet placed, over all lanes: 64 MiB, which fills a link
/// of 10 Gbit/s at a round trip of 50 ms.
const WINDOW_BYTES: usize = 64 << 20;

/// The same at a round trip of zero: 8 MiB. With less, sender and receiver wait for each other more
/// often. With more, they evict each other's buffers from the caches. Of 3, 4, 6, 8 and 12 MiB, 8
/// took the least CPU time, with one channel and with two, on two cores with 4 MiB of second-level
/// cache.
const LEAST_WINDOW_BYTES: usize = 8 << 20;

/// The most frames in a lane's window.
const MOST_WINDOW_FRAMES: usize = 64;

/// The fewest frames in a lane's window, not counting one for each worker: frames that are being
/// filled, wait for the channel, or are placed and not yet acknowledged.
const LEAST_WINDOW_FRAMES: usize = 4;

/// The fastest link that the window is sized for, in bytes per second: 40 Gbit/s.
const FASTEST_LINK: f64 = 5e9;

/// The timeouts that an embedder can set.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// From the announcement of the guest to the destination's answer. The destination allocates
    /// memory meanwhile. Default 30 s.
    pub accept: Duration,
    /// Longest time without any message on the control channel. Default 10 s.
    pub silence: Duration,
    /// Longest time without a newly placed frame while frames are outstanding. Default 30 s.
    pub stall: Duration,
    /// From the last byte sent to READY. Default 30 s.
    pub ready: Duration,
    /// Source: from COMMIT to RUNNING, before the link is treated as lost. Default 10 s.
    pub running: Duration,
    /// Destination: from READY to COMMIT, before it journals ABORTED. Default 60 s.
    pub commit: Duration,
    /// Between two queries of a source in doubt. Default 1 s.
    pub ask: Duration,
    /// Destination: from COMMIT until the witness has granted the guest, before this side journals
    /// ABORTED. The guest is paused meanwhile. Default 5 s.
    pub claim: Duration,
    /// Source: from the beginning of a doubt until the guest is taken back at the witness. Long
    /// enough for a destination that is about to claim it, and for a link that was briefly cut.
    /// Default 3 s.
    pub take_back: Duration,
    /// For a hash of the whole memory. Default 10 min.
    pub verify: Duration,
    /// How long a lost channel is redialed before the migration is aborted; 0 aborts at once. The
    /// guest runs at the source meanwhile. The destination waits as long as the source announces,
    /// but no longer than its own value. Default 30 s at the source, 10 min at the destination.
    pub reconnect: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            accept: seconds(30),
            silence: seconds(10),
            stall: seconds(30),
            ready: seconds(30),
            running: seconds(10),
            commit: seconds(60),
            ask: seconds(1),
            claim: seconds(5),
            take_back: seconds(3),
            verify: seconds(600),
            reconnect: seconds(30),
        }
    }
}

/// The window of one lane in frames, for this number of lanes and workers: what the fastest link
/// carries in two round trips.
pub(crate) fn window_frames(lanes: u8, workers: usize, round_trip: Duration) -> usize {
    let lanes = usize::from(lanes.max(1));
    let link_bytes = (2.0 * round_trip.as_secs_f64() * FASTEST_LINK) as usize;
    let bytes = link_bytes.clamp(LEAST_WINDOW_BYTES, WINDOW_BYTES);
    let frames = bytes / (FRAME_PAGES * PAGE_SIZE) / lanes;
    frames.max(LEAST_WINDOW_FRAMES + workers.div_ceil(lanes)).min(MOST_WINDOW_FRAMES)
}

/// The lane of a page. It depends on the page number alone, so two versions of one page never
/// travel on different lanes.
#[must_use]
pub fn lane_of(page: u64, lanes: u8) -> u8 {
    ((page / LANE_STRIPE_PAGES) % u64::from(lanes.max(1))) as u8
}

/// A new random session ID.
#[must_use]
pub fn new_session() -> SessionId {
    SessionId(*uuid::Uuid::new_v4().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_size_follows_the_link() {
        let frames = |lanes, micros| window_frames(lanes, 2, Duration::from_micros(micros));
        assert_eq!([frames(1, 50), frames(2, 50), frames(4, 50), frames(16, 50)], [32, 16, 8, 5]);
        assert_eq!([frames(1, 1_000), frames(2, 1_000), frames(4, 1_000)], [38, 19, 9]);
        assert_eq!([frames(1, 50_000), frames(4, 50_000), frames(16, 50_000)], [64, 64, 16]);
        assert_eq!(window_frames(1, 64, Duration::ZERO), 64, "workers are not kept waiting");
    }
}
