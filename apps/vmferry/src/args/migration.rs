//! The options of commands that migrate a guest.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedI64ValueParser;
use clap::{Args, ValueEnum};
use vmferry::config::compression::CompressionWay;
use vmferry_wire::{PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN};

use super::units::{parse_bytes, parse_duration, parse_rate};

/// Limits and settings of a migration.
#[derive(Clone, Debug, Args)]
pub struct MigrationOptions {
    /// Data channels, 1 to 16.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub channels: u8,
    /// Longest accepted downtime.
    #[arg(long, default_value = "300ms", value_parser = parse_duration, value_name = "TIME")]
    pub downtime_limit: Duration,
    /// Longest pause before COMMIT, whatever was predicted; after it the migration is cancelled and
    /// the guest resumes here. By default ten times --downtime-limit, at least 5s; unlimited with
    /// --when-stuck switch-over.
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub downtime_abort: Option<Duration>,
    /// Bandwidth cap in bytes per second, such as 100M or 350MiB/s, or in bits, such as 1Gbit/s.
    #[arg(long, value_parser = parse_rate, value_name = "RATE")]
    pub max_bandwidth: Option<u64>,
    /// Most rounds while the guest runs.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_rounds: u32,
    /// Longest time that rounds may take while the guest runs.
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub timeout: Option<Duration>,
    /// How long to try to reconnect a lost link before the migration is cancelled. The guest runs
    /// here meanwhile; 0s cancels at once.
    #[arg(long, default_value = "30s", value_parser = parse_duration, value_name = "TIME")]
    pub reconnect_timeout: Duration,
    /// What to do when --max-rounds or --timeout is used up.
    #[arg(long, value_enum, default_value_t = WhenStuck::Refuse)]
    pub when_stuck: WhenStuck,
    /// Run the guest at the destination before all its pages have arrived; it fetches the others
    /// from here when it touches them. Until it has all, it needs both hosts (docs/post-copy.md).
    #[arg(long, value_enum, default_value_t = PostCopy::Never, value_name = "WHEN")]
    pub post_copy: PostCopy,
    /// Hold the migration before its switchover until `vmferry switch-over`. The guest runs here
    /// meanwhile, and a round a second keeps the destination up to date.
    #[arg(long)]
    pub pause_before_switchover: bool,
    /// Throttle the vCPUs of a guest that writes faster than the link carries, by up to this
    /// percentage; a QEMU's by a control group. 0 never throttles.
    #[arg(long, default_value_t = 0, value_name = "PERCENT",
          value_parser = clap::value_parser!(u8).range(0..=99))]
    pub throttle: u8,
    /// Compression of pages: auto (by measurement), none, delta (only the changes of pages that
    /// were sent before), lz4, zstd, zstd:LEVEL (1 to 19), zlib, or zlib:LEVEL (1 to 9).
    #[arg(long, default_value = "auto", value_name = "WAY")]
    pub compress: CompressionWay,
    /// When a fixed compression method can't keep the link busy: send pages uncompressed (raw), or
    /// let the link wait (wait).
    #[arg(long, value_enum, default_value_t = WhenBusy::Raw)]
    pub when_busy: WhenBusy,
    /// Threads that read and compress pages; by default one per processor, at most 64.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub workers: Option<u8>,
    /// Memory for copies of frequently written pages, so that only their changes are sent; 0 for
    /// none.
    #[arg(long, default_value = "256M", value_parser = parse_bytes, value_name = "BYTES")]
    pub delta_memory: u64,
    /// Speak only this version of the protocol, such as the previous release's during an upgrade
    /// (docs/upgrading.md); by default the newest that both sides speak.
    #[arg(long, value_name = "VERSION", value_parser = parse_protocol())]
    pub protocol: Option<u16>,
    /// Send free pages too, even if the guest has a balloon whose driver hints them.
    #[arg(long)]
    pub no_free_page_hints: bool,
    /// Write the events of the migration to this file, one JSON object per line, for
    /// `vmferry report`.
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
    /// Cancel the migration; the guest stays at the source.
    Refuse,
    /// Switch over, however long the downtime is.
    SwitchOver,
    /// Switch over with post-copy: the guest fetches the remaining pages while it runs.
    PostCopy,
}

/// When to switch over with post-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PostCopy {
    /// Every page is sent before the guest runs at the destination.
    Never,
    /// If the guest writes faster than the link carries.
    Auto,
    /// After the first round.
    Now,
}

impl From<PostCopy> for vmferry::config::PostCopy {
    fn from(option: PostCopy) -> Self {
        match option {
            PostCopy::Never => Self::Never,
            PostCopy::Auto => Self::Auto,
            PostCopy::Now => Self::Now,
        }
    }
}

/// What happens to pages when no compressor is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenBusy {
    /// They are sent uncompressed.
    Raw,
    /// They wait for a compressor.
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
