//! What the user may choose, valid by construction.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmferry_memory::PAGE_SIZE;
use vmferry_wire::{AlgorithmSet, PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN, SessionId};

use crate::compression::{CompressionConfig, MOST_WORKERS};
use crate::convergence::{Limits, WhenStuck};
use crate::policy::Admission;
use crate::probe::HostFacts;

/// Pages in one frame: 256 KiB keeps a frame within a core's second-level cache on both sides,
/// and a header of 48 bytes costs nothing beside it.
pub const FRAME_PAGES: usize = 64;

/// Pages in one frame where many are zero: as many as may have content, if they should not be after all.
pub const MOST_FRAME_PAGES: usize = vmferry_wire::MAX_FRAME_CONTENT_PAGES as usize;

/// Consecutive pages of one slot that share a lane: 2 MiB, so that a huge page is read, written
/// and populated by one thread.
pub const LANE_STRIPE_PAGES: u64 = 512;

/// Frames that may be sent and not yet placed, over all lanes: 64 MiB, which fills 10 Gbit/s at
/// a round trip of 50 ms.
const WINDOW_BYTES: usize = 64 << 20;

/// The same where the round trip is nothing: 8 MiB. Fewer would let sender and receiver wait for each other more often,
/// more would push each other's buffers out of the caches: of 3, 4, 6, 8 and 12 MiB, 8 took the least CPU time over one
/// channel and over two, on two cores with 4 MiB of second-level cache.
const LEAST_WINDOW_BYTES: usize = 8 << 20;

/// Frames per lane at most.
const MOST_WINDOW_FRAMES: usize = 64;

/// Frames per lane that are filled, wait for the channel, or are placed and not acknowledged, beside those that
/// workers make.
const LEAST_WINDOW_FRAMES: usize = 4;

/// The fastest link that a window is meant for, in bytes per second: 40 Gbit/s.
const FASTEST_LINK: f64 = 5e9;

/// A migration whose pause lasts this many times the downtime limit is given up unless the user has
/// chosen another bound: what made the prediction wrong by that much goes on, and the guest is
/// better off at the source.
const DOWNTIME_ABORT_FACTOR: u32 = 10;

/// No shorter pause is given up unless the user says so: a host that is busy for a moment adds as
/// much, and a migration that is given up costs the guest another pause.
const LEAST_DOWNTIME_ABORT: Duration = Duration::from_secs(5);

/// How long the engine waits. Every wait in it has one of these bounds.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// To the destination's answer to the announcement of the guest; it makes memory meanwhile.
    pub accept: Duration,
    /// Without any sign of life on the control channel. Default 10 s.
    pub silence: Duration,
    /// Without one placed frame while frames are out. Default 30 s.
    pub stall: Duration,
    /// To READY, after everything was sent. Default 30 s.
    pub ready: Duration,
    /// Source: to RUNNING, after COMMIT, before the link is taken for lost. Default 10 s.
    pub running: Duration,
    /// Destination: from READY to COMMIT, before it journals ABORTED. Default 60 s.
    pub commit: Duration,
    /// Between two questions of a source in doubt. Default 1 s.
    pub ask: Duration,
    /// To the end of a whole-memory hash. Default 10 min.
    pub verify: Duration,
    /// For how long a lost channel is made again before the migration is given up; 0 gives up at once. The
    /// guest runs at the source meanwhile. The destination waits as long as the source says, and no longer
    /// than this. Default 30 s at the source, 10 min at the destination.
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

/// A setting that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Data channels out of range.
    #[error("{0} channels: choose 1 to 16")]
    Channels(u8),
    /// A cap that no migration ends under.
    #[error("a bandwidth cap of {0} bytes/s is below 64 KiB/s")]
    Bandwidth(u64),
    /// vCPUs that would stand still.
    #[error("a throttle of {0} %: choose 0 to 99")]
    Throttle(u8),
    /// Worker threads out of range.
    #[error("{0} workers: choose 1 to {MOST_WORKERS}")]
    Workers(u8),
    /// No rounds.
    #[error("at least one round is needed")]
    Rounds,
    /// A VMM that streams its guest decides itself when that stands still.
    #[error(
        "a guest that its VMM streams can't be held short of the switchover, as the VMM decides when to stop it: leave \
         --pause-before-switchover out, or attach to it"
    )]
    NothingToHold,
    /// Versions of the protocol that this release does not speak.
    #[error(
        "protocol versions {oldest} to {newest}: this release speaks {PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION_MAX}"
    )]
    Protocol {
        /// The oldest that was asked for.
        oldest: u16,
        /// The newest.
        newest: u16,
    },
    /// A VMM that streams its guest shows nobody its memory.
    #[error(
        "the memory of a guest that its VMM streams can't be hashed, so there is nothing to verify: leave --verify out; \
         every byte of the streams is compared in any case"
    )]
    NothingToVerify,
}

