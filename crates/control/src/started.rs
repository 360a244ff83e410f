//! The first event of a migration: its session number and its settings.

use serde::Serialize;
use vmferry::SourceConfig;
use vmferry::config::BandwidthCap;
use vmferry_wire::SessionId;

/// The event.
#[derive(Clone, Debug, Serialize)]
pub struct Started {
    event: &'static str,
    /// The migration's session, as in the journals, logs and reports of both hosts.
    run: SessionId,
    guest: String,
    to: String,
    /// The guest's memory in bytes.
    memory_bytes: u64,
    release: &'static str,
    limits: StartedLimits,
    compression: String,
    channels: u8,
}

#[derive(Clone, Debug, Serialize)]
struct StartedLimits {
    downtime_limit_ms: f64,
    /// How long the guest may be paused before COMMIT.
    downtime_abort_ms: Option<f64>,
    /// Bytes per second.
    max_bandwidth: Option<u64>,
    max_rounds: u32,
    /// Percent.
    throttle: u8,
    timeout_ms: Option<f64>,
}

impl Started {
    /// Describes a migration before it starts.
    #[must_use]
    pub fn new(guest: &str, memory_bytes: u64, to: &str, config: &SourceConfig) -> Self {
        Self {
            event: "started",
            run: config.session,
            guest: guest.to_owned(),
            to: to.to_owned(),
            memory_bytes,
            release: env!("CARGO_PKG_VERSION"),
            limits: StartedLimits {
                downtime_limit_ms: config.downtime_limit.as_secs_f64() * 1e3,
                downtime_abort_ms: config.downtime_abort().map(|time| time.as_secs_f64() * 1e3),
                max_bandwidth: config.max_bandwidth.map(BandwidthCap::get),
                max_rounds: config.max_rounds.get(),
                throttle: config.throttle.get(),
                timeout_ms: config.timeout.map(|time| time.as_secs_f64() * 1e3),
            },
            compression: config.compression.way.to_string(),
            channels: config.channels.get(),
        }
    }
}
