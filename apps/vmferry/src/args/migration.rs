//! The options of everything that migrates.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedI64ValueParser;
use clap::{Args, ValueEnum};
use vmferry::config::compression::CompressionWay;
use vmferry_wire::{PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN};

use super::units::{parse_bytes, parse_duration, parse_rate};

/// Limits and ways of a migration.
#[derive(Clone, Debug, Args)]
pub struct MigrationOptions {
    /// Data channels, 1 to 16.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub channels: u8,
    /// Longest accepted downtime.
    #[arg(long, default_value = "300ms", value_parser = parse_duration, value_name = "TIME")]
    pub downtime_limit: Duration,
    /// How long the guest may be paused before COMMIT, whatever was predicted: then the migration
    /// is given up and the guest runs on here. By default ten times --downtime-limit, at least 5s;
    /// with --when-stuck switch-over there is no bound.
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub downtime_abort: Option<Duration>,
    /// Cap in bytes per second, such as 100M or 350MiB/s, or in bits, as in 1Gbit/s.
    #[arg(long, value_parser = parse_rate, value_name = "RATE")]
    pub max_bandwidth: Option<u64>,
    /// Most rounds with the guest running.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_rounds: u32,
    /// Most time with the guest running.
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub timeout: Option<Duration>,
    /// For how long a lost link is made again before the migration is given up, the guest running on here
    /// meanwhile; 0s gives up at once.
    #[arg(long, default_value = "30s", value_parser = parse_duration, value_name = "TIME")]
    pub reconnect_timeout: Duration,
    /// When rounds or time are used up.
    #[arg(long, value_enum, default_value_t = WhenStuck::Refuse)]
    pub when_stuck: WhenStuck,
    /// Do everything but the switchover until `vmferry switch-over` allows it. The guest runs on here meanwhile and is kept
    /// in step, a round a second.
    #[arg(long)]
    pub pause_before_switchover: bool,
    /// Take up to so much of the vCPUs' time, in per cent, from a guest that writes faster than the link
    /// carries; of a QEMU by a control group. 0 takes none.
    #[arg(long, default_value_t = 0, value_name = "PERCENT",
          value_parser = clap::value_parser!(u8).range(0..=99))]
    pub throttle: u8,
    /// What is done to pages on their way: auto (by measurement), none, delta (only what has changed of pages
    /// sent before), lz4, zstd, zstd:LEVEL (1 to 19), zlib, or zlib:LEVEL (1 to 9).
    #[arg(long, default_value = "auto", value_name = "WAY")]
    pub compress: CompressionWay,
    /// With a fixed way, when the link waits and compressors are busy: pages go as they are (raw), or the
    /// link waits (wait).
    #[arg(long, value_enum, default_value_t = WhenBusy::Raw)]
    pub when_busy: WhenBusy,
    /// Threads that read and compress pages; by default one for each processor, at most 16.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub workers: Option<u8>,
    /// Most memory for copies of pages that are written again and again, of which only the changes are
    /// sent; 0 for none.
    #[arg(long, default_value = "256M", value_parser = parse_bytes, value_name = "BYTES")]
    pub delta_memory: u64,
    /// Speak this version of the protocol only, such as the one of the release before while hosts are upgraded
    /// (docs/upgrading.md); by default the newest that the destination speaks too.
    #[arg(long, value_name = "VERSION", value_parser = parse_protocol())]
    pub protocol: Option<u16>,
    /// Send free pages too, even if the guest has a balloon whose driver would say which these are.
    #[arg(long)]
    pub no_free_page_hints: bool,
    /// Write what happens into this file, one JSON object per line, for `vmferry report`.
    #[arg(long, value_name = "FILE")]
    pub save_run: Option<PathBuf>,
}

/// A version of the protocol that this release speaks.
pub fn parse_protocol() -> RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(i64::from(PROTOCOL_VERSION_MIN)..=PROTOCOL_VERSION_MAX.into())
}

/// What to do when a migration does not converge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenStuck {
    /// The guest stays.
    Refuse,
    /// Hand over with the downtime that it takes.
    SwitchOver,
}

/// What becomes of pages for which no compressor is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenBusy {
    /// They go as they are.
    Raw,
    /// They wait.
    Wait,
}

impl From<WhenBusy> for vmferry::config::compression::WhenBusy {
    fn from(option: WhenBusy) -> Self {
        match option {
            WhenBusy::Raw => Self::Raw,
            WhenBusy::Wait => Self::Wait,
        }
    }
}
