//! The user's settings.

pub mod compression;
mod limits;
pub mod policy;

pub use self::limits::{Limits, WhenStuck};

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmferry_codec::Decompressors;
use vmferry_memory::PAGE_SIZE;
use vmferry_wire::{AlgorithmSet, PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, SessionId};

use self::compression::{CompressionConfig, FRAME_PAGES, MOST_WORKERS};
use self::policy::Admission;
use crate::probe::host::HostFacts;

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

/// A migration is aborted when its pause exceeds this multiple of the downtime limit, unless the
/// user sets another bound. Whatever made the prediction wrong by that factor is likely to persist,
/// so the guest is better off at the source.
const DOWNTIME_ABORT_FACTOR: u32 = 10;

/// A pause shorter than this does not abort the migration unless the user says so. A briefly busy
/// host adds as much, and an aborted migration costs the guest another pause.
const LEAST_DOWNTIME_ABORT: Duration = Duration::from_secs(5);

/// The engine's timeouts. Every wait in the engine is bounded by one of them.
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
            verify: seconds(600),
            reconnect: seconds(30),
        }
    }
}

/// A setting that is out of its range or does not apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The number of data channels is out of range.
    #[error("{0} channels: choose 1 to 16")]
    Channels(u8),
    /// The bandwidth cap is too low for any migration to finish.
    #[error("a bandwidth cap of {0} bytes/s is below 64 KiB/s")]
    Bandwidth(u64),
    /// The throttle would stop the vCPUs completely.
    #[error("a throttle of {0} %: choose 0 to 99")]
    Throttle(u8),
    /// The number of worker threads is out of range.
    #[error("{0} workers: choose 1 to {MOST_WORKERS}")]
    Workers(u8),
    /// The number of rounds is zero.
    #[error("at least one round is needed")]
    Rounds,
    /// `pause_before_switchover` is set for a carried guest, whose VMM decides itself when to stop
    /// it.
    #[error(
        "a guest that its VMM streams can't be held short of the switchover, as the VMM decides \
         when to stop it: do not ask for that, or attach to it"
    )]
    NothingToHold,
    /// The range contains protocol versions that this release does not speak.
    #[error(
        "protocol versions {oldest} to {newest}: this release speaks {PROTOCOL_VERSION_MIN} to \
         {PROTOCOL_VERSION_MAX}"
    )]
    Protocol {
        /// The oldest version requested.
        oldest: u16,
        /// The newest version requested.
        newest: u16,
    },
    /// `verify` is set for a carried guest, whose VMM does not expose its memory.
    #[error(
        "the memory of a guest that its VMM streams can't be hashed, so there is nothing to \
         verify: do not ask for that; every byte of the streams is compared in any case"
    )]
    NothingToVerify,
}

