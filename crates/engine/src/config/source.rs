//! The settings of the source.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmferry_wire::{FetchLanes, SessionId};

use super::compression::CompressionConfig;
use super::values::{
    BandwidthCap, ChannelCount, PROTOCOL_VERSIONS, ProtocolVersions, RoundLimit, ThrottleLimit,
};
use super::{Limits, PostCopy, Timeouts, WhenStuck, new_session};
use crate::witness::Witness;

/// A migration is aborted when its pause exceeds this multiple of the downtime limit, unless the
/// user sets another bound. Whatever made the prediction wrong by that factor is likely to persist,
/// so the guest is better off at the source.
const DOWNTIME_ABORT_FACTOR: u32 = 10;

/// Fetch lanes for pages that vCPUs wait for. One thread serves a lane, and encrypts what it sends.
const FAULT_LANES: u8 = 2;

/// A pause shorter than this does not abort the migration unless the user says so. A briefly busy
/// host adds as much, and an aborted migration costs the guest another pause.
const LEAST_DOWNTIME_ABORT: Duration = Duration::from_secs(5);

/// Settings of the source.
///
/// ```
/// use std::time::Duration;
///
/// use vmferry::SourceConfig;
/// use vmferry::config::{BandwidthCap, ChannelCount};
///
/// let mut config = SourceConfig::new("/var/lib/firebird/journals".into());
/// config.downtime_limit = Duration::from_millis(50);
/// config.max_bandwidth = Some(BandwidthCap::new(500 << 20)?);
/// let error = ChannelCount::new(17).unwrap_err();
/// assert_eq!(error.to_string(), "17 channels: choose 1 to 16");
/// # Ok::<(), vmferry::config::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// The session ID: random by default, and used once.
    pub session: SessionId,
    /// Data channels. Default 2.
    pub channels: ChannelCount,
    /// Longest accepted downtime. Default 300 ms.
    pub downtime_limit: Duration,
    /// How long the guest may be paused before COMMIT, whatever was predicted. After that the
    /// migration is aborted and the guest runs on. Default none: see
    /// [`downtime_abort`](Self::downtime_abort).
    pub downtime_abort: Option<Duration>,
    /// Cap over all data channels. It applies to the paused round too. Default none.
    pub max_bandwidth: Option<BandwidthCap>,
    /// The most rounds with the guest running. Default 30.
    pub max_rounds: RoundLimit,
    /// The longest time with the guest running. Default none.
    pub timeout: Option<Duration>,
    /// What to do when the rounds or the time are used up. Default refuse.
    pub when_stuck: WhenStuck,
    /// Whether the guest may run at the destination before all of its pages have arrived. Not
    /// together with `verify`. Default never.
    pub post_copy: PostCopy,
    /// Hold the migration when the remaining pages fit the downtime limit. The guest runs and its
    /// writes are still sent until
    /// [`Orders::switch_over`](crate::source::Orders::switch_over). Default off.
    pub pause_before_switchover: bool,
    /// Percentage of CPU time that the vCPUs may lose when a round does not make the next one
    /// shorter. Default 0: never throttle.
    pub throttle: ThrottleLimit,
    /// How pages are compressed.
    pub compression: CompressionConfig,
    /// Request free-page hints from a guest that supports them, and skip the hinted pages. Default
    /// on.
    pub free_page_hints: bool,
    /// Hash the whole memory of the paused guest on both sides and compare before COMMIT. Default
    /// off.
    pub verify: bool,
    /// Protocol versions that this side speaks. Default: all that this release knows.
    pub protocol: ProtocolVersions,
    /// Directory of the journals.
    pub journal_directory: PathBuf,
    /// A unique name of the guest's VMM process, if that process outlives this one. The journal
    /// then refers to the guest in that process. Default none.
    pub process: Option<String>,
    /// Who gives the guest back if the handover is in doubt. A destination with another witness, or
    /// without one, refuses the guest. Default none: the destination or an operator decides.
    pub witness: Option<Arc<dyn Witness>>,
    /// The timeouts.
    pub timeouts: Timeouts,
}

impl SourceConfig {
    /// The default settings, with a new session ID.
    #[must_use]
    pub fn new(journal_directory: PathBuf) -> Self {
        Self {
            session: new_session(),
            channels: ChannelCount(2),
            downtime_limit: Duration::from_millis(300),
            downtime_abort: None,
            max_bandwidth: None,
            max_rounds: RoundLimit(30),
            timeout: None,
            when_stuck: WhenStuck::Refuse,
            post_copy: PostCopy::Never,
            pause_before_switchover: false,
            throttle: ThrottleLimit(0),
            compression: CompressionConfig::default(),
            free_page_hints: true,
            verify: false,
            protocol: ProtocolVersions(PROTOCOL_VERSIONS),
            journal_directory,
            process: None,
            witness: None,
            timeouts: Timeouts::default(),
        }
    }

    /// How long the guest may be paused before COMMIT: the chosen bound, but no less than the
    /// downtime limit. If none was chosen: ten times that limit, and at least 5 s, or no bound if
    /// the migration is to switch over at any cost.
    #[must_use]
    pub fn downtime_abort(&self) -> Option<Duration> {
        let usual = || {
            (self.when_stuck != WhenStuck::SwitchOver).then(|| {
                LEAST_DOWNTIME_ABORT.max(self.downtime_limit.saturating_mul(DOWNTIME_ABORT_FACTOR))
            })
        };
        self.downtime_abort.or_else(usual).map(|bound| bound.max(self.downtime_limit))
    }

    /// The lanes on which the destination would fetch pages with post-copy.
    #[doc(hidden)]
    #[must_use]
    pub fn fetch_lanes(&self) -> FetchLanes {
        FetchLanes { faults: FAULT_LANES, background: self.channels.get() }
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            downtime: self.downtime_limit,
            rounds: self.max_rounds.get(),
            time: self.timeout,
            when_stuck: self.when_stuck,
        }
    }
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
}