/// How the source migrates.
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
    /// The migration's number; random by default and used once.
    pub session: SessionId,
    /// Data channels, 1 to 16. Default 2.
    pub channels: u8,
    /// Longest accepted downtime. Default 300 ms.
    pub downtime_limit: Duration,
    /// How long the guest may be paused before COMMIT, whatever was predicted: then the migration
    /// is given up, and the guest runs on. Default none: see
    /// [`downtime_abort`](Self::downtime_abort).
    pub downtime_abort: Option<Duration>,
    /// Cap over all data channels in bytes per second, in the paused round too. Default none.
    pub max_bandwidth: Option<u64>,
    /// Rounds with the guest running. Default 30.
    pub max_rounds: u32,
    /// Time with the guest running. Default none.
    pub timeout: Option<Duration>,
    /// What to do when neither suffices. Default refuse.
    pub when_stuck: WhenStuck,
    /// Hold the migration when the rest fits the downtime limit, with the guest running and kept in step, until
    /// [`Orders::switch_over`](crate::source::Orders::switch_over). Default off.
    pub pause_before_switchover: bool,
    /// Per cent of their time that the vCPUs may lose when a round does not shorten the next one, at
    /// most 99. Default 0: never.
    pub throttle: u8,
    /// What is done to pages on their way.
    pub compression: CompressionConfig,
    /// Ask a guest that can hint its free pages for them, and don't send those. Default on.
    pub free_page_hints: bool,
    /// Hash both paused memories whole and compare them before COMMIT. Default off.
    pub verify: bool,
    /// Versions of the protocol that this side speaks. Default all that this release knows.
    pub protocol: RangeInclusive<u16>,
    /// Directory of the journals.
    pub journal_directory: PathBuf,
    /// The process of the guest's VMM, if that outlives this one, as no other process is ever
    /// called: what the journal says is about the guest in it. Default none.
    pub process: Option<String>,
    /// Bounds of all waits.
    pub timeouts: Timeouts,
}

impl SourceConfig {
    /// The defaults, with a new session.
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

    /// How long the guest may be paused before COMMIT: what was chosen, but no less than the
    /// downtime limit; else ten times that limit, and at least 5 s. A migration that hands over at
    /// any price has no bound unless one is chosen.
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

/// All versions of the protocol that this release speaks.
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

/// How the destination receives.
#[derive(Clone, Debug)]
pub struct DestinationConfig {
    /// Directory of the journals.
    pub journal_directory: PathBuf,
    /// End with the first attempt that fails, instead of listening on. Default off.
    pub once: bool,
    /// Threads that decode and place; by default one for each processor, at most 16. Fewer than 1 is 1.
    pub workers: Option<u8>,
    /// Who may send which guest here. Default none: whoever is authenticated may send any, and over `tcp:` and
    /// `unix:` whoever connects.
    pub policy: Option<Arc<dyn Admission>>,
    /// From a connection until it has been greeted, TLS and all. Default 10 s.
    pub greeting_timeout: Duration,
    /// Whether each worker keeps its decompressors, as it should; otherwise one is made for each frame, for
    /// comparison. Default on.
    pub keep_decompressors: bool,
    /// What a source may compress with. A source of protocol version 1 is not told. Default all that this release knows.
    pub algorithms: AlgorithmSet,
    /// Versions of the protocol that this side speaks. Default all that this release knows.
    pub protocol: RangeInclusive<u16>,
    /// Bounds of all waits.
    pub timeouts: Timeouts,
    /// What a source that is admitted is told of this host when it [asks](crate::probe). Default
    /// nothing.
    pub host: HostFacts,
}

impl DestinationConfig {
    /// The defaults.
    #[must_use]
    pub fn new(journal_directory: PathBuf) -> Self {
        Self {
            journal_directory,
            once: false,
            workers: None,
            policy: None,
            greeting_timeout: Duration::from_secs(10),
            keep_decompressors: true,
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

/// Frames of one lane that may be out, for so many lanes and workers: what the fastest link carries in two
/// round trips.
pub(crate) fn window_frames(lanes: u8, workers: usize, round_trip: Duration) -> usize {
    let lanes = usize::from(lanes.max(1));
    let link_bytes = (2.0 * round_trip.as_secs_f64() * FASTEST_LINK) as usize;
    let bytes = link_bytes.clamp(LEAST_WINDOW_BYTES, WINDOW_BYTES);
    let frames = bytes / (FRAME_PAGES * PAGE_SIZE) / lanes;
    frames.max(LEAST_WINDOW_FRAMES + workers.div_ceil(lanes)).min(MOST_WINDOW_FRAMES)
}

/// The lane of a page: a function of its number alone, so that no two versions of one page ever
/// travel on different lanes.
#[must_use]
pub fn lane_of(page: u64, lanes: u8) -> u8 {
    ((page / LANE_STRIPE_PAGES) % u64::from(lanes.max(1))) as u8
}

/// A session number that was never used.
#[must_use]
pub fn new_session() -> SessionId {
    SessionId(*uuid::Uuid::new_v4().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downtime_abort_follows_the_limit_unless_it_is_chosen() {
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
    fn a_window_fits_the_link() {
        let frames = |lanes, micros| window_frames(lanes, 2, Duration::from_micros(micros));
        assert_eq!([frames(1, 50), frames(2, 50), frames(4, 50), frames(16, 50)], [32, 16, 8, 5]);
        assert_eq!([frames(1, 1_000), frames(2, 1_000), frames(4, 1_000)], [38, 19, 9]);
        assert_eq!([frames(1, 50_000), frames(4, 50_000), frames(16, 50_000)], [64, 64, 16]);
        assert_eq!(window_frames(1, 64, Duration::ZERO), 64, "workers are not kept waiting");
    }
}