/// Settings of the source.
///
/// ```
/// use std::time::Duration;
///
/// use vmferry::SourceConfig;
///
/// let mut config = SourceConfig::new("/var/lib/firebird/journals".into());
/// config.downtime_limit = Duration::from_millis(50);
/// config.max_bandwidth = Some(500 << 20);
/// config.check()?;
/// config.channels = 17;
/// assert_eq!(config.check().unwrap_err().to_string(), "17 channels: choose 1 to 16");
/// # Ok::<(), vmferry::config::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// The session ID: random by default, and used once.
    pub session: SessionId,
    /// Data channels, 1 to 16. Default 2.
    pub channels: u8,
    /// Longest accepted downtime. Default 300 ms.
    pub downtime_limit: Duration,
    /// How long the guest may be paused before COMMIT, whatever was predicted. After that the
    /// migration is aborted and the guest runs on. Default none: see
    /// [`downtime_abort`](Self::downtime_abort).
    pub downtime_abort: Option<Duration>,
    /// Cap over all data channels in bytes per second. It applies to the paused round too. Default
    /// none.
    pub max_bandwidth: Option<u64>,
    /// The most rounds with the guest running. Default 30.
    pub max_rounds: u32,
    /// The longest time with the guest running. Default none.
    pub timeout: Option<Duration>,
    /// What to do when the rounds or the time are used up. Default refuse.
    pub when_stuck: WhenStuck,
    /// Hold the migration when the remaining pages fit the downtime limit. The guest runs and its
    /// writes are still sent until
    /// [`Orders::switch_over`](crate::source::Orders::switch_over). Default off.
    pub pause_before_switchover: bool,
    /// Percentage of CPU time that the vCPUs may lose when a round does not make the next one
    /// shorter, at most 99. Default 0: never throttle.
    pub throttle: u8,
    /// How pages are compressed.
    pub compression: CompressionConfig,
    /// Request free-page hints from a guest that supports them, and skip the hinted pages. Default
    /// on.
    pub free_page_hints: bool,
    /// Hash the whole memory of the paused guest on both sides and compare before COMMIT. Default
    /// off.
    pub verify: bool,
    /// Protocol versions that this side speaks. Default: all that this release knows.
    pub protocol: RangeInclusive<u16>,
    /// Directory of the journals.
    pub journal_directory: PathBuf,
    /// A unique name of the guest's VMM process, if that process outlives this one. The journal
    /// then refers to the guest in that process. Default none.
    pub process: Option<String>,
    /// The timeouts.
    pub timeouts: Timeouts,
}

impl SourceConfig {
    /// The default settings, with a new session ID.
    #[must_use]
    pub fn new(journal_directory: PathBuf) -> Self {
        Self {
            session: new_session(),
            channels: 2,
            downtime_limit: Duration::from_millis(300),
            downtime_abort: None,
            max_bandwidth: None,
            max_rounds: 30,
            timeout: None,
            when_stuck: WhenStuck::Refuse,
            pause_before_switchover: false,
            throttle: 0,
            compression: CompressionConfig::default(),
            free_page_hints: true,
            verify: false,
            protocol: PROTOCOL_VERSIONS,
            journal_directory,
            process: None,
            timeouts: Timeouts::default(),
        }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// The first setting that is out of its range.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !(1..=16).contains(&self.channels) {
            return Err(ConfigError::Channels(self.channels));
        }
        check_bandwidth(self.max_bandwidth)?;
        check_throttle(self.throttle)?;
        check_workers(self.compression.workers)?;
        check_rounds(self.max_rounds)?;
        check_protocol(&self.protocol)
    }

    /// How long the guest may be paused before COMMIT: the chosen bound, but no less than the
    /// downtime limit. If none was chosen: ten times that limit, and at least 5 s, or no bound if
    /// the migration is to switch over at any cost.
    #[must_use]
    pub fn downtime_abort(&self) -> Option<Duration> {
        let usual = || {
            (self.when_stuck == WhenStuck::Refuse).then(|| {
                LEAST_DOWNTIME_ABORT.max(self.downtime_limit.saturating_mul(DOWNTIME_ABORT_FACTOR))
            })
        };
        self.downtime_abort.or_else(usual).map(|bound| bound.max(self.downtime_limit))
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            downtime: self.downtime_limit,
            rounds: self.max_rounds,
            time: self.timeout,
            when_stuck: self.when_stuck,
        }
    }
}

pub(crate) fn check_bandwidth(cap: Option<u64>) -> Result<(), ConfigError> {
    match cap {
        Some(cap) if cap < 64 << 10 => Err(ConfigError::Bandwidth(cap)),
        _ => Ok(()),
    }
}

pub(crate) fn check_throttle(percent: u8) -> Result<(), ConfigError> {
    if percent > 99 { Err(ConfigError::Throttle(percent)) } else { Ok(()) }
}

pub(crate) fn check_rounds(rounds: u32) -> Result<(), ConfigError> {
    if rounds == 0 { Err(ConfigError::Rounds) } else { Ok(()) }
}

/// All protocol versions that this release speaks.
pub const PROTOCOL_VERSIONS: RangeInclusive<u16> = PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION_MAX;

