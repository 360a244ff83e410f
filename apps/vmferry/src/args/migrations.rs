//! The options of commands about a migration that is under way, or that might be.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::units::{Cap, parse_cap, parse_duration, parse_rate};

/// `vmferry set`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("limit").required(true).multiple(true))]
#[command(after_help = "\
Examples:
  vmferry set web --max-bandwidth 50M
  vmferry set web --max-bandwidth 1Gbit/s --downtime-limit 500ms
  vmferry set web --max-bandwidth none
  vmferry set web --throttle 80 --max-rounds 50")]
pub struct SetOptions {
    /// Name of the guest that is being sent, or path of its control socket.
    pub guest: String,
    /// Cap in bytes per second from now on, such as 100M or 1Gbit/s; none takes the cap back.
    #[arg(long, value_parser = parse_cap, value_name = "RATE", group = "limit")]
    pub max_bandwidth: Option<Cap>,
    /// Longest accepted downtime from now on.
    #[arg(long, value_parser = parse_duration, value_name = "TIME", group = "limit")]
    pub downtime_limit: Option<Duration>,
    /// Most rounds with the guest running, those that were sent already among them.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), value_name = "NUMBER", group = "limit")]
    pub max_rounds: Option<u32>,
    /// Take up to so much of the vCPUs' time, in per cent, from a guest that writes faster than the link carries; 0 gives
    /// all of it back.
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=99), value_name = "PERCENT", group = "limit")]
    pub throttle: Option<u8>,
}

/// `vmferry estimate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Watching costs the guest what a migration's dirty log costs it, and sends nothing.

Examples:
  vmferry estimate web
  vmferry estimate web --max-bandwidth 1Gbit/s --downtime-limit 50ms
  vmferry estimate web --time 30s --json
  vmferry estimate --qemu /run/qemu/web.qmp --max-bandwidth 10Gbit/s")]
pub struct EstimateOptions {
    /// Name of the guest, or path of its control socket.
    #[arg(required_unless_present = "qemu", conflicts_with = "qemu")]
    pub guest: Option<String>,
    /// Watch the guest of the QEMU that has this QMP socket. For one that can't be attached to QEMU says what it writes.
    #[arg(long, value_name = "QMP_SOCKET")]
    pub qemu: Option<PathBuf>,
    /// For how long the guest is watched, at most 10 minutes.
    #[arg(long, default_value = "5s", value_parser = parse_duration, value_name = "TIME")]
    pub time: Duration,
    /// What the link carries, in bytes per second such as 350MiB/s, or in bits as in 1Gbit/s.
    #[arg(long, default_value = "1Gbit/s", value_parser = parse_rate, value_name = "RATE")]
    pub max_bandwidth: u64,
    /// Longest accepted downtime.
    #[arg(long, default_value = "300ms", value_parser = parse_duration, value_name = "TIME")]
    pub downtime_limit: Duration,
    /// Most rounds with the guest running.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..), value_name = "NUMBER")]
    pub max_rounds: u32,
}

/// `vmferry metrics`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without --listen it prints the metrics once, as a node exporter's textfile collector takes them.

Examples:
  vmferry metrics
  vmferry metrics > /var/lib/prometheus/node-exporter/vmferry.prom
  vmferry metrics --listen 127.0.0.1:9188     # serves GET /metrics until it is ended")]
pub struct MetricsOptions {
    /// Serve them to Prometheus at this address, to whoever reaches it.
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
}
