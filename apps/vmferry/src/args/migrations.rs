//! The options of `vmferry set`, `vmferry estimate` and `vmferry metrics`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::migration::PostCopy;
use super::units::{Cap, parse_cap, parse_duration, parse_rate};

/// `vmferry set`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("limit").required(true).multiple(true))]
#[command(after_help = "\
Examples:
  vmferry set web --max-bandwidth 50M
  vmferry set web --max-bandwidth 1Gbit/s --downtime-limit 500ms
  vmferry set web --max-bandwidth none
  vmferry set web --throttle 80 --max-rounds 50
  vmferry set web --post-copy now")]
pub struct SetOptions {
    /// Name of the guest that is being migrated, or path of its control socket.
    pub guest: String,
    /// New bandwidth cap in bytes per second, such as 100M or 1Gbit/s; none removes the cap.
    #[arg(long, value_parser = parse_cap, value_name = "RATE", group = "limit")]
    pub max_bandwidth: Option<Cap>,
    /// New longest accepted downtime.
    #[arg(long, value_parser = parse_duration, value_name = "TIME", group = "limit")]
    pub downtime_limit: Option<Duration>,
    /// Most rounds while the guest runs, counted from the start of the migration.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), value_name = "NUMBER",
          group = "limit")]
    pub max_rounds: Option<u32>,
    /// Throttle the vCPUs of a guest that writes faster than the link carries, by up to this
    /// percentage; 0 stops throttling.
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=99), value_name = "PERCENT",
          group = "limit")]
    pub throttle: Option<u8>,
    /// Switch over with post-copy: now, after the round in progress; auto, if the rounds do not
    /// converge; or never.
    #[arg(long, value_enum, value_name = "WHEN", group = "limit", num_args = 0..=1,
          default_missing_value = "now", require_equals = false)]
    pub post_copy: Option<PostCopy>,
}

/// `vmferry estimate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Watching slows the guest as much as the dirty log of a migration does. Nothing is sent.

Examples:
  vmferry estimate web
  vmferry estimate web --max-bandwidth 1Gbit/s --downtime-limit 50ms
  vmferry estimate web --time 30s --json
  vmferry estimate --qemu /run/qemu/web.qmp --max-bandwidth 10Gbit/s")]
pub struct EstimateOptions {
    /// Name of the guest, or path of its control socket.
    #[arg(required_unless_present = "qemu", conflicts_with = "qemu")]
    pub guest: Option<String>,
    /// Watch the guest of the QEMU with this QMP socket. For a guest that can't be attached, QEMU
    /// itself reports what it writes.
    #[arg(long, value_name = "QMP_SOCKET")]
    pub qemu: Option<PathBuf>,
    /// How long to watch the guest, at most 10 minutes.
    #[arg(long, default_value = "5s", value_parser = parse_duration, value_name = "TIME")]
    pub time: Duration,
    /// Bandwidth of the link in bytes per second, such as 350MiB/s, or in bits, such as 1Gbit/s.
    #[arg(long, default_value = "1Gbit/s", value_parser = parse_rate, value_name = "RATE")]
    pub max_bandwidth: u64,
    /// Longest accepted downtime.
    #[arg(long, default_value = "300ms", value_parser = parse_duration, value_name = "TIME")]
    pub downtime_limit: Duration,
    /// Most rounds while the guest runs.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..),
          value_name = "NUMBER")]
    pub max_rounds: u32,
}

/// `vmferry metrics`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without --listen, the metrics are printed once, in the format that the textfile collector of a node
exporter reads.

Examples:
  vmferry metrics
  vmferry metrics > /var/lib/prometheus/node-exporter/vmferry.prom
  vmferry metrics --listen 127.0.0.1:9188     # serves GET /metrics until the command is stopped")]
pub struct MetricsOptions {
    /// Serve the metrics at this address, to every client that can reach it.
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
}