fn check_protocol(versions: &RangeInclusive<u16>) -> Result<(), ConfigError> {
    let (oldest, newest) = (*versions.start(), *versions.end());
    let known = |version| PROTOCOL_VERSIONS.contains(&version);
    if oldest <= newest && known(oldest) && known(newest) {
        Ok(())
    } else {
        Err(ConfigError::Protocol { oldest, newest })
    }
}

fn check_workers(workers: Option<u8>) -> Result<(), ConfigError> {
    match workers {
        Some(workers) if !(1..=MOST_WORKERS).contains(&workers) => {
            Err(ConfigError::Workers(workers))
        }
        _ => Ok(()),
    }
}

/// Settings of the destination.
#[derive(Clone, Debug)]
pub struct DestinationConfig {
    /// Directory of the journals.
    pub journal_directory: PathBuf,
    /// Return after the first failed attempt instead of listening on. Default off.
    pub once: bool,
    /// Threads that decode and place. By default one for each processor, at most 64. 0 is treated
    /// as 1.
    pub workers: Option<u8>,
    /// Which source may send which guest here. Default none: every authenticated source may send
    /// any guest, and so may every peer that connects over `tcp:` or `unix:`.
    pub policy: Option<Arc<dyn Admission>>,
    /// From a connection to the end of its greeting, including TLS. Default 10 s.
    pub greeting_timeout: Duration,
    /// Creates each worker's decompressors. Default: those that a worker keeps. Benchmarks compare
    /// them with others.
    #[doc(hidden)]
    pub decompressors: fn() -> Decompressors,
    /// What a source may compress with. A source of protocol version 1 is not told. Default all
    /// that this release knows.
    pub algorithms: AlgorithmSet,
    /// Protocol versions that this side speaks. Default: all that this release knows.
    pub protocol: RangeInclusive<u16>,
    /// The timeouts.
    pub timeouts: Timeouts,
    /// What an admitted source learns about this host from a [probe](crate::probe). Default
    /// nothing.
    pub host: HostFacts,
}

impl DestinationConfig {
    /// The default settings.
    #[must_use]
    pub fn new(journal_directory: PathBuf) -> Self {
        Self {
            journal_directory,
            once: false,
            workers: None,
            policy: None,
            greeting_timeout: Duration::from_secs(10),
            decompressors: Decompressors::default,
            algorithms: AlgorithmSet::ALL,
            protocol: PROTOCOL_VERSIONS,
            timeouts: Timeouts { reconnect: Duration::from_secs(600), ..Timeouts::default() },
            host: HostFacts::default(),
        }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// The first setting that is out of its range.
    pub fn check(&self) -> Result<(), ConfigError> {
        check_protocol(&self.protocol)
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
    fn downtime_abort_defaults_to_a_multiple_of_the_limit() {
        let second = Duration::from_secs(1);
        let mut config = SourceConfig::new("unused".into());
        assert_eq!(config.downtime_abort(), Some(second * 5));
        config.downtime_limit = second * 2;
        assert_eq!(config.downtime_abort(), Some(second * 20));
        config.when_stuck = WhenStuck::SwitchOver;
        assert_eq!(config.downtime_abort(), None);
        config.downtime_abort = Some(second * 3);
        assert_eq!(config.downtime_abort(), Some(second * 3));
        config.downtime_limit = second * 4;
        assert_eq!(config.downtime_abort(), Some(second * 4));
    }

    #[test]
    fn window_size_follows_the_link() {
        let frames = |lanes, micros| window_frames(lanes, 2, Duration::from_micros(micros));
        assert_eq!([frames(1, 50), frames(2, 50), frames(4, 50), frames(16, 50)], [32, 16, 8, 5]);
        assert_eq!([frames(1, 1_000), frames(2, 1_000), frames(4, 1_000)], [38, 19, 9]);
        assert_eq!([frames(1, 50_000), frames(4, 50_000), frames(16, 50_000)], [64, 64, 16]);
        assert_eq!(window_frames(1, 64, Duration::ZERO), 64, "workers are not kept waiting");
    }
}
